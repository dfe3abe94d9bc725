"""How far a card goes: the longest rows, the most rows at once, or the highest rank for which something fits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from lowmem.memory.choose import MARGIN, Plan, Search, needed
from lowmem.memory.guess import Costs, Problem
from lowmem.memory.search import Axis, Choice, axes_for, split_options
from lowmem.model import learned_positions

_TOLERANCE = 0.01
_TRIES = 5  # full traces of one choice


@dataclass(frozen=True)
class Kind:
    """A value that can be driven up.

    Attributes:
        at: a problem with another value.
        start: two values from which the costs of others are guessed.
        step: answers are multiples of it (below it, any number).
        most: the largest value that is tried.
    """

    at: Callable[[Problem, int], Problem]
    start: tuple[int, int]
    step: int
    most: int


def _with_length(given: Problem, value: int) -> Problem:
    return replace(given, training=replace(given.training, max_length=value), axes=_ends(given.axes))


def _with_rows(given: Problem, value: int) -> Problem:
    whole = Axis("split", split_options(value)[:1], per_row=True)
    axes = tuple(whole if axis.name == "split" else axis for axis in given.axes)
    return replace(given, training=replace(given.training, batch_size=value * given.gpus), axes=axes)


def _with_rank(given: Problem, value: int) -> Problem:
    ranked = {o.name: o for o in axes_for(given.training, rank=value)[0].options}
    axes = tuple(
        replace(axis, options=tuple(replace(o, strategies=_ranked(o.strategies, value),
                                            gives_up=ranked[o.name].gives_up) for o in axis.options))
        if axis.name == "method" else axis
        for axis in given.axes
    )  # fmt: skip
    return replace(given, axes=_ends(axes))


def _ranked(strategies: Mapping[str, Mapping[str, object]], rank: int) -> dict[str, Mapping[str, object]]:
    return {key: {**s, "r": rank, "lora_alpha": 2 * rank} if key == "lora" else s for key, s in strategies.items()}


def _ends(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Of the splits only all rows and fewest: what lies between needs more than the one and helps no more."""
    return tuple(
        replace(axis, options=(axis.options[0], *axis.options[1:][-1:])) if axis.name == "split" else axis
        for axis in axes
    )


LARGEST: dict[str, Kind] = {
    "seq_length": Kind(_with_length, (256, 2048), 16, 2**20),
    "batch_size": Kind(_with_rows, (1, 4), 1, 2**14),
    "rank": Kind(_with_rank, (8, 64), 1, 2**13),
}


@dataclass
class _Path:
    """What is known of one choice: bytes of its phases at two values, and between which values its limit lies."""

    key: tuple[str, ...]
    points: list[tuple[int, Mapping[str, float]]]
    looks: int = 0
    tries: int = 0
    fails: float = float("inf")

    def slope(self) -> float:
        """Bytes per unit, of the phase that grows into the limit."""
        (low, near), (high, far) = self.points
        slopes = {name: (far[name] - near.get(name, far[name])) / (high - low) for name in far}
        return max(max(slopes.values()), 1e-9)

    def reach(self, capacity: float) -> float:
        """The value at which a phase reaches the capacity, by a line through the two points."""
        (low, near), (high, far) = self.points
        reached = float("inf")
        for name, there in far.items():
            slope = (there - near.get(name, there)) / (high - low)
            if slope > 0:
                reached = min(reached, high + (capacity - there) / slope)
            elif there > capacity:
                return 0
        return reached


