"""A training step on the meta device, recorded, and what the record means for a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowmem.config import TrainingConfig
from lowmem.memory.allocator import CachingAllocator, replay
from lowmem.memory.meta import Device, on_meta
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.trace import Storage, Trace
from lowmem.memory.work import Work
from lowmem.strategy import Strategy

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


@dataclass(frozen=True)
class Prediction:
    """Bytes a run will need on a card.

    Attributes:
        peak_allocated_bytes: the most that is handed out at once, in the allocator's rounded sizes.
        peak_reserved_bytes: the most that the allocator takes from the card.
        phase: when the peak comes (`forward`, `backward`, `step`), and `operation`: what reaches it.
        ledger: category -> bytes at the peak, unrounded.
        phases: phase -> its own peak, unrounded.
        holders: the largest groups of tensors at the peak: (bytes, count, what).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phase: str
    operation: str
    ledger: dict[str, int]
    phases: dict[str, int]
    holders: list[tuple[int, int, str]]


def record(
    model: nn.Module,
    training: TrainingConfig,
    strategies: Sequence[Strategy],
    device: Device,
    lengths: Sequence[int],
    work: Work | None = None,
) -> Trace:
    """Two optimizer steps of the real trainer, loop and strategies, on rows of these lengths.

    The second, because an optimizer may allocate its state at the end of the first.

    Args:
        model: without data (on the meta device), in the dtype it would be loaded in.
        training: what a run writes, and when, is left out.
        strategies: new instances.
        device: what the run is to be like.
        lengths: tokens of each row of an optimizer batch; every token is a target.
        work: is shown every operation, for the time it would take.
    """
    from lowmem.trainer import Trainer

    rows = [{"input_ids": torch.ones(length, dtype=torch.int32).numpy()} for length in lengths]
    numbers = replace(
        training,
        batch_size=len(rows),
        max_steps=2,
        max_length=max(training.max_length, *lengths),
        output_dir=None,
        eval_steps=None,
        save_steps=None,
        save_total_limit=None,
        metric_for_best_model=None,
        load_best_model_at_end=False,
        early_stopping_patience=None,
        early_stopping_threshold=0.0,
        report_to=[],
    )
    with on_meta(device):
        trainer = Trainer(model, rows, training=numbers, strategies=strategies)
        trace = Trace(device, work)
        with trace:
            _follow(trace, trainer)
            trainer.train()
            _label(trace, trainer)
    return trace


def _follow(trace: Trace, trainer: Trainer) -> None:
    """Tell the trace what lives already, what gradients are, and which phase it is."""
    _label(trace, trainer)

    def gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            trace.see(parameter.grad, "gradients")

    for parameter in trainer.run.trainable.values():
        parameter.register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]
    trainer.forward_backward = _during(trace, "forward", trainer.forward_backward)
    trainer.step = _during(trace, "step", trainer.step)


def _label(trace: Trace, trainer: Trainer) -> None:
    for label, tensors in tensors_by_category(trainer):
        for tensor in tensors:
            trace.see(tensor, label)


def _during(trace: Trace, phase: str, part: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        with trace.during(phase):
            return part(*args)

    return within


def judge(trace: Trace, *, expandable: bool, capacity: int | None = None, vocabulary: int = 0) -> Prediction:
    """What a record means for a card.

    Args:
        trace: of `record`.
        expandable: whether the allocator grows its segments.
        capacity: bytes that may be reserved; null: no bound.
        vocabulary: width of the logits, by which the loss is told from other activations.

    Raises:
        OutOfCapacityError: it does not fit into `capacity`.
    """
    allocator = replay(trace.events, CachingAllocator(capacity, expandable))
    index = trace.peak()[1]
    born = trace.storages[trace.events[index][0]]
    ledger: Counter[str] = Counter()
    for storage in trace.live_at(index):
        ledger[_category(storage, vocabulary)] += storage.size
    phases: dict[str, int] = {}
    live, phase = 0, born.phase
    for number, size in trace.events:
        live += size
        phase = trace.storages[number].phase if size > 0 else phase
        phases[phase] = max(phases.get(phase, 0), live)
    return Prediction(
        allocator.peak_allocated,
        allocator.peak_reserved,
        born.phase,
        born.op,
        dict(ledger.most_common()),
        phases,
        trace.holders(index)[:15],
    )


def _category(storage: Storage, vocabulary: int) -> str:
    if storage.label:
        return storage.label
    if vocabulary and storage.shape[-1:] == (vocabulary,):
        return "loss"
    return "activations" if storage.phase == "forward" else "temporaries"
