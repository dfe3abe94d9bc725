"""Charts as inline SVG between labels in HTML: lines stretch with the page, text keeps its size."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowmem.report.html import Html, esc, table
from lowmem.report.scale import Axis, number, tick_texts
from lowmem.report.thin import Point, sample_rows, smooth, thin

WIDTH, HEIGHT = 1000, 300  # of the drawing's own coordinates
SMOOTHED_FROM = 60  # points, from which on a line of means is drawn over the raw one
DOTS_UP_TO = 30  # points, up to which each one is marked
_TABLE_ROWS = 12
_LOG_FROM = 100  # largest value over the smallest, from which on an axis may be logarithmic


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        name: what the legend calls it.
        points: x and y; NaN and infinite values of y are gaps.
        style: which of ten colours.
        dash: lengths of strokes and gaps; empty for a solid line.
    """

    name: str
    points: Sequence[Point]
    style: int = 0
    dash: str = ""


@dataclass(frozen=True)
class Chart:
    """What a chart is about.

    Attributes:
        ident: the id of its element.
        title: such as `Loss`.
        unit: such as `nats per token`.
        x_name: what runs along the bottom.
        from_zero: the vertical axis begins at 0.
        may_be_log: it may be logarithmic where the values need it.
        smooth: draw means over noisy lines.
        raw: draw what was logged below such means.
        marks: places on the horizontal axis that have a name, such as a resume.
        empty: what to say where there is nothing to draw.
    """

    ident: str
    title: str
    unit: str = ""
    x_name: str = "step"
    from_zero: bool = False
    may_be_log: bool = False
    smooth: bool = True
    raw: bool = True
    marks: Sequence[tuple[float, str]] = field(default=())
    empty: str = "No points."


def line_chart(chart: Chart, series: Sequence[Series]) -> Html:
    """Lines over a common horizontal axis. A series without points is left out."""
    drawn = [one for one in series if one.points]
    values = [y for one in drawn for _, y in _seen(chart, one) if math.isfinite(y)]
    if not drawn:
        return _nothing(chart)
    x_axis = _x_axis([x for one in drawn for x, _ in one.points])
    log = chart.may_be_log and bool(values) and min(values) > 0 and max(values) > _LOG_FROM * min(values)
    y_axis = Axis.around(values, zero=chart.from_zero, log=log)
    lines = [(one, thin(one.points)) for one in drawn]
    shapes = "".join(_line(chart, one, points, x_axis, y_axis) for one, points in lines)
    unit = ", ".join(filter(None, (chart.unit, "logarithmic" if log else "")))
    legend = [(one.name, _swatch(one)) for one in drawn]
    hover = [[one.name, [[x, _plain(y)] for x, y in points]] for one, points in lines]
    return _frame(chart, unit, legend, shapes, x_axis, y_axis, hover, _notes(chart, lines), _values(chart, drawn))


def _notes(chart: Chart, lines: Sequence[tuple[Series, Sequence[Point]]]) -> list[str]:
    """What the drawing leaves out."""
    notes = []
    if means := [one for one, _ in lines if _is_noisy(chart, one)]:
        windows = sorted({_window(one) for one in means})
        last = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
        which, pale = ("Strong lines", "; pale lines: what was logged") if chart.raw else ("Long lines", "")
        notes.append(f"{which}: means over the last {last} points{pale}.")
    thinned = [(one, points) for one, points in lines if len(points) < len(one.points)]
    if thinned:
        counts = ", ".join(
            f"{f'{one.name} ' if len(lines) > 1 else ''}{len(points):,} of {len(one.points):,}"
            for one, points in thinned
        )
        notes.append(f"Points drawn: {counts}; the lowest and highest of each stretch are among them.")
    broken = [(one.name, sum(not math.isfinite(y) for _, y in one.points)) for one, _ in lines]
    if counted := ", ".join(f"{name} {number:,}" for name, number in broken if number):
        notes.append(f"NaN or infinite (gaps, marked at the upper edge): {counted} points.")
    return notes


