"""The second optimizer step of a trace: live bytes by category along its events, and its phases."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lowmem.memory.beside import ordered
from lowmem.memory.moments import category_of
from lowmem.memory.trace import Trace


@dataclass(frozen=True)
class Stretch:
    """A stretch of a step: a phase, and the events (counted from the step's first one) it begins and ends at."""

    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """Live bytes within one optimizer step.

    Attributes:
        events: which events are shown (counted from the step's first one): of each stretch of a few, the highest.
        bytes: category -> live bytes after each of them, in the order in which categories are listed.
        stretches: the phases, in order.
        peak: index into `events` of the highest.
    """

    events: list[int]
    bytes: dict[str, list[int]]
    stretches: list[Stretch]
    peak: int


def second_step(trace: Trace, vocabulary: int = 0, most: int = 1500) -> Step:
    """The second optimizer step of what `record` recorded.

    Args:
        trace: of two steps.
        vocabulary: width of the logits, by which the loss is told from other activations.
        most: how many moments are kept.
    """
    begins = [index for index, phase in trace.marks if phase == "forward"]
    first = begins[1]
    last = next((i for i, phase in trace.marks if i > first and phase not in ("forward", "step")), len(trace.events))
    categories = [category_of(storage, vocabulary) for storage in trace.storages]
    names = ordered(dict.fromkeys(categories))
    row = {name: number for number, name in enumerate(names)}
    changes = np.zeros((len(names), last - first), dtype=np.int64)
    before = np.zeros(len(names), dtype=np.int64)
    for index, (number, size) in enumerate(trace.events[:last]):
        if index < first:
            before[row[categories[number]]] += size
        else:
            changes[row[categories[number]], index - first] = size
    live = before[:, None] + changes.cumsum(axis=1)
    kept = _highest(live.sum(axis=0), most)
    shown = {name: live[row[name], kept].tolist() for name in names if live[row[name]].any()}
    total = live.sum(axis=0)[kept]
    return Step(kept.tolist(), shown, _stretches(trace, first, last), int(total.argmax()))


def _highest(total: Any, most: int) -> Any:
    """The first and the last event, and the highest of each of `most` stretches."""
    edges = np.unique(np.linspace(0, len(total), most + 1).astype(int))
    inside = [start + int(total[start:end].argmax()) for start, end in pairwise(edges.tolist())]
    return np.unique([0, *inside, len(total) - 1])


def _stretches(trace: Trace, first: int, last: int) -> list[Stretch]:
    """Runs of one phase. Its begin shows in what is born; the update's also where nothing is (`marks`)."""
    update = next((index for index, phase in trace.marks if phase == "step" and index >= first), last)
    found: list[Stretch] = []
    phase, start = "forward", first
    for index in range(first, last):
        number, size = trace.events[index]
        now = "step" if index >= update else trace.storages[number].phase if size > 0 else phase
        if now != phase:
            found.append(Stretch(phase, start - first, index - first))
            phase, start = now, index
    return _without_slivers([*found, Stretch(phase, start - first, last - first)])


def _without_slivers(stretches: list[Stretch]) -> list[Stretch]:
    """A pass without a backward one (the losses of the batch are added up) belongs to what comes before it."""
    kept: list[Stretch] = []
    for stretch, after in zip(stretches, [*stretches[1:], None], strict=True):
        trailing = stretch.phase == "forward" and (after is None or after.phase == "step")
        if kept and (trailing or stretch.phase == kept[-1].phase):
            kept[-1] = Stretch(kept[-1].phase, kept[-1].start, stretch.end)
        else:
            kept.append(stretch)
    return kept
