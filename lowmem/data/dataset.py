"""Tokenised rows in flat arrays, and how they come about."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lowmem.config import DataConfig
from lowmem.data.encode import Encoded, Encoder, Rendered
from lowmem.data.read import BadRowError, read_rows
from lowmem.data.render import Renderer
from lowmem.data.report import DataReport
from lowmem.data.rows import IGNORE, Dropped, Float32, Int32, Tokens
from lowmem.errors import UserError
from lowmem.strategy import Sample

ROWS_AT_ONCE = 256
NO_BORDER = "no token border before the answer"


class TokenizedDataset(Sequence[Sample]):
    """Rows of token ids and labels; `ds[i]` gives views, not copies.

    Attributes:
        input_ids: all token ids, int32, shape (tokens,).
        labels: their labels (-100: no loss), int32, shape (tokens,).
        offsets: where rows start, and the end, int64, shape (rows + 1,).
        loss_weights: weights of the rows that have any, float32, one after the other.
        weight_offsets: where a row's weights start and end in `loss_weights` (nowhere: both are the same), int64,
            shape (rows + 1,).
        lengths: tokens of each row, int64, shape (rows,).
        report: what became of the rows of the source.
    """

    def __init__(
        self,
        input_ids: Int32,
        labels: Int32,
        offsets: NDArray[np.int64],
        loss_weights: Float32,
        weight_offsets: NDArray[np.int64],
        report: DataReport,
    ):
        self.input_ids, self.labels, self.offsets = input_ids, labels, offsets
        self.loss_weights, self.weight_offsets = loss_weights, weight_offsets
        self.lengths: NDArray[np.int64] = np.diff(offsets)
        self.report = report

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """A row: `input_ids` and `labels`, int32, shape (length,), and `loss_weights`, float32, where it has some."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start, end = self.offsets[number : number + 2]
        row: dict[str, Any] = {"input_ids": self.input_ids[start:end], "labels": self.labels[start:end]}
        start, end = self.weight_offsets[number : number + 2]
        if end > start:
            row["loss_weights"] = self.loss_weights[start:end]
        return row


def tokenize(source: Any, tokenizer: Any, data: DataConfig | None = None, max_length: int = 1024) -> TokenizedDataset:
    """Read, render and tokenise all rows of a source.

    Rows longer than `max_length` are cut at their end. A row left without a target is dropped and counted.

    Args:
        source: whatever `read_rows` takes; a `TokenizedDataset` is returned as it is.
        tokenizer: a transformers tokenizer; None is enough for rows of token ids.
        data: format, train_on and on_bad_row; its paths are not looked at.
        max_length: longest row kept, in tokens.

    Raises:
        UserError: the source or a row cannot be read, or nothing in it can be learnt.
    """
    if isinstance(source, TokenizedDataset):
        return source
    data = data or DataConfig()
    builder = _Builder(tokenizer, data, max_length)
    for row, where in read_rows(source, builder.bad):
        builder.add(row, where)
    return builder.finish()


class _Builder:
    """Collects rows; Python lists of token ids live for one batch of rows only."""

    def __init__(self, tokenizer: Any, data: DataConfig, max_length: int):
        self.data, self.max_length, self.report = data, max_length, DataReport()
        self.renderer = Renderer(tokenizer, data.format, data.train_on)
        self.encoder: Encoder | None = None
        self.waiting: list[tuple[str, Rendered | Tokens, str]] = []
        self.ids, self.labels, self.weights = array("i"), array("i"), array("f")
        self.offsets, self.weight_offsets = array("q", [0]), array("q", [0])
        self.borderless = ""

    def bad(self, error: BadRowError) -> None:
        if self.data.on_bad_row == "error":
            raise error
        self.report.rows_read += 1
        self.report.drop(error.reason)

    def add(self, row: Any, where: str) -> None:
        try:
            name, content = self.renderer.render(row, where)
        except BadRowError as error:
            self.bad(error)
            return
        except Dropped as dropped:
            self.report.drop(str(dropped))
        else:
            self.waiting.append((name, content, where))
        self.report.rows_read += 1
        if len(self.waiting) >= ROWS_AT_ONCE:
            self._encode()

    def _encode(self) -> None:
        texts = [content for _, content, _ in self.waiting if isinstance(content, Rendered)]
        if texts and self.encoder is None:
            self.encoder = Encoder(self.renderer.tokenizer)
        encoded: Iterator[Encoded | None] = iter(self.encoder.encode(texts) if self.encoder and texts else [])
        for name, content, where in self.waiting:
            if isinstance(content, Tokens):
                self._keep(name, content)
            elif (pair := next(encoded)) is not None:
                self._keep(name, Tokens(*pair))
            else:
                self.report.drop(NO_BORDER)
                self.borderless = self.borderless or where
        self.waiting = []

    def _keep(self, name: str, row: Tokens) -> None:
        """Cut a row, and append it if it teaches anything."""
        length = min(len(row.input_ids), self.max_length)
        targets = row.labels != IGNORE
        targets[:1] = False  # nothing predicts the first token
        if row.loss_weights is not None:
            targets &= row.loss_weights > 0
        if not targets[:length].any():
            self.report.drop("prompt fills max_length" if targets.any() else "nothing to learn")
            return
        self.ids.frombytes(row.input_ids[:length].tobytes())
        self.labels.frombytes(row.labels[:length].tobytes())
        self.offsets.append(len(self.ids))
        if row.loss_weights is not None:
            self.weights.frombytes(row.loss_weights[:length].tobytes())
        self.weight_offsets.append(len(self.weights))
        report = self.report
        report.rows += 1
        report.tokens += length
        report.supervised_tokens += int(targets[:length].sum())
        report.truncated += length < len(row.input_ids)
        report.longest = max(report.longest, length)
        report.formats[name] = report.formats.get(name, 0) + 1

    def finish(self) -> TokenizedDataset:
        self._encode()
        report = self.report
        if report.dropped.get(NO_BORDER) and self.data.on_bad_row == "error":
            raise UserError(
                f"{report.dropped[NO_BORDER]} of {report.rows_read} rows: this tokenizer has no token border between "
                f"prompt and answer (first: {self.borderless}); on_bad_row: skip leaves them out"
            )
        if not report.rows:
            why = f"left out: {report.reasons()}" if report.dropped else "the source is empty"
            hint = "; raise max_length" if "prompt fills max_length" in report.dropped else ""
            raise UserError(f"no supervised token in {report.rows_read} rows ({why}{hint})")
        return TokenizedDataset(
            np.frombuffer(self.ids, np.int32),
            np.frombuffer(self.labels, np.int32),
            np.frombuffer(self.offsets, np.int64),
            np.frombuffer(self.weights, np.float32),
            np.frombuffer(self.weight_offsets, np.int64),
            report,
        )
