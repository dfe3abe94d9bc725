"""A deep model's step from two shallow ones: bytes per phase and work are linear in the number of layers.

What each phase holds at its peak grows by the same bytes with every layer (or every few, where kinds alternate): from
one and two layers to 48 the error is 0 bytes in every recipe tried. Where another moment of a phase overtakes, the peak
is the maximum of several lines, and what two points give is a lower bound. Reserved memory is not linear; whoever needs
it traces the full depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowmem.memory.allocator import ROUND
from lowmem.memory.cards import Card
from lowmem.memory.moments import moments
from lowmem.memory.subject import Subject
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

_PASS = ("forward", "backward")


@dataclass(frozen=True)
class Figures:
    """A step, as traced or extrapolated.

    Attributes:
        phases: phase -> allocated bytes at its peak, in the allocator's rounded sizes.
        ledgers: phase -> category -> bytes at its peak.
        floor: allocated bytes between two steps: weights and optimizer state.
        host_bytes: the most that tensors take of the host's memory during a step.
        work: of one optimizer step, all micro-batches counted.
    """

    phases: dict[str, int]
    ledgers: dict[str, dict[str, int]]
    floor: int
    host_bytes: int
    work: Work

    @property
    def allocated(self) -> int:
        """Bytes at the peak of the step."""
        return max(self.phases.values())

    @property
    def sent_bytes(self) -> int:
        """What a rank sends to the others in an optimizer step."""
        return round(sum(total.sent_bytes for total in self.work.totals().values()))

    @property
    def phase(self) -> str:
        """When the peak comes."""
        return max(self.phases, key=lambda name: self.phases[name])

    def seconds(self, card: Card) -> float:
        """Predicted time of an optimizer step."""
        return sum(self.work.seconds(card).values())


def figures(subject: Subject, lengths: Sequence[int]) -> Figures:
    """A step of a run at its full depth, on the rank that needs most, from two shallow traces where two are enough.

    Args:
        subject: the run.
        lengths: tokens of each row of an optimizer batch.
    """
    found = (_figures(replace(subject, rank=rank), lengths) for rank in subject.ranks)
    return max(found, key=lambda one: one.allocated)


def _figures(subject: Subject, lengths: Sequence[int]) -> Figures:
    depths = shallow_depths(subject)
    if depths is None:
        return traced(subject, lengths, None)
    low, high = depths
    near, far = traced(subject, lengths, low), traced(subject, lengths, high)
    return _line(near, far, (subject.layers - low) // (high - low))


def shallow_depths(subject: Subject, periods: int = 1) -> tuple[int, int] | None:
    """Two depths that end as the full one does, a period apart; null where the full one is no deeper.

    Args:
        subject: the run.
        periods: in the shallower one.
    """
    step = subject.period
    if step is None:
        return None
    low = periods * step + subject.layers % step
    return (low, low + step) if low + step < subject.layers else None


def _line(near: Figures, far: Figures, steps: int) -> Figures:
    def at(a: int, b: int) -> int:
        return a + (b - a) * steps

    def ledger(phase: str) -> dict[str, int]:
        a, b = near.ledgers.get(phase, {}), far.ledgers.get(phase, {})
        found = {name: at(a.get(name, 0), b.get(name, 0)) for name in {**b, **a}}
        return {name: size for name, size in found.items() if size > 0}

    return Figures(
        {name: at(near.phases.get(name, size), size) for name, size in far.phases.items()},
        {name: ledger(name) for name in far.phases},
        at(near.floor, far.floor),
        at(near.host_bytes, far.host_bytes),
        near.work + (far.work - near.work) * steps,
    )


def traced(subject: Subject, lengths: Sequence[int], layers: int | None) -> Figures:
    """A step of a run as it is traced with so many layers (null: all)."""
    work = Work()
    recorder = StepWork(work)
    trace = subject.trace(lengths, layers=layers, look=recorder.watch, work=work)
    peaks = _peaks(trace)
    found = moments(trace, subject.vocabulary)
    return Figures(
        peaks,
        {name: moment.ledger for name, moment in found.items()},
        sum(_rounded(size) for _, size in trace.events),
        _highest(trace.host_events),
        recorder.step(),
    )


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND if size >= 0 else -_rounded(-size)


def _peaks(trace: Trace) -> dict[str, int]:
    live, phase = 0, ""
    peaks: dict[str, int] = {}
    for number, size in trace.events:
        live += _rounded(size)
        if size > 0:
            phase = trace.storages[number].phase
            if live > peaks.get(phase, 0):
                peaks[phase] = live
    return peaks


def _highest(events: Sequence[tuple[int, int]]) -> int:
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    return most


class StepWork:
    """The work of a steady step, from a trace of two that leaves out like micro-batches (`predict.telling`).

    The first step runs a first micro-batch, the second a first one and a later one, which adds to gradients that are
    there already; all others are like the later one.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._after: list[Work] = []  # each step
        self._trainer: Any = None

    def watch(self, trainer: Any) -> None:
        """Take note of the work at the end of each step."""
        self._trainer = trainer
        trainer.observers.append(self._event)

    def _event(self, event: Any) -> None:
        if event.kind == "step":
            self._after.append(self._work.copy())

    def step(self) -> Work:
        """Of one optimizer step."""
        first, second = self._after[0], self._after[1] - self._after[0]
        others = self._trainer.micro_batches - 2
        return second + (_passes(second) - _passes(first)) * others if others > 0 else second


def _passes(work: Work) -> Work:
    return Work(work.device, {entry: count for entry, count in work.counts.items() if entry[0] in _PASS})
