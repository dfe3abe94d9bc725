"""The peak of each phase in a trace, and what made it up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lowmem.memory.trace import Storage, Trace

_PASSES = ("forward", "evaluate", "generate")


@dataclass(frozen=True)
class Moment:
    """The moment at which most bytes lived.

    Attributes:
        index: of the event that reached it.
        bytes: live bytes, unrounded; the sum of `ledger`.
        ledger: category -> bytes, largest first.
    """

    index: int
    bytes: int
    ledger: dict[str, int]


def moments(trace: Trace, vocabulary: int = 0) -> dict[str, Moment]:
    """The highest moment of each phase, in the order of the phases.

    Args:
        trace: what was recorded; a storage's category is its label, else it follows from its phase and shape.
        vocabulary: width of the logits, by which the loss is told from other activations.
    """
    live: Counter[str] = Counter()
    total, phase = 0, ""
    highest: dict[str, Moment] = {}
    categories: dict[int, str] = {}
    rising: Moment | None = None  # the ledger of a peak is copied once, when the bytes fall again
    for index, (number, size) in enumerate(trace.events):
        storage = trace.storages[number]
        if size < 0 and rising is not None:
            highest[phase] = Moment(rising.index, rising.bytes, dict(live.most_common()))
            rising = None
        born = number not in categories
        if born and storage.phase != phase:
            if rising is not None:
                highest[phase] = Moment(rising.index, rising.bytes, dict(live.most_common()))
                rising = None
            phase = storage.phase
        category = categories.get(number) or categories.setdefault(number, category_of(storage, vocabulary))
        live[category] += size
        total += size
        if born and (phase not in highest or total > highest[phase].bytes) and (rising is None or total > rising.bytes):
            rising = Moment(index, total, {})
    if rising is not None:
        highest[phase] = Moment(rising.index, rising.bytes, dict(live.most_common()))
    return {name: Moment(m.index, m.bytes, {c: b for c, b in m.ledger.items() if b}) for name, m in highest.items()}


def category_of(storage: Storage, vocabulary: int) -> str:
    """Label, else `loss` (as wide as the vocabulary), `activations` (of a forward pass), or `temporaries`."""
    if storage.label:
        return storage.label
    if vocabulary and storage.shape[-1:] == (vocabulary,):
        return "loss"
    return "activations" if storage.phase in _PASSES else "temporaries"


def place_at(trace: Trace, index: int) -> str | None:
    """The layer that is at work at an event: of what lives then, the one that came last in the model."""
    places = {s.place for s in trace.live_at(index) if s.place and s.label is None}
    if trace.storages[trace.events[index][0]].phase == "backward":
        return max(places, key=_number, default=None)
    return trace.storages[trace.events[index][0]].place


def _number(place: str) -> int:
    return int(place.rsplit(" ", 1)[-1])
