"""Chunks of rows -> flat arrays of token ids and labels: the unit of work, in this process or in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowmem.config import DataConfig
from lowmem.data.encode import Encoder, Rendered
from lowmem.data.read import BadRowError, Row, read_rows
from lowmem.data.render import Renderer
from lowmem.data.report import DataReport
from lowmem.data.rows import IGNORE, Dropped, Float32, Int32, Tokens
from lowmem.errors import UserError
from lowmem.strategy import Sample

ROWS_AT_ONCE = 256
NO_BORDER = "no token border before the answer"

# a row and where it stands; None: no row could be read there, and the text is the reason to count
Item: TypeAlias = tuple[Row | None, str]


@dataclass
class Chunk:
    """What became of some rows, in their order.

    Attributes:
        num_items: rows looked at.
        report: their counts.
        input_ids, labels: the rows kept, int32, shape (tokens,).
        lengths: tokens of each row kept, int64, shape (rows,).
        loss_weights: weights of the rows that have any, float32.
        weight_lengths: weights of each row kept (0: it has none), int64, shape (rows,).
        borderless: where the first row stands whose answer cannot be told from its prompt.
        error: what stopped the work at a row; the arrays are not to be used then.
    """

    num_items: int
    report: DataReport = field(default_factory=DataReport)
    input_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    labels: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    loss_weights: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    weight_lengths: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    borderless: str = ""
    error: Exception | None = None

    def samples(self) -> list[Sample]:
        """The rows kept, as views."""
        found: list[Sample] = []
        start = first = 0
        for length, weights in zip(self.lengths.tolist(), self.weight_lengths.tolist(), strict=True):
            row: dict[str, Any] = {
                "input_ids": self.input_ids[start : start + length],
                "labels": self.labels[start : start + length],
            }
            if weights:
                row["loss_weights"] = self.loss_weights[first : first + weights]
            found.append(row)
            start, first = start + length, first + weights
        return found


def check_tokens(input_ids: Int32, labels: Int32, vocabulary: int) -> None:
    """Raise UserError where an id or a label is none of the model's tokens."""
    for name, ids in (("token id", input_ids), ("label", labels)):
        if len(ids) and (highest := int(ids.max())) >= vocabulary:
            raise UserError(
                f"data: the rows have the {name} {highest}, and the model knows {vocabulary:,} tokens; they were made "
                "with another tokenizer"
            )


def read_chunks(source: Any, data: DataConfig, skip: int = 0) -> Iterator[list[Item]]:
    """The rows of a source, `ROWS_AT_ONCE` at a time, without the first `skip` of them.

    Raises:
        UserError: as `read_rows`; the rows before the fault have been given out by then.
    """
    items = islice(read_items(read_rows, source, data), skip, None)
    while True:
        chunk: list[Item] = []
        try:
            for item in islice(items, ROWS_AT_ONCE):
                chunk.append(item)  # noqa: PERF402 - what came before a fault is kept
        except Exception:
            if chunk:
                yield chunk
            raise
        if not chunk:
            return
        yield chunk


def read_items(read: Any, source: Any, data: DataConfig) -> Iterator[Item]:
    """Rows as `read(source, on_bad)` gives them, with the bad ones in their place where they are to be skipped."""
    bad: list[Item] = []

    def on_bad(error: BadRowError) -> None:
        if data.on_bad_row == "error":
            raise error
        bad.append((None, error.reason))

    for item in read(source, on_bad):
        if bad:
            yield from bad
            bad.clear()
        yield item
    yield from bad


