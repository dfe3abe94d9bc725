"""From samples to tensors: the order of rows, collation, and a thread that stays one micro-batch ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowmem.config import TrainingConfig
from lowmem.data import TokenizedDataset
from lowmem.data.stream import TokenStream
from lowmem.data.stream_cursor import StreamCursor
from lowmem.errors import UserError
from lowmem.loss import IGNORE
from lowmem.run import device_kind
from lowmem.strategy import Sample


def make_cursor(rows: TokenizedDataset | TokenStream | None, training: TrainingConfig) -> Cursor | StreamCursor:
    """What gives a run its batches, and remembers where it stands."""
    if isinstance(rows, TokenStream):
        return StreamCursor(rows, training.batch_size)
    return Cursor(rows or (), training.batch_size, training.seed, training.shuffle)


@dataclass
class Cursor:
    """Where a run stands in its data: epoch, and rows consumed in it.

    Attributes:
        rows: the training set.
        batch_size: rows per optimizer step; the last batch of an epoch may be shorter, and is used.
        seed: with the epoch, seeds the order of rows.
        shuffle: a new order every epoch.
    """

    rows: Sequence[Sample]
    batch_size: int
    seed: int
    shuffle: bool
    epoch: int = 0
    consumed: int = 0

    def batches(self) -> Iterator[list[Sample]]:
        """One optimizer batch after another, for ever; a batch never spans two epochs."""
        while True:
            order = self._order()
            while self.consumed < self.num_rows:
                numbers = order[self.consumed : self.consumed + self.batch_size].tolist()
                self.consumed += len(numbers)
                yield [self.rows[number] for number in numbers]
            self.epoch, self.consumed = self.epoch + 1, 0

    def total_steps(self, max_steps: int | None, num_train_epochs: float) -> int:
        """Optimizer steps of the whole run."""
        return max_steps or math.ceil(num_train_epochs * math.ceil(self.num_rows / self.batch_size))

    @property
    def epochs_done(self) -> float:
        """Passes over the data so far, as a fraction."""
        return self.epoch + self.consumed / self.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of the training set."""
        return len(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain values for `trainer.json`."""
        digest = getattr(self.rows, "digest", None)
        return {"epoch": self.epoch, "consumed": self.consumed, "rows": self.num_rows, "digest": digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken.

        Raises:
            UserError: it was taken from a stream.
        """
        if "taken" in state:
            raise UserError("resume: the checkpoint was written while training on a stream; give that stream again")
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.num_rows)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.num_rows, generator=generator)


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Tensors of one micro-batch, padded on the right to its longest row.

    No attention mask: in a causal model no token sees the padding to its right, and padding has no label. Packed rows
    carry restarting `position_ids`, and their padding is a segment of its own; an all-ones mask beside them would
    switch their isolation off in transformers.

    Returns:
        `input_ids`, `labels` (rows, length), int64; `loss_weights` float32 and `position_ids` where a sample has them.
    """
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {
        "input_ids": _padded([s["input_ids"] for s in samples], length, 0, np.int64),
        "labels": _padded([s["labels"] for s in samples], length, IGNORE, np.int64),
    }
    if any("loss_weights" in s for s in samples):
        weights = [s.get("loss_weights", np.ones(len(s["labels"]))) for s in samples]
        batch["loss_weights"] = _padded(weights, length, 0, np.float32)
    if any("position_ids" in s for s in samples):
        positions = [s.get("position_ids", np.arange(len(s["input_ids"]))) for s in samples]
        rows = [np.concatenate([p, np.arange(length - len(p))]) for p in positions]
        batch["position_ids"] = _padded(rows, length, 0, np.int64)
    return batch


def to_device(micro_batches: Sequence[Sequence[Sample]], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Collated micro-batches on the device; a thread collates the next one while this one computes."""
    pin = device_kind(device) == "cuda"
    if len(micro_batches) == 1:  # nothing to be ahead of, so no thread
        yield _move(_collate_pinned(micro_batches[0], pin), device)
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = None
        for samples in micro_batches:
            ready, pending = pending, thread.submit(_collate_pinned, samples, pin)
            if ready is not None:
                yield _move(ready.result(), device)
        if pending is not None:
            yield _move(pending.result(), device)


def _collate_pinned(samples: Sequence[Sample], pin: bool) -> dict[str, Tensor]:
    batch = collate(samples)
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if pin else batch


def _move(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _padded(rows: Sequence[Any], length: int, value: int, dtype: type) -> Tensor:
    out: np.ndarray[Any, Any] = np.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)