class Furthest:
    """Follows every choice to the value at which it no longer fits, the most promising first.

    Args:
        given: the problem; its own value does not matter.
        value: of `LARGEST`.
        methods: those that are looked at.
        below: only smaller values are.
    """

    def __init__(self, given: Problem, value: str, methods: Sequence[str], below: int | None = None) -> None:
        self.given, self.kind, self.methods = given, LARGEST[value], methods
        self.limit = self.kind.most if below is None else below - 1
        self.least = 2 if value == "seq_length" else 1
        if value == "seq_length":
            choice = next(c for c in Costs(given).choices if c.method in methods)
            self.limit = min(self.limit, learned_positions(given.subject(choice).make_model(None)) or self.limit)
        if value == "rank":  # a higher one than the width has no more to say
            self.limit = min(self.limit, int(given.config("auto").get_text_config().hidden_size))
        self._searches: dict[int, Search] = {}
        self._number = count()
        self._heap: list[tuple[float, int, bool, int, _Path]] = []

    def find(self) -> tuple[int, Plan] | None:
        """The largest value, and the plan that fits it; null where none does."""
        for path in self._paths():
            self._push(path.reach(self._allocated), False, path)
        best: tuple[int, Plan] | None = None
        while self._heap:
            bound, _, settled, value, path = heapq.heappop(self._heap)
            if best is not None and -bound <= best[0] * (1 + _TOLERANCE):
                break
            if not settled:
                self._look(path, value)
                continue
            plan, over = self._confirm(path, value)
            if plan is not None and (best is None or value > best[0]):
                best = value, plan
            if path.tries < _TRIES and over is not None:
                # what is reserved falls in pages, and so not with every step down
                extra = value * _TOLERANCE / 2 * path.tries if over > 0 else 0
                self._push(value - over / path.slope() - extra, True, path)
        return best

    @property
    def _allocated(self) -> float:
        return self.given.capacity / (1 + MARGIN)

    def _search(self, value: int) -> Search:
        if value not in self._searches:
            self._searches[value] = Search(self.kind.at(self.given, value))
        return self._searches[value]

    def _choice(self, key: tuple[str, ...], value: int) -> Choice:
        return next(choice for choice in self._search(value).costs.choices if choice.key == key)

    def _paths(self) -> list[_Path]:
        """Every choice whose weights and optimizer state fit, with a guess at two values."""
        low, high = (min(value, self.limit) for value in self.kind.start)
        if low == high:
            low = max(self.least, high // 2)
        if not self.least <= low < high:
            return []
        found = []
        for choice in self._search(low).costs.choices:
            costs = self._search(low).costs
            if choice.method in self.methods and costs.family(choice).floor <= self._allocated:
                there = self._choice(choice.key, high)
                points = [(low, costs.guess(choice).phases), (high, self._search(high).costs.guess(there).phases)]
                found.append(_Path(choice.key, points))
        return found

    def _push(self, value: float, settled: bool, path: _Path) -> None:
        """Into the queue with the largest value that is still thought possible."""
        most = min(value, self.limit, path.fails - self.kind.step)
        whole = int(most)
        if whole >= 64 * self.kind.step:
            whole -= whole % self.kind.step
        if whole >= self.least:
            heapq.heappush(self._heap, (-whole, next(self._number), settled, whole, path))

    def _look(self, path: _Path, value: int) -> None:
        """Exact figures at the value, and with them another limit, until it no longer moves."""
        phases = self._search(value).costs.exact(self._choice(path.key, value)).phases
        before = path.points[-1] if path.looks else path.points[0]
        if before[0] != value:
            path.points = sorted([before, (value, phases)], key=lambda point: point[0])
        path.looks += 1
        reach = path.reach(self._allocated)
        moved = abs(min(reach, self.limit) - value)
        self._push(reach, path.looks > 3 or moved <= max(self.kind.step, value * _TOLERANCE / 4), path)

    def _confirm(self, path: _Path, value: int) -> tuple[Plan | None, float | None]:
        """The plan, where it fits at full depth; and by how many bytes it misses, or (negative) what is left."""
        search, choice = self._search(value), self._choice(path.key, value)
        path.tries += 1
        found = search.estimate(choice)
        over = needed(found) - self.given.capacity
        if self.given.host is not None and found.host_bytes > self.given.host:
            path.fails = min(path.fails, value)
            return None, value * (1 - self.given.host / found.host_bytes) * path.slope()  # as if it were the card's
        if over > 0:
            path.fails = min(path.fails, value)
            return None, over
        plan = Plan(search.problem, choice, found, search.costs.seconds(choice), None)
        further = -over / path.slope() > max(self.kind.step, value * _TOLERANCE)
        return plan, over if further and value < self.limit else None
