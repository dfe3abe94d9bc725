"""`report.html`: one run on one page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lowmem.durable import write_text
from lowmem.report import sections
from lowmem.report.facts import duration, measured, percent
from lowmem.report.html import Html, document, esc
from lowmem.report.read import RunRecord, read_run
from lowmem.report.scale import number
from lowmem.sizes import gib
from lowmem.version import __version__

FILE = "report.html"
_SECTIONS = {
    "Curves": sections.curves,
    "Memory": sections.memory,
    "Answers": sections.answers,
    "Data": sections.data,
    "Strategies": sections.strategies,
    "Settings": sections.settings,
    "Notices": sections.notices,
    "Checkpoints": sections.checkpoints,
    "Versions": sections.versions,
}


def write_report(run: str | Path, output: Path | None = None) -> Path:
    """Write the page of a run, finished or not, and return its path.

    Args:
        run: a run folder.
        output: the file; by default `report.html` in the run folder.

    Raises:
        UserError: no run folder, a damaged file in it, or the page cannot be written.
    """
    record = read_run(run)
    file = output or record.path / FILE
    write_text(file, render(record))
    return file


def render(record: RunRecord) -> str:
    """The page as HTML, complete in itself."""
    contents = "".join(f'<li><a href="#{name.lower()}">{name}</a></li>' for name in _SECTIONS)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = "".join(build(record) for build in _SECTIONS.values())
    model = (record.settings.get("model") or {}).get("name_or_path", "a model")
    return document(
        f"{record.name} – lowmem",
        f"<header><h1>{esc(record.name)}</h1>\n"
        f'<p class="sub">{state(record)} {esc(model)}, {record.last_step:,} steps</p>\n'
        f'{tiles(record)}<nav aria-label="Contents"><ul>{contents}</ul></nav></header>\n<main>\n{body}</main>\n'
        f"<footer>Made by lowmem {esc(__version__)} from {esc(record.path.absolute())}, {now}. "
        f"<code>lowmem report</code> makes this page anew.</footer>\n",
    )


def state(record: RunRecord) -> Html:
    """How the run stands, as a label."""
    reason = {
        "finished": "",
        "stopped": f": {record.result.get('stopped')}",
        "unfinished": ": going on, or cut off",
    }[record.state]
    return Html(f'<span class="state {record.state}">{record.state}{esc(reason)}</span>')


def tiles(record: RunRecord) -> Html:
    """The figures to see first."""
    found = measured(record)
    before, after = found["exact match before"], found["exact match after"]
    peak = ("peak GPU", "peak GPU bytes") if found["peak GPU bytes"] else ("peak resident set", "peak resident bytes")
    best = found["eval loss (best)"]
    shown = [
        ("train loss, last logged", number(found["train loss (last logged)"]), ""),
        (
            "eval loss",
            number(found["eval loss (last)"]),
            f"best {number(best)}" if best is not None else "not measured",
        ),
        ("exact match", percent(after), f"{percent(before)} before"),
        ("steps", f"{record.last_step:,}", f"{number(found['tokens'])} tokens"),
        ("training took", duration(found["train seconds"]), f"{number(_whole(found['tokens/s (median)']))} tokens/s"),
        (peak[0], gib(found[peak[1]]), _live(found["peak live bytes of a step"])),
    ]
    items = "".join(
        f'<div class="tile"><dt>{esc(name)}</dt><dd>{esc(value)}<small>{esc(small)}</small></dd></div>'
        for name, value, small in shown
        if name != "exact match" or after is not None
    )
    return Html(f'<dl class="tiles">{items}</dl>\n')


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _live(size: float | None) -> str:
    return f"{gib(size)} in tensors" if size else ""
