"""One optimizer step as a picture: live bytes by category as stacked areas, phases, the peak, a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowmem.memory.beside import operation, ordered, rows, short
from lowmem.memory.estimate import Estimate
from lowmem.memory.picture import ALARM, GIB, GRID, INK, SOFT, colours, legend, new_figure, tidy, titles, write
from lowmem.memory.step import Step, Stretch

_LEAST = 0.055  # share of the width that every stretch of a phase gets at least, so that it can be read
_NAMES = {"forward": "forward", "backward": "backward", "step": "update"}


def draw(found: Estimate, step: Step, file: Path, card_bytes: int | None = None) -> None:
    """Write the picture.

    Args:
        found: the estimate, for its words.
        step: the bytes.
        file: .png, .svg or .pdf.
        card_bytes: what the allocator may reserve on a card, for a line.
    """
    figure = new_figure(10.5, 5.4)
    axes = figure.add_axes((0.075, 0.185, 0.9, 0.63))
    where = _along(step.stretches)
    x = where(step.events)
    names = ordered(step.bytes)
    shades = colours(names)
    layers = np.array([step.bytes[name] for name in names]) / GIB
    axes.stackplot(x, layers, colors=[shades[name] for name in names], linewidth=0, step="post")
    total = layers.sum(axis=0)
    limit = 1.3 * max(total.max(), found.peak_reserved_bytes / GIB)
    usable = None if card_bytes is None else card_bytes / GIB
    beyond = usable is not None and usable > 1.6 * limit  # its line would press the picture flat
    if usable is not None and not beyond:
        limit = max(limit, 1.06 * usable)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, limit)
    axes.set_xticks([])
    axes.set_ylabel("GiB", fontsize=9.5, color=INK)
    axes.set_xlabel(
        "progress through the second optimizer step: tensors that come and go, not seconds",
        fontsize=9,
        color=SOFT,
        labelpad=6,
    )
    axes.grid(axis="y", color=GRID)
    tidy(axes)
    _phases(axes, step.stretches, where, limit)
    _level(axes, found.peak_reserved_bytes / GIB, f"reserved {found.peak_reserved_bytes / GIB:.2f} GiB", INK, limit)
    if usable is not None and not beyond:
        _level(axes, usable, f"{usable:.1f} GiB to use", ALARM, limit, "right")
    _peak(axes, found, x[step.peak], total[step.peak], limit)
    card = f"; the {usable:.1f} GiB of the card lie above the top edge" if beyond else ""
    titles(
        figure,
        f"{short(found.model)}: memory within one optimizer step",
        f"predicted, live tensors by category; {rows(found.lengths)}{_drawn(step)}{card}",
    )
    seen = {name: shades[name] for name, layer in zip(names, layers, strict=True) if layer.max() > total.max() / 500}
    legend(figure, seen, loc="lower left", bbox_to_anchor=(0.01, 0.0), ncols=5, columnspacing=1.4)
    write(figure, file)


def _along(stretches: Sequence[Stretch]) -> Callable[[Any], Any]:
    """Events -> 0 to 1; a phase of few events is widened until its name fits."""
    lengths = np.array([max(1, s.end - s.start) for s in stretches], dtype=float)
    widths = np.maximum(lengths / lengths.sum(), min(_LEAST, 1 / len(stretches)))
    edges = np.concatenate([[0.0], np.cumsum(widths / widths.sum())])
    events = [s.start for s in stretches] + [stretches[-1].end]
    return lambda where: np.interp(where, events, edges)


def _phases(axes: Any, stretches: Sequence[Stretch], where: Callable[[Any], Any], limit: float) -> None:
    for number, stretch in enumerate(stretches):
        left, right = where([stretch.start, stretch.end])
        if number:
            axes.axvline(left, color=SOFT, linewidth=0.7, linestyle=(0, (4, 3)))
        if right - left > 0.04:
            axes.text(
                (left + right) / 2,
                1.012 * limit,
                _NAMES.get(stretch.phase, stretch.phase),
                ha="center",
                va="bottom",
                fontsize=9,
                color=SOFT,
            )


def _level(axes: Any, size: float, text: str, colour: str, limit: float, side: str = "left") -> None:
    axes.axhline(size, color=colour, linewidth=1.1)
    x = 0.006 if side == "left" else 0.994
    axes.text(x, size + 0.008 * limit, text, fontsize=8.5, color=colour, va="bottom", ha=side)


def _peak(axes: Any, found: Estimate, x: float, y: float, limit: float) -> None:
    """A dot, and words in the free room above what is reserved."""
    place = f", {found.place}" if found.place else ""
    words = f"{y:.2f} GiB in {found.phase}{place}, at {operation(found.operation)}"
    right = x > 0.5
    height = max(y, found.peak_reserved_bytes / GIB) + 0.07 * limit
    axes.plot([x], [y], marker="o", markersize=5, color=INK, zorder=5)
    axes.annotate(
        words,
        (x, y),
        (x + (0.02 if right else -0.02), height),
        fontsize=9,
        color="white",
        ha="right" if right else "left",
        va="bottom",
        zorder=6,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": INK, "linewidth": 0},
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 1.0, "shrinkB": 4, "relpos": (1 if right else 0, 0)},
    )


def _drawn(step: Step) -> str:
    passes = sum(stretch.phase == "backward" for stretch in step.stretches)
    return "; of micro-batches that are alike, two are drawn" if passes > 1 else ""
