"""Greedy answers to held-out prompts, before and after training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from lowmem.data import prompts_and_answers
from lowmem.data.render import plain_prompt
from lowmem.durable import write_text
from lowmem.errors import UserError
from lowmem.model import unwrapped
from lowmem.observers import Event

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

Prompt: TypeAlias = str | list[dict[str, Any]]


class ExactMatch:
    """Observer: the share of held-out prompts answered to the letter, in `result` before and after training.

    Args:
        source: a data file of prompts with reference answers.
        batch_size: prompts answered at once.
    """

    def __init__(self, source: str, batch_size: int = 100) -> None:
        self.source = source
        self.batch_size = batch_size
        self.before: list[str] | None = None

    def __call__(self, event: Event) -> None:
        """Answer at `begin` and at `finish`."""
        if event.kind == "begin":
            self.pairs = prompts_and_answers(self.source, event.trainer.data)
            self.before = self._first_answers(event)
        elif event.kind == "finish":
            self._report(event.trainer, self._answer(event.trainer, "after"))

    def _first_answers(self, event: Event) -> list[str]:
        """Those of the untrained model: made now, or, in a resumed run, taken from its folder."""
        folder = event.trainer.books.folder
        kept = folder / "answers_before.json" if folder else None
        if kept and kept.is_file():
            return list(json.loads(kept.read_text(encoding="utf-8")))
        if event.metrics["step"]:
            raise UserError("data.exact_match: the resumed run has no answers_before.json, made before its first step")
        answers = self._answer(event.trainer, "before")
        if kept:
            write_text(kept, json.dumps(answers, ensure_ascii=False, indent=1))
        return answers

    def _answer(self, trainer: Trainer, moment: str) -> list[str]:
        trainer.emit("status", text=f"answering {len(self.pairs)} held-out prompts {moment} training")
        longest = max(len(trainer.tokenizer(answer)["input_ids"]) for _, answer in self.pairs)
        with trainer.inference() as model:
            # A longer answer than the longest reference is wrong anyway.
            return generate(model, trainer.tokenizer, [p for p, _ in self.pairs], longest + 8, self.batch_size)

    def _report(self, trainer: Trainer, after: list[str]) -> None:
        references = [answer.strip() for _, answer in self.pairs]
        assert self.before is not None
        trainer.result["exact_match_before"] = _share(self.before, references)
        trainer.result["exact_match_after"] = _share(after, references)
        trainer.result["exact_match_rows"] = len(references)
        answers = [
            {"prompt": _text(prompt), "reference": reference, "before": before, "after": answer}
            for (prompt, _), reference, before, answer in zip(self.pairs, references, self.before, after, strict=True)
        ]
        trainer.result["samples"] = answers[:3]
        if folder := trainer.books.folder:
            lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
            (folder / "answers.jsonl").write_text("".join(lines), encoding="utf-8")


@torch.no_grad()
def generate(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int, batch_size: int
) -> list[str]:
    """Greedy answers, in the order of the prompts.

    Args:
        model: in evaluation mode.
        tokenizer: renders chat prompts with its template.
        prompts: texts, or lists of messages.
        max_new_tokens: tokens after which an answer is cut.
        batch_size: prompts per call; like lengths go together.
    """
    rows = [_ids(tokenizer, prompt) for prompt in prompts]
    stops = _stops(model, tokenizer)
    answers: dict[int, str] = {}
    for batch in _batches(rows, batch_size):
        inputs, mask = _left_padded([rows[i] for i in batch], stops[0])
        device = next(model.parameters()).device
        output = model.generate(  # type: ignore[operator]
            input_ids=inputs.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=stops,
            pad_token_id=stops[0],
        )
        texts = tokenizer.batch_decode(output[:, inputs.shape[1] :], skip_special_tokens=True)
        answers.update({i: text.strip() for i, text in zip(batch, texts, strict=True)})
    return [answers[i] for i in range(len(rows))]


def _ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(plain_prompt(prompt))["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _stops(model: nn.Module, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's and the model's own."""
    own = getattr(getattr(unwrapped(model), "generation_config", None), "eos_token_id", None)
    stops = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    found = list(dict.fromkeys(s for s in stops if s is not None))
    if not found:
        raise UserError("tokenizer: it has no end-of-sequence token, so no answer would ever end")
    return found


def _batches(rows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = [[pad] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def _share(answers: Sequence[str], references: Sequence[str]) -> float:
    return sum(a == r for a, r in zip(answers, references, strict=True)) / len(references)


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
