"""The longest batch first: what will not fit fails at once, and the allocator's largest blocks are there early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lowmem.environment import same_random_numbers
from lowmem.loss import count
from lowmem.strategy import Sample, Trait

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


def longest_batch_first(trainer: Trainer) -> None:
    """On a card, run the batches that need most, forward and backward; training begins as if nothing had been.

    Where updates are made inside backward, there is no such thing as a dry pass, and none is made.
    """
    if trainer.device.type == "cuda" and Trait.GRADS_AT_STEP in trainer.run.traits:
        rows = run_dry(trainer)
        trainer.emit("status", text=f"the longest batch fits: {len(rows)} rows of up to {max(rows):,} tokens")


def run_dry(trainer: Trainer) -> list[int]:
    """Forward and backward of the worst batches, without an update.

    Random numbers, gradients, metrics, and the model's buffers and plain attributes are afterwards what they were. A
    strategy that has learnt from a failure (`retry_on_oom`) keeps that. The memory that the optimizer will take at its
    first step is held meanwhile.

    Returns:
        Tokens of each row of the longest batch.
    """
    worst = trainer.memory.worst
    with same_random_numbers(trainer.device), _as_before(trainer.model):
        metrics, trainer.run.metrics = trainer.run.metrics, {}
        trainer.model.train()
        held = torch.empty(_to_come(trainer), dtype=torch.uint8, device=trainer.device)
        try:
            for number, lengths in enumerate(worst.batches):
                batch = _samples(trainer, worst.rows[number]) if worst.rows else _made_up(lengths)
                trainer.forward_backward([batch], count(batch))
                trainer.optimizer.zero_grad(set_to_none=True)
        finally:
            del held
            trainer.optimizer.zero_grad(set_to_none=True)
            trainer.run.metrics, trainer.guard.batch = metrics, []
    return sorted(worst.batches[0], reverse=True)


def _samples(trainer: Trainer, rows: list[int]) -> list[Sample]:
    assert trainer.train_dataset is not None
    return [trainer.train_dataset[row] for row in rows]  # type: ignore[index]


def _made_up(lengths: tuple[int, ...]) -> list[Sample]:
    """Of a stream no rows are known: as many tokens, all of them targets."""
    return [{"input_ids": np.zeros(n, np.int32), "labels": np.zeros(n, np.int32)} for n in lengths]


def _to_come(trainer: Trainer) -> int:
    """Bytes of optimizer state that is not there yet, as predicted; without a prediction, none."""
    found = trainer.memory.prediction
    predicted = 0 if found is None else max(m.ledger.get("optimizer state", 0) for m in found.phases.values())
    states = trainer.optimizer.state.values()
    there = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor))
    return max(0, predicted - there)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Buffers and plain attributes of the modules (tables of positions grow with the longest row) are put back."""
    buffers = {tensor: tensor.clone() for tensor in model.buffers()}
    attributes = [(module, _plain(module)) for module in model.modules()]
    named = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        yield
    finally:
        for module, values in attributes:
            for name in _plain(module).keys() - values.keys():
                delattr(module, name)
            for name, value in values.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)
        with torch.no_grad():
            for module, before in named:
                module._buffers.update(before)
            for tensor, value in buffers.items():
                tensor.copy_(value)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: v for name, v in vars(module).items() if v is None or isinstance(v, bool | int | float | str)}
