"""Instruction rows of uneven length, made by rule: the same rows on every machine, and nothing to download."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

_WHO = ["A teacher", "The gardener", "Our neighbour", "A young engineer", "The librarian", "An old sailor", "My sister"]
_DOES = ["explains", "repairs", "describes", "compares", "measures", "paints", "collects", "forgets", "improves"]
_WHAT = ["the small bridge", "a broken clock", "the weather of spring", "three kinds of bread", "a map of the coast"]
_WHAT += ["the price of wood", "a letter from home", "the night train", "the rules of the game", "an empty bottle"]
_WHEN = ["before sunrise", "after a long winter", "on the way to work", "without a word", "in front of the class"]
_WHEN += ["for the second time", "while the water boils", "because nobody else would", "with great care"]
_TASKS = ["Summarise the text", "Rewrite the text for a child", "List what happens in the text", "Continue the story"]
_TASKS += ["Say who does what", "Turn the text into a short report", "Answer as the person in the text would"]


def make_rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows with `prompt` and `completion`; both lengths spread like those of common instruction sets.

    Args:
        number: how many rows.
        seed: another seed, other rows.
    """
    draw = random.Random(seed)
    return [_row(draw) for _ in range(number)]


def write_rows(path: Path, number: int, seed: int = 0) -> Path:
    """The rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(number, seed)), encoding="utf-8")
    return path


def _row(draw: random.Random) -> dict[str, str]:
    # Log-normal numbers of sentences, a long tail to the right; about 40 to 400 tokens for prompt and answer together.
    given = min(14, max(1, round(math.exp(draw.gauss(0.9, 0.7)))))
    told = min(14, max(1, round(math.exp(draw.gauss(1.1, 0.7)))))
    text = " ".join(_sentence(draw) for _ in range(given))
    answer = " ".join(_sentence(draw) for _ in range(told))
    prompt = f"### Instruction:\n{draw.choice(_TASKS)}.\n\n### Input:\n{text}\n\n### Response:\n"
    return {"prompt": prompt, "completion": answer}


def _sentence(draw: random.Random) -> str:
    words = [draw.choice(_WHO), draw.choice(_DOES), draw.choice(_WHAT), draw.choice(_WHEN)]
    if draw.random() < 0.4:
        words += ["and", draw.choice(_DOES), draw.choice(_WHAT)]
    return " ".join(words) + "."
