"""Measured memory: every storage that lives during a step, by category, and what made up the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowmem.memory.timeline import Timeline, highest_moments
from lowmem.memory.trace import Trace
from lowmem.observers import Event
from lowmem.sharded import local

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

REST = "activations and temporaries"


@dataclass(frozen=True)
class Ledger:
    """Bytes at the moment of the peak.

    Attributes:
        rows: category -> bytes.
        peak_bytes: their sum.
    """

    rows: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """All live bytes at the peak."""
        return sum(self.rows.values())


def ledger_of(trace: Trace) -> Ledger:
    """What lived at the peak, by label."""
    rows: Counter[str] = Counter()
    for storage in trace.live_at(trace.peak()[1]):
        rows[storage.label or REST] += storage.size
    return Ledger(dict(rows.most_common()))


def timeline_of(trace: Trace, limit: int = 400) -> Timeline:
    """Live bytes by category over what was recorded, at most `limit` moments of it.

    What was seen before (weights, optimizer state) is there from the first moment on.
    """
    changes = [(trace.storages[number].label or REST, size) for number, size in trace.events]
    return highest_moments(trace.times, changes, limit)


class MemoryLedger:
    """Observer: measures the second step of a fresh run, shows the ledger, and leaves it in the result.

    The second, because an optimizer may allocate its state at the end of the first (a run of one step has no other).
    Where there is a run folder, `memory_timeline.json` in it says how the bytes came and went during that step.
    """

    def __init__(self) -> None:
        self.meter: Trace | None = None
        self.hooks: list[Any] = []

    def __call__(self, event: Event) -> None:
        """Start before the step to be measured, finish after it."""
        trainer = event.trainer
        measured = min(2, trainer.total_steps)
        if event.kind in ("begin", "step") and event.metrics["step"] == measured - 1:
            self._start(trainer)
        elif event.kind == "step" and event.metrics["step"] == measured and self.meter is not None:
            self._report(trainer, self._finish(trainer, self.meter), measured)
        elif event.kind in ("evaluate", "save") and self.meter is not None:
            self._stop(self.meter)  # what an evaluation or a save needed is no part of the step
            self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        self.meter = meter = Trace()
        for label, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                meter.see(tensor, label)

        def gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                meter.see(local(parameter.grad), "gradients")

        for parameter in trainer.run.trainable.values():
            self.hooks.append(parameter.register_post_accumulate_grad_hook(gradient))  # type: ignore[no-untyped-call]
        meter.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, meter: Trace) -> None:
        meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.meter = [], None

    def _finish(self, trainer: Trainer, meter: Trace) -> Trace:
        self._stop(meter)
        for label, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                meter.see(tensor, label)
        return meter

    def _report(self, trainer: Trainer, meter: Trace, step: int) -> None:
        ledger = ledger_of(meter)
        trainer.result["memory_ledger"] = ledger.rows
        trainer.result["peak_live_bytes"] = ledger.peak_bytes
        if trainer.books.folder:
            timeline_of(meter).write(trainer.books.folder, step)
        trainer.emit("ledger", rows=ledger.rows, peak_bytes=ledger.peak_bytes)


def tensors_by_category(trainer: Trainer) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """The lasting tensors of a run: weights, the optimizer's state, and what strategies keep (averages).

    Of a tensor that is spread over ranks, this one's part.
    """
    for label, tensors in _by_category(trainer):
        yield label, map(local, tensors)


def _by_category(trainer: Trainer) -> Iterator[tuple[str, Iterable[Tensor]]]:
    trainable = {id(p) for p in trainer.run.trainable.values()}
    parameters = list(trainer.model.parameters())
    yield "weights, frozen", [p for p in parameters if id(p) not in trainable]
    yield "weights, frozen", [t for p in parameters for t in _quant_state(p)]
    yield "weights, frozen", trainer.model.buffers()
    yield "weights, trainable", [p for p in parameters if id(p) in trainable]
    states = [trainer.optimizer.state[p] for p in trainer.run.trainable.values() if p in trainer.optimizer.state]
    yield "optimizer state", [v for state in states for v in state.values() if isinstance(v, Tensor)]
    if trainer.run.find_held is not None:
        yield from trainer.run.find_held()
    kept = tree_leaves([strategy.state_dict() for strategy in trainer.strategies])
    yield "strategy state", [value for value in kept if isinstance(value, Tensor)]


def _quant_state(parameter: nn.Parameter) -> list[Tensor]:
    """Scales and tables that a quantised weight carries beside its bytes (bitsandbytes)."""
    found: list[Tensor] = []
    state = getattr(parameter, "quant_state", None)
    for source in (state, getattr(state, "state2", None)):
        found += [v for v in vars(source).values() if isinstance(v, torch.Tensor)] if source is not None else []
    return found + [v for v in (getattr(parameter, "SCB", None),) if isinstance(v, torch.Tensor)]
