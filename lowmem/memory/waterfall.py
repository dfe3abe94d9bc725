"""From plain full fine-tuning to what a recipe needs, one technique at a time: `lowmem waterfall`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from lowmem.errors import UserError
from lowmem.memory.beside import Difference, differences
from lowmem.memory.cards import Card
from lowmem.memory.depth import figures
from lowmem.memory.estimate import GIB, Estimate, estimate
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
        peak_reserved_bytes, peak_allocated_bytes, host_bytes, pinned_bytes, managed_bytes, ledger: as in an `Estimate`
            of the plain loop with this bar's strategies and those before; of the rule, the bytes it counts.
        saved_bytes: how much less than the bar before (below 0: more); null for the first two bars.
        phase: when the peak comes; null for the rule.
        step_seconds: of an optimizer step, predicted as if the card had memory enough; null for the rule, and without
            a card.
    """

    name: str
    strategies: tuple[str, ...]
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    host_bytes: int
    pinned_bytes: int
    managed_bytes: int
    ledger: dict[str, int]
    saved_bytes: int | None
    phase: str | None
    step_seconds: float | None


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
        notes: which techniques could not come in the recipe's order, and where blocks of memory lie unused.
        card: whose speed the times are for; null: there are none.
        final: the estimate of the whole recipe.
    """

    model: str
    lengths: tuple[int, ...]
    parameters: int
    bytes_per_parameter: int
    bars: list[Bar]
    differences: list[Difference]
    notes: list[str]
    card: str | None
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
            "card": self.card,
            "final": self.final.as_dict(),
        }


def waterfall(
    run: Recipe | Subject,
    *,
    lengths: Sequence[int] | None = None,
    expandable_segments: bool = True,
    card: Card | None = None,
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
        card: whose speed the predicted times are for; null: no times.
        progress: is told what is traced next.

    Raises:
        UserError: as `estimate`.
    """
    subject = run if isinstance(run, Subject) else Subject.of(run)

    def predict(strategies: Sequence[Strategy]) -> Estimate:
        progress(" + ".join(s.name for s in strategies) or PLAIN)
        return estimate(subject.with_strategies(strategies), lengths=lengths, expandable_segments=expandable_segments)

    final = predict(subject.strategies)  # first: what is wrong with the recipe is said before the way is walked
    parameters, dtype_bytes = _size(subject)
    plain = predict(()) if subject.strategies else final
    steps: list[tuple[Sequence[Strategy], Estimate]] = [((), plain)]
    notes: list[str] = []
    steps += _way_down(subject, predict, final, notes)
    bars = [_rule(parameters, dtype_bytes)]
    taken: list[Strategy] = []
    for group, found in steps:
        taken += group
        seconds = figures(subject.with_strategies(taken), final.lengths).seconds(card) if card else None
        bars.append(_bar(tuple(s.name for s in group), found, bars[-1].peak_reserved_bytes, seconds))
    notes += [note for before, bar in pairwise(bars[1:]) for note in _unseen(before, bar)]
    return Waterfall(
        final.model,
        final.lengths,
        parameters,
        dtype_bytes,
        bars,
        differences(bars[0].ledger, plain.ledger, plain.rule),
        notes,
        card.name if card else None,
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
                refused[_names(group)] = " ".join(str(error).split())
        notes += [f"{name} comes with or after {_names(group)}. Before: {why}" for name, why in refused.items()]
        yield group, found
        taken += group
        left = [strategy for strategy in left if strategy not in group]


def _names(strategies: Sequence[Strategy]) -> str:
    return " + ".join(strategy.name for strategy in strategies)


def _bar(added: tuple[str, ...], found: Estimate, before: int, seconds: float | None) -> Bar:
    return Bar(
        " + ".join(added) or PLAIN,
        added,
        found.peak_reserved_bytes,
        found.peak_allocated_bytes,
        found.host_bytes,
        found.pinned_bytes,
        found.managed_bytes,
        found.ledger,
        before - found.peak_reserved_bytes if added else None,
        found.phase,
        seconds,
    )


def _unseen(before: Bar, bar: Bar) -> Iterator[str]:
    """What the difference in reserved memory does not show: gaps, and memory beside the allocator."""
    less = before.peak_allocated_bytes - bar.peak_allocated_bytes
    if (bar.saved_bytes or 0) < 0 < less:
        slack = bar.ledger["allocator slack"] - before.ledger["allocator slack"]
        yield (
            f"{bar.name} leaves {less / GIB:.2f} GiB less in use, but blocks of other sizes: {slack / GIB:.2f} GiB "
            "more lie in gaps between them"
        )
    paged = bar.managed_bytes - before.managed_bytes
    if paged > 0:
        yield (
            f"{bar.name} keeps {paged / GIB:.2f} GiB beside the allocator, on the card where there is room, else on "
            "the host"
        )


def _size(subject: Subject) -> tuple[int, int]:
    """Number of weights, tied ones once, and bytes of each in the dtype the model is loaded in."""
    weights = {id(weight): weight for weight in subject.make_model(None).parameters()}.values()
    count = sum(weight.numel() for weight in weights)
    return count, round(sum(weight.nbytes for weight in weights) / count)


def _rule(parameters: int, dtype_bytes: int) -> Bar:
    """The tutorial's first rule: weights, gradients and two moments, all in the weights' dtype."""
    one = parameters * dtype_bytes
    ledger = {"weights, trainable": one, "gradients": one, "optimizer state": 2 * one}
    return Bar(RULE, (), 4 * one, 4 * one, 0, 0, 0, ledger, None, None, None)
