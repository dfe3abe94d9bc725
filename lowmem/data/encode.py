"""Text with supervised character spans -> token ids and labels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowmem.data.chat import Span
from lowmem.data.content import IGNORE, Float32, Int32
from lowmem.errors import UserError

# token ids, labels and, where they are not all 1, loss weights
Encoded: TypeAlias = tuple[Int32, Int32, Float32 | None]
# something to stand before a piece of text, so that the tokenizer does not take it for the start of a text
ANCHORS = ("\n", "|", ":", "1", "a")


@dataclass(frozen=True)
class Rendered:
    """A row as text.

    Attributes:
        text: all of it.
        spans: the supervised parts, as character positions, in order and apart.
        plain: BOS, EOS and the like are not in the text yet (a chat template writes its own).
        weights: loss weight of every span; None: all are 1.
    """

    text: str
    spans: list[Span]
    plain: bool
    weights: list[float] | None = None


class Encoder:
    """A tokenizer that says which tokens lie in which part of the text.

    The whole text is tokenised at once. Where a token would lie on both sides of a border between prompt and answer,
    the pieces are tokenised one by one instead, which is what the model meets when it answers; the ids must then decode
    to the same text. Labels go by position, never by token id.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        self.head, self.tail = self._surroundings()
        # some tokenizers leave white space out of a token's offsets; then they do not tell on which side it lies
        self.hidden = tuple(space for space in " \n\t\r" if self.fast and self._hides(space))

    def encode(self, rows: list[Rendered]) -> list[Encoded | None]:
        """Token ids, labels (-100 outside the spans) and loss weights of every row, each of shape (length,).

        A row whose weights are all 1 has none (None); others are 0 outside the spans.

        None stands for a row whose answer cannot be told from its prompt in this tokenizer's tokens.
        """
        offsets = self.fast and any(row.spans != [(0, len(row.text))] for row in rows)
        batch = self.tokenizer(
            [row.text for row in rows],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=offsets,
            verbose=False,
        )
        found: list[Encoded | None] = []
        for index, row in enumerate(rows):
            ids = batch["input_ids"][index]
            inside = self._inside(row, ids, np.asarray(batch["offset_mapping"][index]) if offsets else None)
            found.append(None if inside is None else self._label(row, *inside))
        return found

    def _inside(
        self, row: Rendered, ids: list[int], offsets: NDArray[np.int64] | None
    ) -> tuple[list[int], Float32] | None:
        """Token ids, and for each its loss weight (0: it is not supervised)."""
        weights = row.weights or [1.0] * len(row.spans)
        if row.spans == [(0, len(row.text))]:
            return ids, np.full(len(ids), weights[0], np.float32)
        if offsets is None or any(self._hidden_at(row.text, border) for span in row.spans for border in span):
            return self._by_pieces(row, ids)
        inside = np.zeros(len(ids), np.float32)
        starts, ends = offsets.reshape(-1, 2).T
        for (a, b), weight in zip(row.spans, weights, strict=True):
            # a token without width goes with the character after it
            here = ((starts < b) & (ends > a)) | ((starts == ends) & (starts >= a) & (starts < b))
            if (here & (starts < ends) & ((starts < a) | (ends > b))).any():
                return self._by_pieces(row, ids)
            inside[here] = weight
        return ids, inside

    def _by_pieces(self, row: Rendered, whole: list[int]) -> tuple[list[int], Float32] | None:
        borders = sorted({0, len(row.text), *(border for span in row.spans for border in span)})
        weights = row.weights or [1.0] * len(row.spans)
        starts = {start: weight for (start, _), weight in zip(row.spans, weights, strict=True)}
        ids: list[int] = []
        inside: list[float] = []
        for start, end in pairwise(borders):
            joined = self._decode(whole if end == len(row.text) else self._ids(row.text[:end]))
            for piece in self._candidates(row.text[start:end], row.text[:start]):
                if self._decode(ids + piece) == joined:
                    break
            else:
                return None
            ids += piece
            inside += [starts.get(start, 0.0)] * len(piece)
        return ids, np.asarray(inside, np.float32)

    def _candidates(self, piece: str, before: str) -> list[list[int]]:
        """Ways to tokenise a piece that follows other text; SentencePiece puts a space before a text of its own."""
        found = [self._ids(piece)]
        for anchor in (*ANCHORS, before.rstrip()[-1:]) if before else ():
            first, both = self._ids(anchor), self._ids(anchor + piece)
            if first and both[: len(first)] == first:
                found.append(both[len(first) :])
        return found

    def _label(self, row: Rendered, ids: list[int], inside: Float32) -> Encoded:
        if row.plain:
            head = [] if self.head and ids[: len(self.head)] == self.head else self.head
            tail = [] if self.tail and ids[-len(self.tail) :] == self.tail else self.tail
            if self.eos is not None and self.eos not in tail and ids[-1:] != [self.eos]:
                tail = [*tail, self.eos]
            ids = [*head, *ids, *tail]
            ends = bool(row.spans) and row.spans[-1][1] == len(row.text)
            last = (row.weights or [1.0])[-1] if ends else 0.0
            inside = np.concatenate([np.zeros(len(head)), inside, np.full(len(tail), last)]).astype(np.float32)
        tokens = np.asarray(ids, np.int32)
        labels = np.where(inside > 0, tokens, np.int32(IGNORE)).astype(np.int32)
        return tokens, labels, None if ((inside == 0) | (inside == 1)).all() else inside

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and after a text."""
        for text in ("a", "1", self.tokenizer.eos_token):
            bare = self._ids(text) if text else []
            full = list(self.tokenizer(text)["input_ids"]) if bare else []
            for at in range(len(full) - len(bare) + 1):
                if bare and full[at : at + len(bare)] == bare:
                    return full[:at], full[at + len(bare) :]
        raise UserError(f"{type(self.tokenizer).__name__}: cannot tell the special tokens it puts around a text")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _hides(self, space: str) -> bool:
        text = f"a{space}b"
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        covered = {position for start, end in offsets for position in range(start, end)}
        return len(covered) < len(text)

    def _hidden_at(self, text: str, border: int) -> bool:
        return any(char in self.hidden for char in text[max(border - 1, 0) : border + 1])
