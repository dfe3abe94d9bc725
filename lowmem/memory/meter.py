"""Measured memory: every storage that lives during a step, by category, and what made up the peak."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.memory.timeline import Timeline, highest_moments
from lowmem.observers import Event

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


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the birth and death of every storage that an operation returns.

    What an operation allocates and frees inside itself is not seen. Bytes are those of the storages, unrounded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: dict[int, str] = {}
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._guards: dict[int, Any] = {}
        self._events: list[tuple[int, int]] = []  # number, bytes (negative: died)
        self._times: list[float] = []  # of each event, in seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return result

    def see(self, tensor: Tensor, label: str | None = None) -> None:
        """Take note of a tensor's storage; a label names its category from now on, and in hindsight."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._events)
            size = storage.nbytes()
            self._record(number, size)
            self._guards[number] = weakref.ref(storage, lambda _, a=address, n=number, s=size: self._died(a, n, s))  # type: ignore[misc]
        if label is not None:
            self.labels[number] = label

    def _died(self, address: int, number: int, size: int) -> None:
        self._numbers.pop(address, None)
        self._guards.pop(number, None)
        self._record(number, -size)

    def _record(self, number: int, size: int) -> None:
        self._events.append((number, size))
        self._times.append(time.perf_counter())

    def timeline(self, limit: int = 400) -> Timeline:
        """Live bytes by category over the step, at most `limit` moments of it.

        What was seen before the step (weights, optimizer state) is there from its first moment on.
        """
        changes = [(self.labels.get(number, REST), size) for number, size in self._events]
        return highest_moments(self._times, changes, limit)

    def ledger(self) -> Ledger:
        """What lived at the peak, by label."""
        at_peak = self._live_at(self._peak())
        rows: Counter[str] = Counter()
        for number, size in at_peak.items():
            rows[self.labels.get(number, REST)] += size
        return Ledger(dict(rows.most_common()))

    def _peak(self) -> int:
        live, highest, index = 0, -1, 0
        for i, (_, size) in enumerate(self._events):
            live += size
            if live > highest:
                highest, index = live, i
        return index

    def _live_at(self, index: int) -> dict[int, int]:
        live: dict[int, int] = {}
        for number, size in self._events[: index + 1]:
            if size > 0:
                live[number] = size
            else:
                live.pop(number, None)
        return live


class MemoryLedger:
    """Observer: measures the second step of a fresh run, shows the ledger, and leaves it in the result.

    The second, because an optimizer may allocate its state at the end of the first (a run of one step has no other).
    Where there is a run folder, `memory_timeline.json` in it says how the bytes came and went during that step.
    """

    def __init__(self) -> None:
        self.meter: StepMeter | None = None
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
        self.meter = meter = StepMeter()
        for label, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                meter.see(tensor, label)

        def gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                meter.see(parameter.grad, "gradients")

        for parameter in trainer.run.trainable.values():
            self.hooks.append(parameter.register_post_accumulate_grad_hook(gradient))  # type: ignore[no-untyped-call]
        meter.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, meter: StepMeter) -> None:
        meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.meter = [], None

    def _finish(self, trainer: Trainer, meter: StepMeter) -> StepMeter:
        self._stop(meter)
        for label, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                meter.see(tensor, label)
        return meter

    def _report(self, trainer: Trainer, meter: StepMeter, step: int) -> None:
        ledger = meter.ledger()
        trainer.result["memory_ledger"] = ledger.rows
        trainer.result["peak_live_bytes"] = ledger.peak_bytes
        if trainer.books.folder:
            meter.timeline().write(trainer.books.folder, step)
        trainer.emit("ledger", rows=ledger.rows, peak_bytes=ledger.peak_bytes)


def tensors_by_category(trainer: Trainer) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """The lasting tensors of a run: weights, and the optimizer's state."""
    trainable = {id(p) for p in trainer.run.trainable.values()}
    parameters = list(trainer.model.parameters())
    yield "weights, frozen", [p for p in parameters if id(p) not in trainable]
    yield "weights, frozen", [t for p in parameters for t in _quant_state(p)]
    yield "weights, frozen", trainer.model.buffers()
    yield "weights, trainable", [p for p in parameters if id(p) in trainable]
    states = [trainer.optimizer.state[p] for p in trainer.run.trainable.values() if p in trainer.optimizer.state]
    yield "optimizer state", [v for state in states for v in state.values() if isinstance(v, Tensor)]


def _quant_state(parameter: nn.Parameter) -> list[Tensor]:
    """Scales and tables that a quantised weight carries beside its bytes (bitsandbytes)."""
    found: list[Tensor] = []
    state = getattr(parameter, "quant_state", None)
    for source in (state, getattr(state, "state2", None)):
        found += [v for v in vars(source).values() if isinstance(v, torch.Tensor)] if source is not None else []
    return found + [v for v in (getattr(parameter, "SCB", None),) if isinstance(v, torch.Tensor)]
