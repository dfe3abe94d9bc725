"""Which few strategies would make a run fit, and what each would save: tried by prediction, the exact ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowmem.memory.estimate import estimate
from lowmem.memory.meta import Device
from lowmem.memory.subject import Subject
from lowmem.strategies import (
    AdamW8bit,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    Quantization,
    with_defaults,
)
from lowmem.strategy import ConflictError, Strategy, resolve

Peak = Callable[[Sequence[Strategy]], int]


@dataclass(frozen=True)
class Remedy:
    """Strategies to add (or to set otherwise), and what that does.

    Attributes:
        added: as they stand in a recipe.
        strategies: all of the run, with them.
        saved: bytes by which the peak falls.
        needed: the peak with them: reserved on a card, else of live tensors.
        fits: whether that is within the capacity.
    """

    added: list[Strategy]
    strategies: list[Strategy]
    saved: int
    needed: int
    fits: bool

    @property
    def words(self) -> str:
        """The strategies with the settings that matter."""
        return " + ".join(_words(strategy) for strategy in self.added)


def remedies(
    subject: Subject,
    rows: Sequence[int],
    capacity: int | None,
    *,
    device: Device = "cuda",
    expandable_segments: bool = True,
    needed: int | None = None,
) -> list[Remedy]:
    """What would help, in the order of what it gives up: exact techniques, 8-bit moments, adapters, a quantised base.

    Each is tried alone, until one is enough. Where none is, they are added one after the other, those that save nothing
    left out, until the run fits or nothing is left to add; that combination is the last entry.

    Args:
        subject: the run.
        rows: tokens of each row of its worst batch.
        capacity: bytes it may take; null: each is tried, and none is called enough.
        device, expandable_segments: as in `estimate`.
        needed: what it takes as it is, where this is known already.
    """

    def peak(strategies: Sequence[Strategy]) -> int:
        trial = subject.with_strategies(strategies)
        found = estimate(trial, lengths=rows, device=device, expandable_segments=expandable_segments, band=False)
        return found.needed_bytes - found.context_bytes if device == "cuda" else found.peak_allocated_bytes

    room = -1 if capacity is None else capacity
    before = peak(subject.strategies) if needed is None else needed
    alone: list[Remedy] = []
    for candidate in _candidates(subject, len(rows)):
        strategies = _with(subject.strategies, candidate, subject)
        found = None if strategies is None else _tried(peak, strategies)
        if strategies is None or found is None or found >= before:
            continue
        if alone and len(candidate) == 1 and alone[-1].added[0].slot == candidate[0].slot:
            del alone[-1]  # a weaker setting of the same
        alone.append(Remedy(candidate, strategies, before - found, found, found <= room))
        if alone[-1].fits:
            return alone
    together = _one_after_the_other(subject, alone, before, room, peak) if capacity is not None else None
    return [*alone, together] if together else alone


def _one_after_the_other(
    subject: Subject, alone: Sequence[Remedy], before: int, room: int, peak: Peak
) -> Remedy | None:
    """As many of them as it takes to fit, or all that help; null where that is no more than one."""
    added: list[Strategy] = []
    strategies, lowest = list(subject.strategies), before
    for remedy in alone:
        more = _with(strategies, remedy.added, subject)
        found = None if more is None else _tried(peak, more)
        if more is None or found is None or found >= lowest:
            continue
        added, strategies, lowest = _joined(added, remedy.added), more, found
        if lowest <= room:
            break
    return Remedy(added, strategies, before - lowest, lowest, lowest <= room) if len(added) > 1 else None


def _candidates(subject: Subject, rows: int) -> Iterator[list[Strategy]]:
    filled = {strategy.slot for strategy in subject.strategies}
    yield [GradientCheckpointing()]
    yield [ChunkedCrossEntropy()]
    while rows > 1:
        rows = rows // 2
        yield [GradientAccumulation(micro_batch_size=rows)]
    yield [AdamW8bit()]
    if LoRA.slot not in filled:
        yield [LoRA()]
    if Quantization.slot not in filled:
        yield [Quantization()] if LoRA.slot in filled else [LoRA(), Quantization()]


def _with(strategies: Sequence[Strategy], added: Sequence[Strategy], subject: Subject) -> list[Strategy] | None:
    """All of them; one that is added takes the place of that in its slot. Null where they conflict or are there."""
    if all(any(type(a) is type(s) and a.settings() == s.settings() for s in strategies) for a in added):
        return None
    new = _joined(strategies, added)
    try:
        resolve(with_defaults(new, subject.training))
    except ConflictError:
        return None
    return new


def _joined(strategies: Sequence[Strategy], added: Sequence[Strategy]) -> list[Strategy]:
    slots = {strategy.slot for strategy in added}
    return [strategy for strategy in strategies if strategy.slot is None or strategy.slot not in slots] + list(added)


def _tried(peak: Peak, strategies: Sequence[Strategy]) -> int | None:
    """The peak with these strategies; null where the model cannot take them."""
    try:
        return peak(strategies)
    except Exception:  # a strategy's own refusal, or a part that cannot be followed: no remedy then
        return None


def _words(strategy: Strategy) -> str:
    given = {name: value for name, value in strategy.settings().items() if name in ("micro_batch_size",) and value}
    return strategy.name + "".join(f" ({name}: {value})" for name, value in given.items())
