"""What choices cost: exactly, from two shallow traces each; and a guess, which says where looking is worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowmem.config import ModelConfig, TrainingConfig
from lowmem.memory.cards import Card
from lowmem.memory.depth import Figures, figures
from lowmem.memory.search import Axis, Choice, choices, rows_per_pass
from lowmem.memory.subject import Subject


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        config: dtype of the weights as loaded -> transformers configuration.
        model: as it will stand in the recipe; `dtype` is part of a choice.
        training: the numbers of the run; rows of `max_length` tokens are planned for.
        card: whose speed is reckoned with.
        capacity: bytes the allocator may reserve.
        host: bytes the process may take of the host's memory; null: no bound.
        axes: what is searched.
        gpus: cards that share the run.
    """

    config: Callable[[str], Any]
    model: ModelConfig
    training: TrainingConfig
    card: Card
    capacity: int
    host: int | None
    axes: Sequence[Axis]
    gpus: int = 1

    @property
    def rows(self) -> int:
        """Rows of an optimizer batch that a card gets, at most."""
        return -(-self.training.batch_size // self.gpus)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row of an optimizer batch."""
        return (self.training.max_length,) * self.training.batch_size

    def model_of(self, choice: Choice) -> ModelConfig:
        """The recipe's block `model`."""
        return replace(self.model, dtype=choice.dtype)  # type: ignore[arg-type]

    def subject(self, choice: Choice) -> Subject:
        """The run that a choice comes to."""
        subject = Subject.of_config(
            self.config(choice.dtype), self.model_of(choice), choice.training(self.training), choice.strategies()
        )
        return replace(subject, gpus=self.gpus)


@dataclass(frozen=True)
class Guess:
    """What a choice is expected to cost; exact where it was traced.

    Attributes:
        seconds: per optimizer step.
        phases: phase -> allocated bytes at its peak.
        launching: seconds of it that launches take.
        exact: it was traced.
    """

    seconds: float
    phases: Mapping[str, float]
    launching: float = 0
    exact: bool = False

    @property
    def allocated(self) -> float:
        """Bytes at the peak."""
        return max(self.phases.values())


@dataclass
class Costs:
    """Figures of choices, each traced once."""

    problem: Problem
    _figures: dict[tuple[str, ...], Figures] = field(default_factory=dict)
    _families: dict[tuple[str, ...], Family] = field(default_factory=dict)
    _exact: dict[tuple[str, ...], Guess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choices = list(choices(self.problem.axes, self.problem.training))

    def figures(self, choice: Choice) -> Figures:
        """Exact in depth, from two shallow traces."""
        found = self._figures.get(choice.key)
        if found is None:
            found = figures(self.problem.subject(choice), self.problem.lengths)
            self._figures[choice.key] = found
        return found

    def seconds(self, choice: Choice) -> float:
        """Predicted time of an optimizer step."""
        return self.exact(choice).seconds

    def exact(self, choice: Choice) -> Guess:
        """What it costs, traced."""
        known = self._exact.get(choice.key)
        return known or self._exact.setdefault(choice.key, self._trace(choice))

    def _trace(self, choice: Choice) -> Guess:
        figures = self.figures(choice)
        launches = sum(total.launches for total in figures.work.totals().values())
        return Guess(
            figures.seconds(self.problem.card),
            figures.phases,
            launches * self.problem.card.assumptions.launch_seconds,
            True,
        )

    def family(self, choice: Choice) -> Family:
        """The choices that share its answers on the axes that change all costs."""
        names = [axis.name for axis in self.problem.axes if axis.family]
        key = tuple(choice.picks[name].name for name in names)
        if key not in self._families:
            members = [c for c in self.choices if tuple(c.picks[name].name for name in names) == key]
            self._families[key] = Family(self, members)
        return self._families[key]

    def guess(self, choice: Choice) -> Guess:
        """What it is expected to cost."""
        return self.exact(choice) if choice.key in self._figures else self.family(choice).guess(choice)


@dataclass
class Family:
    """Choices of one method and precision. Their costs nearly add up: what an answer costs is learned once.

    Attributes:
        base: the one whose answers are the last of their axes.
    """

    costs: Costs
    members: list[Choice]
    _effects: dict[tuple[str, str], Guess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = [axis for axis in self.costs.problem.axes if not axis.family and axis.name != "split"]
        self.places = {(axis.name, o.name): i for axis in self.costs.problem.axes for i, o in enumerate(axis.options)}
        self.base = max(self.members, key=self._leanness)
        split = next(axis for axis in self.costs.problem.axes if axis.name == "split")
        self.whole = self.base.with_(split=split.options[0])

    def _leanness(self, choice: Choice) -> tuple[int, int]:
        last = sum(choice.picks[a.name].name == a.options[-1].name for a in self.costs.problem.axes)
        return last, sum(self.places[axis, option.name] for axis, option in choice.picks.items())

    @property
    def floor(self) -> int:
        """Weights and optimizer state of its leanest member, which every member has."""
        return self.costs.figures(self.base).floor

    def guess(self, choice: Choice) -> Guess:
        """The base's costs at so many rows a pass, and the effect of every other answer."""
        batch = self.costs.problem.rows
        rows = rows_per_pass(choice, batch)
        seconds, phases = self._at(rows, batch)
        for axis in self.axes:
            effect = self._effect_of(axis, choice.picks[axis.name].name)  # of one row a pass, where the axis says so
            seconds += effect.seconds + (effect.launching / rows if axis.per_row else effect.launching)
            for phase, size in effect.phases.items():
                phases[phase] = phases.get(phase, 0) + size * (rows if axis.per_row else 1)
        return Guess(seconds, phases)

    def adds(self, axis: Axis, one: Choice, other: Choice, phase: str) -> float:
        """By how many bytes, at the peak of a phase, the other's answer on an axis takes more than the one's."""
        first, second = (self._effect_of(axis, choice.picks[axis.name].name) for choice in (one, other))
        return second.phases.get(phase, 0) - first.phases.get(phase, 0)

    def _effect_of(self, axis: Axis, name: str) -> Guess:
        return Guess(0, {}) if name == self.base.picks[axis.name].name else self._effect(axis, name)

    def _at(self, rows: int, batch: int) -> tuple[float, dict[str, float]]:
        """The base with so many rows a pass: bytes are linear in the rows, seconds in the number of passes."""
        low, few = self.costs.exact(self.base), rows_per_pass(self.base, batch)
        if rows == few:
            return low.seconds, dict(low.phases)
        high = self.costs.exact(self.whole)
        share = (rows - few) / (batch - few)
        passes = (batch / rows - 1) / (batch / few - 1)
        phases = {name: size + (high.phases.get(name, size) - size) * share for name, size in low.phases.items()}
        return high.seconds + (low.seconds - high.seconds) * passes, phases

    def _effect(self, axis: Axis, name: str) -> Guess:
        """What an answer adds to the base's, or, where they cannot stand together, to the member that is nearest."""
        known = self._effects.get((axis.name, name))
        if known is not None:
            return known
        index = {choice.key: choice for choice in self.members}
        having = [choice for choice in self.members if choice.picks[axis.name].name == name]
        pairs = [(c, c.with_(**{axis.name: self.base.picks[axis.name]})) for c in having]
        with_it, without = max(
            ((c, other) for c, other in pairs if other.key in index), key=lambda pair: self._leanness(pair[0])
        )
        one, other = self.costs.exact(with_it), self.costs.exact(without)
        rows = rows_per_pass(with_it, self.costs.problem.rows) if axis.per_row else 1
        phases = {p: (one.phases.get(p, 0) - other.phases.get(p, 0)) / rows for p in {**one.phases, **other.phases}}
        launching = one.launching - other.launching
        seconds = one.seconds - other.seconds - launching
        effect = self._effects[axis.name, name] = Guess(seconds, phases, launching * rows)
        return effect
