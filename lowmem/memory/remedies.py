"""Which few strategies would make a run fit, and what each would save: tried by prediction, the exact ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowmem.memory.depth import shallow_depths
from lowmem.memory.estimate import Estimate, estimate
from lowmem.memory.meta import Device
from lowmem.memory.moments import moments
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
    floor: int = 0,
) -> list[Remedy]:
    """What would help, in the order of what it gives up: exact techniques, 8-bit moments, adapters, a quantised base.

    Each is tried alone, until one is enough. Where none is, they are added one after the other, those that save nothing
    left out, until the run fits or nothing is left to add; that combination is the last entry. What is tried is the
    optimizer step, by its first layers; what would be enough is then predicted in full.

    Args:
        subject: the run.
        rows: tokens of each row of its worst batch.
        capacity: bytes it may take; null: each is tried, and none is called enough.
        device, expandable_segments: as in `estimate`.
        needed: what it takes as it is, where this is known already.
        floor: what it takes beside its steps (loading, evaluating, answering), which exact techniques leave as it is.
    """
    trials = _Trials(subject, rows, device, expandable_segments, floor)
    room = -1 if capacity is None else capacity
    first = trials.step(subject.strategies)
    before = first if needed is None else needed
    alone: list[Remedy] = []
    for candidate in _candidates(subject, len(rows)):
        strategies = _with(subject.strategies, candidate, subject)
        remedy = None if strategies is None else trials.remedy(candidate, strategies, before, first, room)
        if remedy is None:
            continue
        if alone and len(candidate) == 1 and alone[-1].added[0].slot == candidate[0].slot:
            del alone[-1]  # a weaker setting of the same
        alone.append(remedy)
        if remedy.fits:
            return alone
    together: Remedy | None = None
    for remedy in alone if capacity is not None else ():
        so_far, lowest = (together.strategies, together.needed) if together else (subject.strategies, before)
        more = _with(so_far, remedy.added, subject)
        added = _joined(together.added if together else [], remedy.added)
        better = None if more is None else trials.remedy(added, more, before, first, room)
        if better is not None and better.needed < lowest:
            together = better
            if better.fits:
                break
    return [*alone, together] if together and len(together.added) > 1 else alone


@dataclass(frozen=True)
class _Trials:
    """One run with other strategies."""

    subject: Subject
    rows: Sequence[int]
    device: Device
    expandable_segments: bool
    floor: int

    def remedy(
        self, added: list[Strategy], strategies: list[Strategy], before: int, first: int, room: int
    ) -> Remedy | None:
        """What strategies do; null where they save nothing, or the model cannot take them.

        Args:
            added: those that are new.
            strategies: all of them.
            before: bytes that the run needs without.
            first: bytes that its step needs without.
            room: bytes there are.
        """
        try:
            step = self.step(strategies)
            floor = self.floor if all(strategy.exact for strategy in added) else 0
            needed = max(before - (first - step), floor)
            if needed <= room:
                needed = self.whole(strategies)
        except Exception:  # a strategy's own refusal, or a part that cannot be followed
            return None
        return Remedy(added, strategies, before - needed, needed, needed <= room) if needed < before else None

    def step(self, strategies: Sequence[Strategy]) -> int:
        """Live bytes of a step at their most: each phase from two depths, where more layers are more of the same."""
        subject = self.subject.with_strategies(strategies)
        depths = shallow_depths(subject, periods=4)  # with fewer another moment may be the highest
        if depths is None:
            return subject.trace(self.rows, self.device).peak()[0]
        few, more = depths
        low, high = (moments(subject.trace(self.rows, self.device, layers=n), subject.vocabulary) for n in depths)
        times = (subject.layers - few) // (more - few)
        return max(low[name].bytes + times * (high[name].bytes - low[name].bytes) for name in low)

    def whole(self, strategies: Sequence[Strategy]) -> int:
        """Bytes that the run needs."""
        subject, expandable = self.subject.with_strategies(strategies), self.expandable_segments
        return needed_bytes(
            estimate(subject, lengths=self.rows, device=self.device, expandable_segments=expandable, band=False)
        )


def needed_bytes(found: Estimate) -> int:
    """What must be free: CUDA has started, and so has taken its own share, when free memory is looked at."""
    return found.needed_bytes - found.context_bytes if found.device == "cuda" else found.peak_allocated_bytes


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


def _words(strategy: Strategy) -> str:
    given = {name: value for name, value in strategy.settings().items() if name in ("micro_batch_size",) and value}
    return strategy.name + "".join(f" ({name}: {value})" for name, value in given.items())
