"""How long a step takes, predicted: every operation by a roofline, gathered while the step is traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowmem.memory.cards import Card
from lowmem.memory.costs import Cost, costs_of, is_free
from lowmem.memory.messages import ranks_of


@dataclass
class Totals:
    """The work of a phase.

    Attributes:
        flops: floating-point operations by kind: the dtype of matrix products and attention, or `elementwise`.
        bytes: read and written in the card's memory.
        launches: kernels.
        host_bytes: between host and card.
        sent_bytes: to other cards, by this one.
    """

    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: float = 0
    launches: float = 0
    host_bytes: float = 0
    sent_bytes: float = 0


class Work:
    """How often each operation came, by phase, with what it costs. A value: it adds, subtracts and scales.

    Every count is linear in what was traced, so a deeper model's work is `a + (layers - n) * (b - a)` of the works `a`
    and `b` of `n` and `n + 1` layers, and the work of a steady step is that of two steps less that of one.

    Args:
        device: type of the device that stands for the card while `see` is called; operations on others are the host's
            and not counted.

    Attributes:
        counts: (phase, cost) -> how often.
    """

    def __init__(self, device: str = "meta", counts: Mapping[tuple[str, Cost], float] | None = None) -> None:
        self.device = device
        self.counts: dict[tuple[str, Cost], float] = dict(counts or {})
        self._known: dict[tuple[Any, ...], tuple[tuple[str, Cost], ...]] = {}

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str, times: float = 1) -> None:
        """Count an operation.

        Args:
            func: the operation, as a dispatch mode gets it, and with it its `args`, `kwargs` and `result`.
            phase: what is going on.
            times: how often it would run where it was seen once.
        """
        if is_free(func):
            return
        key: list[Any] = [func, phase]
        if func.namespace == "c10d":
            key.append(ranks_of(args))
        _describe(args, key)
        if kwargs:
            _describe(kwargs.values(), key)
        _describe(result if type(result) in (list, tuple) else (result,), key)
        whole = tuple(key)
        entries = self._known.get(whole)
        if entries is None:
            costs = costs_of(func, args, kwargs or {}, result, self.device)
            entries = self._known[whole] = tuple((phase, cost) for cost in costs)
            for entry in entries:
                self.counts.setdefault(entry, 0)
        counts = self.counts
        for entry in entries:
            counts[entry] += times

    def moved(self, size: int, phase: str, *, hidden: bool = False) -> None:
        """Count a copy between host and card that no operation shows.

        Args:
            size: bytes.
            phase: when.
            hidden: on a stream of its own, so that other work of the phase goes on meanwhile.
        """
        entry = (phase, Cost("copy", "hidden transfer" if hidden else "transfer", "float32", 0, 0, 1, size))
        self.counts[entry] = self.counts.get(entry, 0) + 1

    # -- what it means ------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, Totals]:
        """Phase -> its work."""
        found: dict[str, Totals] = defaultdict(Totals)
        for (phase, cost), count in self.counts.items():
            total = found[phase]
            total.flops["elementwise" if cost.kind == "elementwise" else cost.dtype] += count * cost.flops
            total.bytes += count * cost.bytes
            total.launches += count * cost.launches
            total.host_bytes += count * cost.host_bytes
            total.sent_bytes += count * cost.sent_bytes
        return dict(found)

    def seconds(self, card: Card) -> dict[str, float]:
        """Phase -> predicted seconds: the sum over operations of the slower of products and bytes, and the launch.

        Messages, and copies on a stream of their own, take time only where they outlast the phase's other work.
        """
        busy: dict[str, float] = defaultdict(float)
        hidden: dict[str, float] = defaultdict(float)
        for (phase, cost), count in self.counts.items():
            where = hidden if cost.kind in ("hidden transfer", "message") else busy
            where[phase] += count * cost.seconds(card)
        return {phase: max(busy[phase], hidden[phase]) for phase in {**busy, **hidden}}

    def slowest(self, card: Card) -> list[tuple[float, float, str]]:
        """What takes the time: (seconds, count, phase and operation), longest first."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (phase, cost), count in self.counts.items():
            entry = found[f"{phase} {cost.op}"]
            entry[0] += count * cost.seconds(card)
            entry[1] += count
        return sorted(((seconds, count, words) for words, (seconds, count) in found.items()), reverse=True)

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def copy(self) -> Work:
        """As it is now."""
        return Work(self.device, self.counts)

    def scaled(self, factors: Mapping[str, float]) -> Work:
        """Each phase as often as its factor says (1 where it says nothing)."""
        return Work(self.device, {e: n * factors.get(e[0], 1) for e, n in self.counts.items()})

    def __add__(self, other: Work) -> Work:
        return self._with(other, 1)

    def __sub__(self, other: Work) -> Work:
        return self._with(other, -1)

    def __mul__(self, factor: float) -> Work:
        return Work(self.device, {entry: count * factor for entry, count in self.counts.items()})

    __rmul__ = __mul__

    def _with(self, other: Work, sign: int) -> Work:
        counts = dict(self.counts)
        for entry, count in other.counts.items():
            counts[entry] = counts.get(entry, 0) + sign * count
        return Work(self.device, {entry: count for entry, count in counts.items() if count})


def _describe(values: Any, key: list[Any]) -> None:
    """Add to a key whatever the cost of an operation depends on: shapes, dtypes, devices, switches.

    Contiguity stands for strides: hardly an operation meets both an expanded and a transposed tensor of one shape.
    """
    for value in values:
        if isinstance(value, Tensor):
            key += (value.shape, value.dtype, value.is_cpu, value.is_contiguous())
        elif value is True or value is False:
            key.append(value)
        elif type(value) in (list, tuple) and value and isinstance(value[0], Tensor):
            _describe(value, key)