class RowTokenizer:
    """Renders and tokenises rows; the same rows give the same chunk in every process.

    Args:
        tokenizer: a transformers tokenizer; None is enough for rows of token ids.
        data: format, train_on and on_bad_row.
        max_length: longer rows are cut at their end (tokens).
    """

    def __init__(self, tokenizer: Any, data: DataConfig, max_length: int):
        self.tokenizer, self.data, self.max_length = tokenizer, data, max_length
        self.renderer = Renderer(tokenizer, data.format, data.train_on)
        self.encoder: Encoder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokenizer, self.data, self.max_length)

    def __call__(self, items: list[Item]) -> Chunk:
        """Tokenise rows; an error is returned, not raised, so that it waits for the chunks before it."""
        chunk = Chunk(len(items))
        try:
            rows = self._encode(self._render(items, chunk), chunk)
            kept = [row for name, content in rows if (row := self._cut(name, content, chunk.report)) is not None]
        except Exception as error:
            chunk.error = error
            return chunk
        if kept:
            weights = [row.loss_weights for row in kept]
            chunk.input_ids = np.concatenate([row.input_ids for row in kept])
            chunk.labels = np.concatenate([row.labels for row in kept])
            chunk.lengths = np.asarray([len(row.input_ids) for row in kept], np.int64)
            chunk.weight_lengths = np.asarray([0 if w is None else len(w) for w in weights], np.int64)
            chunk.loss_weights = np.concatenate([np.empty(0, np.float32), *(w for w in weights if w is not None)])
        return chunk

    def _render(self, items: list[Item], chunk: Chunk) -> list[tuple[str, Rendered | Tokens, str]]:
        found, report = [], chunk.report
        for row, where in items:
            report.rows_read += 1
            if row is None:
                report.drop(where)
                continue
            try:
                found.append((*self.renderer.render(row, where), where))
            except BadRowError as error:
                if self.data.on_bad_row == "error":
                    raise
                report.drop(error.reason)
            except Dropped as dropped:
                report.drop(str(dropped))
        return found

    def _encode(self, rows: list[tuple[str, Rendered | Tokens, str]], chunk: Chunk) -> Iterator[tuple[str, Tokens]]:
        texts = [content for _, content, _ in rows if isinstance(content, Rendered)]
        if texts and self.encoder is None:
            self.encoder = Encoder(self.tokenizer)
        encoded = iter(self.encoder.encode(texts) if self.encoder and texts else [])
        for name, content, where in rows:
            if isinstance(content, Tokens):
                yield name, content
            elif (pair := next(encoded)) is not None:
                yield name, Tokens(*pair)
            else:
                chunk.report.drop(NO_BORDER)
                chunk.borderless = chunk.borderless or where

    def _cut(self, name: str, row: Tokens, report: DataReport) -> Tokens | None:
        """A row of at most `max_length` tokens, counted; None if nothing in it can be learnt."""
        length = min(len(row.input_ids), self.max_length)
        targets = row.labels != IGNORE
        targets[:1] = False  # nothing predicts the first token
        if row.loss_weights is not None:
            targets &= row.loss_weights > 0
        if not targets[:length].any():
            report.drop("prompt fills max_length" if targets.any() else "nothing to learn")
            return None
        report.rows += 1
        report.tokens += length
        report.supervised_tokens += int(targets[:length].sum())
        report.truncated += length < len(row.input_ids)
        report.longest = max(report.longest, length)
        report.formats[name] = report.formats.get(name, 0) + 1
        weights = None if row.loss_weights is None else row.loss_weights[:length]
        return Tokens(row.input_ids[:length], row.labels[:length], weights)


def require_learnable(report: DataReport, borderless: str, data: DataConfig) -> None:
    """Check what is left of a source.

    Raises:
        UserError: nothing can be learnt, or (on_bad_row: error) an answer cannot be told from its prompt.
    """
    require_borders(report, borderless, data)
    if not report.rows:
        why = f"left out: {report.reasons()}" if report.dropped else "the source is empty"
        hint = "; raise max_length" if "prompt fills max_length" in report.dropped else ""
        raise UserError(f"no supervised token in {report.rows_read} rows ({why}{hint})")


def require_borders(report: DataReport, borderless: str, data: DataConfig) -> None:
    """Raise UserError where a row's answer cannot be told from its prompt and no row may be skipped."""
    if report.dropped.get(NO_BORDER) and data.on_bad_row == "error":
        raise UserError(
            f"{report.dropped[NO_BORDER]} of {report.rows_read} rows: this tokenizer has no token border between "
            f"prompt and answer (first: {borderless}); on_bad_row: skip leaves them out"
        )
