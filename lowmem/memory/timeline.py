"""How the bytes of one measured step came and went, by category."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lowmem.durable import write_text

FILE = "memory_timeline.json"
COMPARISON = "memory.json"  # measured beside predicted


@dataclass(frozen=True)
class Timeline:
    """Live bytes by category at some moments of a step.

    Attributes:
        seconds: the moments, since the step began; measuring slows a step down.
        bytes: category -> live bytes at each of them.
        moments: how many there were before they were thinned out.
    """

    seconds: list[float]
    bytes: dict[str, list[int]]
    moments: int

    def write(self, folder: Path, step: int) -> None:
        """Leave it in a run folder as `memory_timeline.json`."""
        write_text(folder / FILE, json.dumps({"step": step, **asdict(self)}))


def highest_moments(times: Sequence[float], changes: Sequence[tuple[str, int]], limit: int) -> Timeline:
    """Thin a step out to the highest moment of each of `limit - 1` equal stretches of time, and its last one.

    Args:
        times: when each change came, in seconds; they do not fall.
        changes: category, and the bytes that came (above 0) or went.
        limit: the most moments to keep; at least 2.
    """
    if not times:
        return Timeline([], {}, 0)
    width = (times[-1] - times[0]) / (limit - 1) or 1.0
    live: Counter[str] = Counter()
    kept: list[tuple[float, int, dict[str, int]]] = []  # seconds, stretch, bytes by category
    total = highest = 0
    for moment, (category, size) in zip(times, changes, strict=True):
        live[category] += size
        total += size
        stretch = min(int((moment - times[0]) / width), limit - 2)
        if not kept or kept[-1][1] < stretch:
            kept.append((moment - times[0], stretch, dict(live)))
            highest = total
        elif total > highest:
            kept[-1] = (moment - times[0], stretch, dict(live))
            highest = total
    last = times[-1] - times[0]
    if kept[-1][0] < last:
        kept.append((last, limit - 1, dict(live)))
    return Timeline(
        [round(seconds, 6) for seconds, _, _ in kept],
        {category: [there.get(category, 0) for _, _, there in kept] for category in live},
        len(times),
    )