def _seen(chart: Chart, one: Series) -> Sequence[Point]:
    """What the vertical axis must have room for."""
    return one.points if chart.raw or not _is_noisy(chart, one) else smooth(one.points, _window(one))


def _is_noisy(chart: Chart, one: Series) -> bool:
    return chart.smooth and len(one.points) >= SMOOTHED_FROM


def _window(one: Series) -> int:
    return max(3, len(one.points) // 25)


def area_chart(
    chart: Chart, xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float], int]], notes: Sequence[str] = ()
) -> Html:
    """Layers on top of each other, the first at the bottom.

    Args:
        chart: what it is about; its axis begins at 0.
        xs: places along the bottom, not falling.
        layers: name, a value of 0 or more for each place, and which of ten colours.
        notes: remarks below.
    """
    if not xs or not layers:
        return _nothing(chart)
    x_axis = Axis(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1)
    floors = [[0.0] * len(xs)]
    for _, values, _ in layers:
        floors.append([below + value for below, value in zip(floors[-1], values, strict=True)])
    y_axis = Axis.around(floors[-1], zero=True)
    shapes = []
    for (_, _, style), low, high in zip(layers, floors[:-1], floors[1:], strict=True):
        edge = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        shapes.append(f'<path class="area c{style}" d="{_path(edge, x_axis, y_axis)}z"/>')
    legend = [(name, f'<span class="box c{style}"></span>') for name, _, style in layers]
    named = [(name, values) for name, values, _ in layers] + [("total", floors[-1])]
    series = [Series(name, list(zip(xs, values, strict=True))) for name, values in reversed(named)]
    hover = [[one.name, [[x, _plain(y)] for x, y in one.points]] for one in series]
    return _frame(
        chart, chart.unit, legend, "".join(shapes), x_axis, y_axis, hover, notes, _values(chart, [*reversed(series)])
    )


