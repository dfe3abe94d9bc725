"""Rows of token ids as text again, cut where supervision, loss weight or kind of token change."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowmem.data.statistics import supervised
from lowmem.strategy import Sample

UNFINISHED = "\ufffd"
# a character has up to four bytes, and so many tokens at the most; some decoders hold a space back
_LONGEST_GROUP = 6


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind.

    Attributes:
        text: what they stand for; `⟨17⟩` for an id without a text.
        tokens: how many they are.
        supervised: they are prediction targets.
        weight: their loss weight (1 where the row has none).
        special: a special token, such as the end of a turn.
    """

    text: str
    tokens: int
    supervised: bool
    weight: float
    special: bool


class Reader:
    """Turns rows into pieces.

    Args:
        tokenizer: a transformers tokenizer; with None the ids themselves are shown.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.specials: set[int] = set()
        if tokenizer is not None:
            added = getattr(tokenizer, "added_tokens_decoder", {}).items()
            self.specials = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}

    def pieces(self, sample: Sample) -> list[Piece]:
        """The whole row; runs of one kind are one piece, every special token is a piece of its own."""
        found: list[Piece] = []
        for piece in self._tokens(sample):
            last = found[-1] if found else None
            if last and not piece.special and _kind(last) == _kind(piece):
                found[-1] = Piece(last.text + piece.text, last.tokens + piece.tokens, *_kind(piece))
            else:
                found.append(piece)
        return found

    def _tokens(self, sample: Sample) -> Iterator[Piece]:
        """Pieces as short as they can be: a character that is spread over several tokens stays in one."""
        ids = [int(number) for number in sample["input_ids"]]
        learnt = supervised(sample)
        weights = np.asarray(sample.get("loss_weights", np.ones(len(ids))))
        kinds = [
            (bool(learnt[i]), float(weights[i]) if learnt[i] else 1.0, number in self.specials)
            for i, number in enumerate(ids)
        ]
        before = start = 0  # the piece before gives the context in which a decoder sets its spaces
        for end in range(1, len(ids) + 1):
            border = end == len(ids) or kinds[end] != kinds[start] or kinds[start][2]
            text = self._text(ids, before, start, end)
            if not border and (not text or text.endswith(UNFINISHED)) and end - start < _LONGEST_GROUP:
                continue
            yield Piece(text or "".join(f"⟨{number}⟩" for number in ids[start:end]), end - start, *kinds[start])
            before, start = start, end

    def _text(self, ids: list[int], before: int, start: int, end: int) -> str:
        if self.tokenizer is None:
            return ""
        known, whole = self._decode(ids[before:start]), self._decode(ids[before:end])
        return whole[len(known) :] if whole.startswith(known) else self._decode(ids[start:end])

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        try:
            return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        except (OverflowError, IndexError, TypeError):  # rows of token ids may hold what no vocabulary has
            return ""


def visible(text: str) -> str:
    """Control characters spelt out, line breaks and tabs aside: data must not steer a terminal or a page."""
    return "".join(char if _harmless(char) else f"\\u{ord(char):04x}" for char in text)


def _harmless(char: str) -> bool:
    # \u200c and \u200d join letters and emoji; Zs are the spaces of other scripts
    return char.isprintable() or char in "\n\t\u200c\u200d" or unicodedata.category(char) == "Zs"


def _kind(piece: Piece) -> tuple[bool, float, bool]:
    return piece.supervised, piece.weight, piece.special
