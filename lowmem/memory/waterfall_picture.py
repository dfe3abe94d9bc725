"""The waterfall as a picture: a bar per technique, by category, once whole and once enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowmem.memory.beside import ordered, rows, short
from lowmem.memory.picture import ALARM, GIB, GRID, INK, SOFT, colours, legend, new_figure, tidy, titles, write
from lowmem.memory.waterfall import RULE, Bar, Waterfall

_LEFT, _RIGHT = 0.2, 0.83  # of the figure's width
_ENLARGE_FROM = 6  # times the lowest bar, from which on the highest needs a view of its own


def draw(found: Waterfall, file: Path, card_bytes: int | None = None) -> None:
    """Write the picture.

    Args:
        found: the numbers.
        file: .png, .svg or .pdf.
        card_bytes: what the allocator may reserve on a card, for a line.
    """
    bars = found.bars
    highest, lowest = max(b.peak_reserved_bytes for b in bars), bars[-1].peak_reserved_bytes
    focus = max(2.2 * lowest, 1.1 * (card_bytes or 0)) / GIB
    enlarged = highest > _ENLARGE_FROM * lowest and focus < highest / GIB
    figure = new_figure(10.5, 2.1 + 0.42 * len(bars))
    shades = colours(ordered(dict.fromkeys(name for bar in bars for name in bar.ledger)))
    top, bottom = 1 - 1.0 / figure.get_figheight(), 1.05 / figure.get_figheight()
    if enlarged:
        grid = figure.add_gridspec(
            1, 2, width_ratios=(0.3, 0.7), wspace=0.06, left=_LEFT, right=_RIGHT, top=top, bottom=bottom
        )
        whole, near = (figure.add_subplot(cell) for cell in grid)
        _bars(near, bars, shades, focus)
        _heading(near, f"enlarged: 0 to {focus:.0f} GiB")
        _heading(whole, "to scale")
    else:
        whole = near = figure.add_axes((_LEFT, bottom, _RIGHT - _LEFT, top - bottom))
    _bars(whole, bars, shades, highest * (1.0 if enlarged else 1.12) / GIB, values=not enlarged)
    _names(whole, bars)
    _columns(near, bars)
    if card_bytes is not None:
        _card_line(near, card_bytes)
    titles(
        figure,
        f"{short(found.model)}: from plain full fine-tuning down",
        f"predicted peak of reserved GPU memory, GiB; {rows(found.lengths)} per optimizer step",
    )
    seen = {name: shade for name, shade in shades.items() if any(_shows(bar, name) for bar in bars)}
    legend(figure, seen, loc="lower left", bbox_to_anchor=(0.01, 0.0), ncols=5, columnspacing=1.4)
    write(figure, file)


def _bars(axes: Any, bars: Sequence[Bar], shades: dict[str, str], limit: float, values: bool = True) -> None:
    for place, bar in enumerate(bars):
        left = 0.0
        for name in ordered(bar.ledger):
            size = bar.ledger[name] / GIB
            shown = min(size, max(0.0, limit - left))
            axes.barh(
                place,
                shown,
                left=left,
                height=0.66,
                color=shades[name],
                linewidth=0,
                hatch="///" if bar.name == RULE else None,
                edgecolor="white",
            )
            left += size
        if not values:
            continue
        if left > limit:
            _torn(axes, place, limit)
        text = f"{left:,.1f}" if left < 100 else f"{left:,.0f}"
        if left > 0.93 * limit:
            axes.text(
                limit * 0.965,
                place,
                text,
                ha="right",
                va="center",
                fontsize=9,
                fontweight="bold",
                color="white",
                zorder=4,
                bbox={"boxstyle": "round,pad=0.25", "facecolor": INK, "linewidth": 0},
            )
        else:
            axes.text(
                left + 0.008 * limit, place, text, ha="left", va="center", fontsize=9.5, fontweight="bold", color=INK
            )
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, limit)
    axes.set_yticks([])
    axes.grid(axis="x", color=GRID)
    tidy(axes)


def _torn(axes: Any, place: int, limit: float) -> None:
    """The end of a bar that goes on beyond the view."""
    step = 0.012 * limit
    xs = [limit - step * (index % 2) for index in range(9)]
    ys = [place - 0.36 + 0.09 * index for index in range(9)]
    axes.fill([*xs, limit * 1.01, limit * 1.01], [*ys, ys[-1], ys[0]], color="white", linewidth=0)


def _names(axes: Any, bars: Sequence[Bar]) -> None:
    axes.set_yticks(range(len(bars)), [("+ " if bar.strategies else "") + bar.name for bar in bars], fontsize=9.5)
    axes.tick_params(axis="y", pad=6)


def _shows(bar: Bar, category: str) -> bool:
    """Whether a category is wide enough in a bar to be seen."""
    return bar.ledger.get(category, 0) > bar.peak_reserved_bytes / 500


def _columns(axes: Any, bars: Sequence[Bar]) -> None:
    """To the right of the bars: what each technique saves, and what it costs in time."""
    from matplotlib.transforms import blended_transform_factory

    timed = any(bar.step_seconds for bar in bars)
    across = blended_transform_factory(axes.figure.transFigure, axes.transData)
    columns = [("saves", [_saved(bar) for bar in bars])]
    if timed:
        columns.append(("time", ["", *(_factor(before, bar) for before, bar in pairwise(bars))]))
    for number, (head, cells) in enumerate(columns):
        x = _RIGHT + 0.07 + 0.075 * number
        for place, cell in [(-0.62, head), *enumerate(cells)]:
            axes.text(
                x,
                place,
                cell,
                transform=across,
                ha="right",
                va="center",
                fontsize=9,
                color=SOFT if cell == head else INK,
            )


def _saved(bar: Bar) -> str:
    if bar.saved_bytes is None:
        return ""
    size = bar.saved_bytes / GIB
    return f"{size:,.0f}" if abs(size) >= 100 else f"{size:,.1f}" if abs(size) >= 10 else f"{size:,.2f}"


def _factor(before: Bar, bar: Bar) -> str:
    if not before.step_seconds or not bar.step_seconds:
        return ""
    return f"x {bar.step_seconds / before.step_seconds:.2f}"


def _heading(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=8.5, color=SOFT, loc="left", pad=4)


def _card_line(axes: Any, card_bytes: int) -> None:
    size = card_bytes / GIB
    if size > axes.get_xlim()[1]:
        return
    axes.axvline(size, color=ALARM, linewidth=1.3, zorder=1.5)  # behind the values
    axes.text(size, -0.56, f"{size:.1f} GiB to use", fontsize=8.5, color=ALARM, va="bottom", ha="center")
