"""Tokenised rows in flat arrays, and how they come about."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lowmem.config import DataConfig
from lowmem.data import cache
from lowmem.data.chunks import RowTokenizer, read_chunks, require_learnable
from lowmem.data.fingerprint import Fingerprint
from lowmem.data.report import DataReport
from lowmem.data.rows import Float32, Int32
from lowmem.data.store import Store, mapped
from lowmem.data.workers import in_order
from lowmem.errors import UserError
from lowmem.strategy import Sample

SPILL_FROM = 64 << 20  # bytes of arrays; above, they are files that are mapped


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

    @cached_property
    def digest(self) -> int:
        """A checksum of the rows' lengths and of up to a million token ids: other rows have another one."""
        step = max(1, len(self.input_ids) // 2**20)
        return zlib.crc32(self.input_ids[::step].tobytes(), zlib.crc32(self.lengths.tobytes()))

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

    Rows longer than `max_length` are cut at their end. A row left without a target is dropped and counted. Large files
    are tokenised once, and mapped from `data.cache_dir` afterwards.

    Args:
        source: whatever `read_rows` takes; a `TokenizedDataset` is returned as it is.
        tokenizer: a transformers tokenizer; None is enough for rows of token ids.
        data: format, train_on, on_bad_row, num_workers and cache_dir; its paths are not looked at.
        max_length: longest row kept, in tokens.

    Raises:
        UserError: the source or a row cannot be read, or nothing in it can be learnt.
    """
    if isinstance(source, TokenizedDataset):
        return source
    data = data or DataConfig()
    work = RowTokenizer(tokenizer, data, max_length)
    known = Fingerprint(source, tokenizer, data, max_length)
    if known.key is None:
        return _tokenize_once(source, work)
    folder = cache.cache_folder(data.cache_dir)
    if entry := cache.find(folder, known.key):
        return TokenizedDataset(**mapped(folder / known.key), report=entry.report)
    return _tokenize_into(cache.begin(folder, known.key), source, work, known)


def _tokenize_once(source: Any, work: RowTokenizer) -> TokenizedDataset:
    """In memory; what grows large goes to files that nobody finds again."""
    store, place = Store(), None
    try:
        with closing(in_order(work, read_chunks(source, work.data), work.data.num_workers)) as chunks:
            for chunk in chunks:
                store.append(chunk)
                if place is None and store.num_bytes > SPILL_FROM:
                    place = cache.begin(cache.cache_folder(work.data.cache_dir))
                    store.move_to(place.folder)
        require_learnable(store.progress.report, store.progress.borderless, work.data)
        return TokenizedDataset(**store.finish(), report=store.progress.report)
    finally:
        if place is not None:
            place.drop()  # the arrays stay mapped


def _tokenize_into(place: cache.Work, source: Any, work: RowTokenizer, known: Fingerprint) -> TokenizedDataset:
    """In files that become the entry of a key; what is done when this is interrupted is kept for the next run."""
    assert known.key is not None
    store = Store(place.folder, place.progress)
    try:
        rest = read_chunks(source, work.data, skip=store.progress.items)
        with closing(in_order(work, rest, work.data.num_workers)) as chunks:
            for chunk in chunks:
                store.append(chunk)
                store.commit_now_and_then()
        require_learnable(store.progress.report, store.progress.borderless, work.data)
        known.check()
        store.commit()
        arrays = store.finish()
    except Exception:  # whatever is wrong with the rows: they will be others next time
        place.drop()
        raise
    except BaseException:
        with suppress(UserError):  # no room: what was written down before is kept
            store.commit()
        place.leave()
        raise
    place.publish(known.key)
    return TokenizedDataset(**arrays, report=store.progress.report)
