"""The choice: of all that fits, what takes the least time.

1. A guess orders all allowed choices by time and leaves out those that need far too much memory.
2. In this order, exact figures (two shallow traces) leave out what does not fit and correct the order.
3. What comes first is traced at its full depth and replayed in a model of the allocator, for neighbouring lengths, too:
   the first whose upper bound fits, with a margin, is the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from lowmem.config import TrainingConfig
from lowmem.memory.estimate import Estimate, estimate
from lowmem.memory.guess import Costs, Guess, Problem
from lowmem.memory.search import Choice, rows_per_pass

MARGIN = 0.02  # of what is reserved at most: the predictor's own tolerance
# Guesses were up to 15 % too low in bytes, up to 9 % too high; in seconds 4 % too low, and at most 0.5 % too high.
_DOUBT_BYTES = 1.15  # a guess above so many times the capacity is believed, but for the nearest
_DOUBT_SECONDS = 0.02  # a guess may be this share too high


@dataclass(frozen=True)
class Miss:
    """A faster choice that does not fit.

    Attributes:
        choice: which.
        seconds: per optimizer step.
        over_bytes: by how much it misses.
        where: `host`, or the phase of its peak.
        category: what holds most there.
        allocated: what is allocated is too much already; else what is reserved is, which says nothing about others.
    """

    choice: Choice
    seconds: float
    over_bytes: int
    where: str
    category: str
    allocated: bool


@dataclass(frozen=True)
class Plan:
    """A choice that fits, confirmed at full depth.

    Attributes:
        problem: what was planned.
        choice: the answers.
        estimate: of the full depth.
        seconds: predicted, per optimizer step.
        faster: the next faster choice, which does not fit; null: none is faster.
    """

    problem: Problem
    choice: Choice
    estimate: Estimate
    seconds: float
    faster: Miss | None

    @property
    def method(self) -> str:
        """full, lora or qlora."""
        return self.choice.method

    @property
    def training(self) -> TrainingConfig:
        """The numbers of the run."""
        return self.choice.training(self.problem.training)

    @property
    def needed_bytes(self) -> int:
        """What must be free on the card: reserved at most, the margin, and CUDA's own share."""
        return needed(self.estimate) + self.estimate.context_bytes

    @property
    def tokens_per_second(self) -> float:
        """Predicted, where every row is as long as planned for."""
        return sum(self.problem.lengths) / self.seconds

    @property
    def rows_per_pass(self) -> int:
        """Rows of one forward pass."""
        return rows_per_pass(self.choice, self.problem.rows)


def needed(found: Estimate) -> int:
    """What an estimate asks of the allocator, the margin included."""
    return int(found.peak_reserved_bytes * (1 + MARGIN)) + found.managed_at_once


