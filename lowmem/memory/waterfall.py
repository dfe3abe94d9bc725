"""From plain full fine-tuning to what a recipe needs, one technique at a time: `lowmem waterfall`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from lowmem.errors import UserError
from lowmem.memory.beside import Difference, differences
from lowmem.memory.estimate import Estimate, estimate
from lowmem.memory.rule_of_thumb import MemoryEstimate
from lowmem.memory.subject import Subject
from lowmem.strategies import with_defaults
from lowmem.strategy import Strategy, resolve

if TYPE_CHECKING:
    from lowmem.recipe import Recipe

RULE, PLAIN = "rule of thumb: 4N", "plain loop"


@dataclass(frozen=True)
class Bar:
    """One step down.

    Attributes:
        name: what it adds to the bar before.
        strategies: the names of those it adds.
        peak_reserved_bytes, peak_allocated_bytes, host_bytes, pinned_bytes, ledger: as in an `Estimate` of the plain
            loop with this bar's strategies and those before; of the rule, the bytes it counts.
        saved_bytes: how much less than the bar before (below 0: more); null for the first two bars.
        phase: when the peak comes; null for the rule.
    """

    name: str
    strategies: tuple[str, ...]
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    host_bytes: int
    pinned_bytes: int
    ledger: dict[str, int]
    saved_bytes: int | None
    phase: str | None


@dataclass(frozen=True)
class Waterfall:
    """The way down.

    Attributes:
        model: its name.
        lengths: tokens of each row of the optimizer batch that was run.
        parameters: number of weights of the plain model.
        bytes_per_parameter: of its dtype; the rule is parameters x bytes x 4.
        bars: the rule, the plain loop, then the techniques; the last one is `estimate(recipe)`.
        differences: what the plain loop needs beside what the rule counts, by category.
        notes: which techniques could not come in the recipe's order, and why.
        final: the estimate of the whole recipe.
    """

    model: str
    lengths: tuple[int, ...]
    parameters: int
    bytes_per_parameter: int
    bars: list[Bar]
    differences: list[Difference]
    notes: list[str]
    final: Estimate

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "model": self.model,
            "lengths": list(self.lengths),
            "parameters": self.parameters,
            "bytes_per_parameter": self.bytes_per_parameter,
            "bars": [{**vars(bar), "strategies": list(bar.strategies)} for bar in self.bars],
            "differences": [vars(difference) for difference in self.differences],
            "notes": self.notes,
            "final": self.final.as_dict(),
        }


def waterfall(
    run: Recipe | Subject,
    *,
    lengths: Sequence[int] | None = None,
    expandable_segments: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Waterfall:
    """Predict a run with none of its strategies, with the first, the first two, and so on to all of them.

    They come in the recipe's order. One that is refused without a later one (quantization trains nothing without lora)
    waits until the first combination with it is allowed. The plain loop has the recipe's model, rows, batch and
    numbers: the whole optimizer batch in one pass, trained weights in float32, AdamW.

    Args:
        run: a recipe, or what it comes to.
        lengths: tokens of each row of one optimizer batch; by default `batch_size` rows of `max_length`.
        expandable_segments: how the allocator is set.
        progress: is told what is traced next.

    Raises:
        UserError: as `estimate`.
    """
    subject = run if isinstance(run, Subject) else Subject.of(run)

    def predict(strategies: Sequence[Strategy]) -> Estimate:
        progress(" + ".join(s.name for s in strategies) or PLAIN)
        return estimate(
            subject.with_strategies(strategies), lengths=lengths, expandable_segments=expandable_segments
        )

    final = predict(subject.strategies)  # first: what is wrong with the recipe is said before the way is walked
    parameters, dtype_bytes = _size(subject)
    plain = predict(()) if subject.strategies else final
    rule = _rule(parameters, dtype_bytes)
    bars = [
        Bar(RULE, (), sum(rule.values()), sum(rule.values()), 0, 0, rule, None, None),
        _bar(PLAIN, (), plain, None),
    ]
    notes: list[str] = []
    for group, found in _way_down(subject, predict, final, notes):
        names = tuple(strategy.name for strategy in group)
        bars.append(_bar(" + ".join(names), names, found, bars[-1].peak_reserved_bytes))
    counted = {"weights": parameters * dtype_bytes, "gradients": rule["gradients"]}
    counted["optimizer state"] = rule["optimizer state"]
    return Waterfall(
        final.model,
        final.lengths,
        parameters,
        dtype_bytes,
        bars,
        differences(counted, plain.ledger, plain.rule),
        notes,
        final,
    )


def _way_down(
    subject: Subject, predict: Callable[[Sequence[Strategy]], Estimate], final: Estimate, notes: list[str]
) -> Iterator[tuple[Sequence[Strategy], Estimate]]:
    """What is added at each step, and what the run needs with it."""
    taken: list[Strategy] = []
    left = list(subject.strategies)
    while left:
        refused: dict[str, str] = {}
        for group in (g for size in range(1, len(left) + 1) for g in combinations(left, size)):
            if len(group) == len(left):
                found = final
                break
            try:
                resolve(with_defaults([*taken, *group], subject.training))
                found = predict([*taken, *group])
                break
            except UserError as error:
                refused[" + ".join(s.name for s in group)] = " ".join(str(error).split())
        for name, reason in refused.items():
            notes.append(f"{name} comes after {' + '.join(s.name for s in group)}: alone, {reason}")
        yield group, found
        taken += group
        left = [strategy for strategy in left if strategy not in group]


def _bar(name: str, added: tuple[str, ...], found: Estimate, before: int | None) -> Bar:
    return Bar(
        name,
        added,
        found.peak_reserved_bytes,
        found.peak_allocated_bytes,
        found.host_bytes,
        found.pinned_bytes,
        found.ledger,
        None if before is None else before - found.peak_reserved_bytes,
        found.phase,
    )


def _size(subject: Subject) -> tuple[int, int]:
    """Number of weights, tied ones once, and bytes of each in the dtype the model is loaded in."""
    weights = {id(weight): weight for weight in subject.make_model(None).parameters()}.values()
    count = sum(weight.numel() for weight in weights)
    return count, round(sum(weight.nbytes for weight in weights) / count)


def _rule(parameters: int, dtype_bytes: int) -> dict[str, int]:
    """The tutorial's first rule: weights, gradients and two moments, all in the weights' dtype."""
    one = parameters * dtype_bytes
    return {"weights, trainable": one, "gradients": one, "optimizer state": 2 * one}
