"""Fewer points for the same picture."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]


def thin(points: Sequence[Point], limit: int = 600) -> list[Point]:
    """At most about `limit` of the points: the first and the last, and of each stretch the lowest and the highest.

    Half the bounds between stretches are evenly spaced and half logarithmically, as most happens at the beginning of a
    run. Spikes stay; of the points of a stretch that are NaN or infinite, one stays. Nothing is averaged.

    Args:
        points: x and y, x not falling.
        limit: up to which number all points stay.
    """
    if len(points) <= limit:
        return list(points)
    kept = {0, len(points) - 1}
    bounds = stretches(len(points), limit // 2)
    for start, end in pairwise(bounds):
        finite = [i for i in range(start, end) if math.isfinite(points[i][1])]
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        if len(finite) < end - start:
            kept.add(next(i for i in range(start, end) if not math.isfinite(points[i][1])))
    return [points[i] for i in sorted(kept)]


def stretches(length: int, number: int) -> list[int]:
    """Bounds of about `number` stretches of `range(length)`, from 0 to `length`."""
    half = number // 2
    even = {round(i * length / half) for i in range(half + 1)}
    log = {round(length ** (i / half)) for i in range(half + 1)}
    return sorted(even | log | {0, length})


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The mean over the last `window` finite values at each finite point; a gap stays a gap."""
    found: list[Point] = []
    last: deque[float] = deque()
    total = 0.0
    for x, y in points:
        if math.isfinite(y):
            last.append(y)
            total += y - (last.popleft() if len(last) > window else 0.0)
        found.append((x, total / len(last) if math.isfinite(y) else y))
    return found


def sample_rows(length: int, most: int) -> list[int]:
    """Indices of at most `most` rows, denser at the beginning, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return sorted({round(length ** (i / (most - 1))) - 1 for i in range(most)})