class Search:
    """Looks for plans; what was traced is kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = Costs(problem)
        self.misses: dict[tuple[str, ...], Miss] = {}

    def plans(self, method: str) -> Iterator[Plan]:
        """The fastest plan of a method; then, as long as there are any, slower ones that give up less."""
        found: list[Plan] = []
        queue = _Queue()
        for choice in self._within_reach(method):
            guess = self.costs.guess(choice)
            if not guess.exact or self._may_fit(choice):
                queue.put(choice, guess)
        doubted: list[tuple[float, Choice]] = []
        while queue or self._was_wrong(doubted, queue):
            choice, guess = queue.take()
            if any(set(plan.choice.gives_up) <= set(choice.gives_up) for plan in found) or self._needs_more_than_a_miss(
                choice
            ):
                continue
            if not guess.exact:
                if self._hopeless(guess):
                    doubted.append((guess.allocated, choice))
                elif self._may_fit(choice):
                    queue.put(choice, self.costs.exact(choice))
                continue
            if self._was_wrong(doubted, queue):
                queue.put(choice, guess)
                continue
            confirmed = self.confirm(choice)
            if confirmed is not None:
                plan = Plan(self.problem, choice, confirmed, guess.seconds, self._faster(guess.seconds, method))
                found.append(plan)
                yield plan

    def confirm(self, choice: Choice) -> Estimate | None:
        """The estimate at full depth, where it fits."""
        found = self.estimate(choice)
        over = needed(found) - self.problem.capacity
        host = found.host_bytes - self.problem.host if self.problem.host is not None else 0
        if over <= 0 and host <= 0:
            return found
        self._miss(choice, over, host, found.phase, found.ledger, allocated=False)
        return None

    def estimate(self, choice: Choice) -> Estimate:
        """At full depth, and for neighbouring lengths."""
        return estimate(self.problem.subject(choice), lengths=self.problem.lengths)

    def leanest(self, methods: Sequence[str]) -> Choice:
        """What needs the least memory, by guesses within the method and precision whose leanest expected does."""
        bases = {self.costs.family(c).base.key: self.costs.family(c).base for c in self._of(methods)}
        base = min(bases.values(), key=lambda choice: self.costs.figures(choice).allocated)
        return min(self.costs.family(base).members, key=lambda choice: self.costs.guess(choice).allocated)

    def _of(self, methods: Sequence[str]) -> list[Choice]:
        return [choice for choice in self.costs.choices if choice.method in methods]

    def _within_reach(self, method: str) -> Iterator[Choice]:
        """Without the families whose weights and optimizer state alone are too much."""
        for choice in self._of([method]):
            family = self.costs.family(choice)
            if family.floor <= self.problem.capacity:
                yield choice
            elif choice is family.base:
                self._may_fit(choice)  # notes by how much it misses

    def _hopeless(self, guess: Guess) -> bool:
        return guess.allocated > _DOUBT_BYTES * self.problem.capacity

    def _may_fit(self, choice: Choice) -> bool:
        """Whether what is allocated at least leaves room."""
        figures = self.costs.figures(choice)
        over = int(figures.allocated * (1 + MARGIN)) - self.problem.capacity
        host = figures.host_bytes - self.problem.host if self.problem.host is not None else 0
        if over <= 0 and host <= 0:
            return True
        self._miss(choice, over, host, figures.phase, figures.ledgers[figures.phase], allocated=over > 0)
        return False

    def _miss(
        self, choice: Choice, over: int, host: int, phase: str, ledger: Mapping[str, int], allocated: bool
    ) -> None:
        where, category = (phase, max(ledger, key=lambda name: ledger[name])) if over > 0 else ("host", "host memory")
        self.misses[choice.key] = Miss(choice, self.costs.seconds(choice), max(over, host), where, category, allocated)

    def _needs_more_than_a_miss(self, choice: Choice) -> bool:
        """Whether something that does not fit needs less, all else being equal.

        With fewer rows at a time everything in a pass is smaller. What an answer adds at rest (an update rule), it adds
        to every choice of its family.
        """
        return any(self._needs_less(miss, choice) for miss in self.misses.values() if miss.allocated)

    def _needs_less(self, miss: Miss, choice: Choice) -> bool:
        rows = [rows_per_pass(one, self.problem.rows) for one in (miss.choice, choice)]
        if miss.choice.micro_batches != choice.micro_batches or rows[0] > rows[1]:
            return False
        differing = [a for a in self.problem.axes if miss.choice.picks[a.name] is not choice.picks[a.name]]
        others = [axis for axis in differing if axis.name != "split"]
        if not all(axis.at_rest for axis in others):
            return False
        family = self.costs.family(choice)
        return all(family.adds(axis, miss.choice, choice, miss.where) >= 0 for axis in others)

    def _was_wrong(self, doubted: list[tuple[float, Choice]], queue: _Queue) -> bool:
        """Whether, of the choices believed not to fit, the likeliest does."""
        if not doubted:
            return False
        nearest = min(doubted, key=lambda item: item[0])
        if nearest[1].key in self.misses or not self._may_fit(nearest[1]):
            return False
        doubted.remove(nearest)
        queue.put(nearest[1], self.costs.exact(nearest[1]))
        return True

    def _faster(self, seconds: float, method: str) -> Miss | None:
        """Of the misses of a method that would be faster, the slowest."""
        faster = [m for m in self.misses.values() if m.seconds < seconds and m.choice.method == method]
        return max(faster, key=lambda miss: miss.seconds, default=None)


class _Queue:
    """Choices by time: a guess comes as early as it may be, an exact figure when its time has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float, int, Choice, Guess]] = []
        self._number = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def put(self, choice: Choice, guess: Guess) -> None:
        """Of like times, what gives up least comes first, then what needs least."""
        at = guess.seconds if guess.exact else guess.seconds * (1 - _DOUBT_SECONDS)
        heapq.heappush(self._heap, (at, len(choice.gives_up), guess.allocated, next(self._number), choice, guess))

    def take(self) -> tuple[Choice, Guess]:
        """The first."""
        return heapq.heappop(self._heap)[-2:]