def _x_axis(xs: Sequence[float]) -> Axis:
    low, high = min(xs), max(xs)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _line(chart: Chart, one: Series, points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    dash = f' stroke-dasharray="{esc(one.dash)}"' if one.dash else ""
    noisy = _is_noisy(chart, one)
    shapes = []
    if chart.raw or not noisy:
        kind = " raw" if noisy else ""
        shapes.append(f'<path class="line c{one.style}{kind}"{dash} d="{_path(points, x_axis, y_axis)}"/>')
    if noisy:
        means = thin(smooth(one.points, _window(one)))
        shapes.append(f'<path class="line c{one.style}"{dash} d="{_path(means, x_axis, y_axis)}"/>')
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) <= DOTS_UP_TO:
        dots = "".join(f"M{_at(point, x_axis, y_axis)}h0" for point in finite)
        shapes.append(f'<path class="dots c{one.style}" d="{dots}"/>' if dots else "")
    else:
        alone = "".join(f"M{_at(run[0], x_axis, y_axis)}h0" for run in _runs(points) if len(run) == 1)
        shapes.append(f'<path class="dots c{one.style}" d="{alone}"/>' if alone else "")
    broken = "".join(f"M{_round(x_axis.at(x) * WIDTH)} 0v14" for x, y in points if not math.isfinite(y))
    shapes.append(f'<path class="broken" d="{broken}"/>' if broken else "")
    return "".join(shapes)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches between gaps."""
    runs: list[list[Point]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    return "".join("M" + "L".join(_at(point, x_axis, y_axis) for point in run) for run in _runs(points))


def _at(point: Point, x_axis: Axis, y_axis: Axis) -> str:
    return f"{_round(x_axis.at(point[0]) * WIDTH)} {_round((1 - y_axis.at(point[1])) * HEIGHT)}"


def _round(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _swatch(one: Series) -> str:
    dash = f' stroke-dasharray="{esc(one.dash)}"' if one.dash else ""
    return (
        f'<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><path class="line c{one.style}"{dash} '
        'd="M1 4h24"/></svg>'
    )


def _nothing(chart: Chart) -> Html:
    title = f'<figcaption id="{chart.ident}-title"><strong>{esc(chart.title)}</strong></figcaption>'
    return Html(f'<figure class="chart" id="{chart.ident}">{title}<p class="none">{esc(chart.empty)}</p></figure>\n')


def _frame(
    chart: Chart,
    unit: str,
    legend: Sequence[tuple[str, str]],
    shapes: str,
    x_axis: Axis,
    y_axis: Axis,
    hover: object,
    notes: Sequence[str],
    values: str,
) -> Html:
    """The figure around the shapes: caption, legend, grid, ticks, remarks, and the values as a table."""
    x_ticks, y_ticks = x_axis.ticks(7), y_axis.ticks(5)
    if chart.x_name in ("step", "tokens"):
        x_ticks = [tick for tick in x_ticks if tick == round(tick)]
    grid = "".join(f"M0 {_round((1 - y_axis.at(tick)) * HEIGHT)}h{WIDTH}" for tick in y_ticks)
    marks = "".join(f"M{_round(x_axis.at(x) * WIDTH)} 0v{HEIGHT}" for x, _ in chart.marks if x_axis.low <= x)
    y_labels = "".join(
        f'<span style="top:{_round((1 - y_axis.at(tick)) * 100)}%">{text}</span>'
        for tick, text in zip(y_ticks, tick_texts(y_ticks, y_axis.log), strict=True)
    )
    x_labels = "".join(
        f'<span style="left:{_round(x_axis.at(tick) * 100)}%">{text}</span>'
        for tick, text in zip(x_ticks, tick_texts(x_ticks), strict=True)
    )
    said = f"{chart.title}{f', {unit}' if unit else ''}, over {chart.x_name}: " + ", ".join(name for name, _ in legend)
    data = json.dumps({"x": [x_axis.low, x_axis.high], "name": chart.x_name, "series": hover}, separators=(",", ":"))
    keys = "".join(f'<li class="key">{picture} {esc(name)}</li>' for name, picture in legend)
    keys = f'<ul class="legend">{keys}</ul>' if len(legend) > 1 else ""
    remarks = [*notes, *(f"Dotted line: {text}." for text in dict.fromkeys(text for _, text in chart.marks))]
    return Html(
        f'<figure class="chart" id="{chart.ident}" data-hover="{esc(data)}">'
        f'<figcaption><strong>{esc(chart.title)}</strong> <span class="unit">{esc(unit)}</span></figcaption>'
        f'{keys}\n<div class="frame"><div class="y" aria-hidden="true">{y_labels}</div>'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(said)}"><title>{esc(said)}</title><path class="grid" d="{grid}"/>'
        f'<path class="mark" d="{marks}"/>{shapes}</svg></div>'
        f'<div class="x" aria-hidden="true">{x_labels}</div><div class="x-name">{esc(chart.x_name)}</div></div>\n'
        + "".join(f'<p class="note">{esc(note)}</p>' for note in remarks)
        + f"<details><summary>Values</summary>{values}</details></figure>\n"
    )


def _values(chart: Chart, series: Sequence[Series]) -> Html:
    """Some of the points as a table, for readers who cannot see the drawing."""
    named = [dict(one.points) for one in series]
    xs = sorted({x for points in named for x in points})
    rows = [
        [number(xs[i]) if xs[i] != int(xs[i]) else f"{xs[i]:,.0f}", *(number(points.get(xs[i])) for points in named)]
        for i in sample_rows(len(xs), _TABLE_ROWS)
    ]
    left_out = f", {len(rows)} of {len(xs):,} rows" if len(rows) < len(xs) else ""
    return table(f"{chart.title}{left_out}", [chart.x_name, *(one.name for one in series)], rows, kind="numbers")


def _plain(value: float) -> float | str:
    """For the script; JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else number(value)
