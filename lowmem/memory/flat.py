"""Is memory flat over the steps? A leak shows as growth that does not end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import psutil
import torch

from lowmem.run import Run

Point = tuple[int, int]  # step, bytes

_KEPT = 64  # points; beyond, every second one is dropped, so that they span the whole run
_ENOUGH = 20  # points to judge by
_GROUPS = 4
_LEAST = {"cuda": 8 * 1024**2, "cpu": 48 * 1024**2}  # bytes; resident pages come and go in larger pieces
_LEAST_SHARE = 0.01


class MemoryWatch:
    """Looks at the memory in use whenever a line is logged; steady growth over many of them gives one notice.

    On CUDA it is what the allocator has handed out; else the process's resident pages without those that mirror files
    (data and weights that are mapped count as read, not as grown).
    """

    def __init__(self, run: Run, measure: Callable[[], int] | None = None) -> None:
        self.run = run
        self.measure = measure or (allocated if run.device.type == "cuda" else resident)
        self.least = _LEAST["cuda" if run.device.type == "cuda" else "cpu"]
        self.points: list[Point] = []
        self._spacing = self._passed = 1
        self._told = False

    def look(self, step: int) -> None:
        """Measure, between two steps."""
        self._passed -= 1
        if self._told or self._passed:
            return
        self._passed = self._spacing
        self.points.append((step, self.measure()))
        if slope := steady_growth(self.points, self.least):
            self._told = True
            (start, before), (_, after) = self.points[0], self.points[-1]
            self.run.notice(
                f"memory grows by about {slope:,.0f} bytes a step ({before / 1024**3:.2f} GiB after step {start}, "
                f"{after / 1024**3:.2f} GiB after step {step}): something keeps tensors alive, perhaps an observer or "
                "a strategy that collects them"
            )
        if len(self.points) == _KEPT:
            self.points = self.points[::2]
            self._spacing *= 2


def steady_growth(points: Sequence[Point], least: int) -> float | None:
    """Bytes a step by which memory grows; null where it is flat, or has only risen for a while.

    The first quarter is left out: caches fill, and states are made. What follows is cut into four groups in order, of
    which each gives its lowest value. A leak raises every one above the one before, by like amounts. An evaluation
    raises one of them, rows that are longer than all before raise them less and less, and other rows up and down.

    Args:
        points: step and bytes, in order.
        least: growth below this over all groups is no matter.
    """
    if len(points) < _ENOUGH:
        return None
    each = len(points) * 3 // 4 // _GROUPS
    late = points[-each * _GROUPS :]
    lows = [min(size for _, size in late[i * each : (i + 1) * each]) for i in range(_GROUPS)]
    rises = [after - before for before, after in pairwise(lows)]
    whole = lows[-1] - lows[0]
    even = min(rises) >= 0.75 * whole / len(rises) and rises[-1] >= 0.8 * rises[0]
    if whole < max(least, _LEAST_SHARE * lows[0]) or not even:
        return None
    return whole / (late[-each][0] - late[0][0])


def resident() -> int:
    """Resident bytes of this process without file-backed pages, where the system tells them apart (Linux)."""
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


def allocated() -> int:
    """Bytes of all live tensors on the current CUDA device."""
    return int(torch.cuda.memory_allocated())
