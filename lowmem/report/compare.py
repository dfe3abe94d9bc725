"""Runs side by side: the settings that differ, the results, and their curves over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lowmem.errors import UserError
from lowmem.report.charts import Chart, Series, line_chart
from lowmem.report.facts import duration, flat, measured, percent, setting_text
from lowmem.report.html import Html, document, esc, paragraph, section, table
from lowmem.report.read import RunRecord, read_run
from lowmem.report.scale import number
from lowmem.sizes import GIB, gib

MOST = 10
_RAW_UP_TO = 3  # runs; the noise of more of them hides their means
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_NOT_THERE = "(not there)"


def read_runs(paths: Sequence[str | Path]) -> dict[str, RunRecord]:
    """Short label -> run, in the order given.

    Raises:
        UserError: fewer than two runs or more than ten, one given twice, or one that is none.
    """
    if not 2 <= len(paths) <= MOST:
        raise UserError(f"compare: takes from 2 to {MOST} runs; got {len(paths)}")
    places = [Path(path).expanduser().resolve() for path in paths]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"compare: {paths[index]} is there twice (as {paths[places.index(place)]})")
    records = [read_run(path) for path in paths]
    return dict(zip(_labels(places), records, strict=True))


def _labels(places: Sequence[Path]) -> list[str]:
    """Each folder's name, with as many folders above it as it takes to tell them apart."""
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        labels = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(labels)) == len(labels):
            return labels
    return [str(place) for place in places]


def differences(runs: dict[str, RunRecord]) -> dict[str, dict[str, Any]]:
    """What is not the same in all runs.

    Returns:
        `settings` and `versions`: dotted key -> run -> value (`(not there)` where a run has none), only those that
        differ, the run folder left out; `results`: name -> run -> value or None, `state` first.
    """
    settings = _differing({label: flat(record.settings) for label, record in runs.items()})
    settings.pop("training.output_dir", None)
    found = {label: measured(record) for label, record in runs.items()}
    results: dict[str, Any] = {"state": {label: record.state for label, record in runs.items()}}
    for name in next(iter(found.values())):
        if any(values[name] is not None for values in found.values()):
            results[name] = {label: values[name] for label, values in found.items()}
    versions = _differing({label: record.versions for label, record in runs.items()})
    return {"settings": settings, "results": results, "versions": versions}


def _differing(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    keys = dict.fromkeys(key for one in values.values() for key in one)
    rows = {key: {label: one.get(key, _NOT_THERE) for label, one in values.items()} for key in keys}
    return {key: row for key, row in rows.items() if len({setting_text(value) for value in row.values()}) > 1}


def result_text(name: str, value: Any) -> str:
    """A result as people read it; the name says the unit."""
    if value is None or isinstance(value, str):
        return value or "-"
    if "bytes" in name:
        return gib(value)
    if "seconds" in name:
        return duration(value)
    if "exact match" in name:
        return percent(value)
    return number(round(value) if "tokens" in name and math.isfinite(value) else value)


def rows(facts: dict[str, dict[str, Any]], part: str) -> list[list[str]]:
    """One part of `differences` as text, the name of each row first."""
    text = result_text if part == "results" else (lambda _, value: setting_text(value))
    return [[_title(name), *(text(name, value) for value in row.values())] for name, row in facts[part].items()]


def _title(name: str) -> str:
    return name.replace("bytes", "memory").replace("train seconds", "training time")


def render(runs: dict[str, RunRecord]) -> str:
    """The page as HTML, complete in itself."""
    facts, labels = differences(runs), list(runs)
    states = "".join(
        f'<li><span class="state {run.state}">{run.state}</span>{esc(label)}</li>' for label, run in runs.items()
    )
    body = [section("curves", "Curves", f'<div class="charts">{_charts(runs)}</div>\n')]
    for part, title, same in (
        ("results", "Results", ""),
        ("settings", "Settings that differ", "All settings are the same."),
        ("versions", "Versions that differ", "All versions are the same."),
    ):
        found = table(title, ["", *labels], rows(facts, part), "numbers", hidden=True)
        body.append(section(part, title, found if facts[part] else paragraph(same)))
    head = f'<header><h1>{len(runs)} runs</h1>\n<ul class="runs">{states}</ul></header>\n'
    return document(f"{', '.join(labels)} – lowmem", f"{head}<main>\n{''.join(body)}</main>\n")


def _charts(runs: dict[str, RunRecord]) -> Html:
    memory = (
        "gpu_peak_bytes" if any(record.series("log", "gpu_peak_bytes") for record in runs.values()) else "rss_bytes"
    )
    memory_name = "Peak GPU memory" if memory.startswith("gpu") else "Resident set"
    raw = len(runs) <= _RAW_UP_TO
    loss = partial(Chart, unit="nats per token", may_be_log=True, raw=raw)
    drawn = [
        _chart(runs, loss("loss", "Train loss"), "log", "loss"),
        _chart(runs, loss("eval-loss", "Eval loss", empty="No evaluation loss was measured."), "evaluate", "eval_loss"),
        _chart(runs, Chart("speed", "Speed", "tokens per second", from_zero=True, raw=raw), "log", "tokens_per_second"),
        _chart(runs, Chart("memory", memory_name, "GiB", from_zero=True, smooth=False), "log", memory, scale=GIB),
        _chart(runs, loss("loss-tokens", "Train loss by tokens", x_name="tokens"), "log", "loss"),
        _chart(runs, loss("loss-seconds", "Train loss by time", x_name="seconds"), "log", "loss"),
    ]
    return Html("".join(drawn))


def _chart(runs: dict[str, RunRecord], chart: Chart, event: str, key: str, scale: float = 1.0) -> Html:
    series = [
        Series(label, [(x, y / scale) for x, y in record.series(event, key, chart.x_name)], index, dash(index))
        for index, (label, record) in enumerate(runs.items())
    ]
    return line_chart(chart, series)


def dash(index: int) -> str:
    """Lines differ by colour and by dash, for eyes that tell few colours apart."""
    return _DASHES[index % len(_DASHES)]
