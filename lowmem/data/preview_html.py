"""The facts of `preview` as one self-contained page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lowmem.data.pieces import visible
from lowmem.data.preview_text import batch_lines, duplicate_line, shared_line, supervised_lines
from lowmem.data.report import DataReport

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fdfdfd; --soft: #666; --line: #ddd; --bar: #4878a8;
  --learnt: #d6efd0; --special: #8a5a00; --alarm: #a33; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #191919; --soft: #999; --line: #3a3a3a;
  --bar: #6a9bc8; --learnt: #22472a; --special: #e0b060; --alarm: #f08080; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60em;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; border-top: 1px solid var(--line); padding-top: .8em; }
h3 { font-size: 1em; color: var(--soft); font-weight: normal; margin-bottom: .2em; }
p.alarm { color: var(--alarm); font-weight: bold; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg rect { fill: var(--bar); } svg line { stroke: var(--alarm); stroke-dasharray: 4 3; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  border: 1px solid var(--line); border-radius: 4px; padding: .6em; max-height: 40em; overflow: auto; }
mark { background: var(--learnt); color: inherit; border-bottom: 2px solid #3a8a3a; }
b { color: var(--special); } sub { color: var(--soft); }
"""


def page(facts: Mapping[str, Any]) -> str:
    """The whole page as text; everything that comes from the data is escaped."""
    body = "\n".join(_body(facts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>lowmem data: {_safe(facts['model'])}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _body(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>What {_safe(facts['model'])} will see</h1>"
    for name, shared in facts["shared_with_train"].items():
        alarm = ' class="alarm"' if shared["rows"] or shared["prompts"] else ""
        yield f"<p{alarm}>{_safe(shared_line(name, shared))}</p>"
    for name, split in facts["splits"].items():
        yield f"<h2>{_safe(name)}</h2>"
        yield "<ul>"
        yield from (f"<li>{_safe(line)}</li>" for line in _lines(split))
        yield "</ul>"
        yield _histogram(split["lengths"]["histogram"], facts["max_length"])
        yield "<p><mark>Marked</mark> is what is learnt, <b>bold</b> are special tokens.</p>"
        for row in split["rows"]:
            yield f"<h3>row {row['row']:,}: {row['tokens']:,} tokens, {row['targets']:,} learnt</h3>"
            yield f"<pre>{''.join(map(_piece, row['pieces']))}</pre>"


def _lines(split: Mapping[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{part['path']} (weight {part['weight']:g})" for part in split["files"])
    yield from DataReport(**split["report"]).lines()
    lengths = split["lengths"]
    yield "tokens a row: " + ", ".join(f"{key} {value:,.4g}" for key, value in lengths.items() if key != "histogram")
    yield from supervised_lines(split["supervised"])
    yield duplicate_line(split["duplicates"], split["files"])
    if "batches" in split:
        yield from batch_lines(split["batches"])


def _histogram(facts: Mapping[str, Any], max_length: int) -> str:
    """Bars of equal width, one for each bin, with the number of rows above and the left edge below."""
    edges, rows = facts["edges"], facts["rows"]
    step, height = 900 / len(rows), 160
    parts = [f'<svg viewBox="0 0 960 {height + 60}" role="img" aria-label="rows by their length in tokens">']
    for index, number in enumerate(rows):
        x, tall = 30 + index * step, height * number / max(rows)
        said = f"{edges[index]:,} to {edges[index + 1] - 1:,} tokens: {number:,} rows"
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{20 + height - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}">'
            f"<title>{said}</title></rect>"
        )
        if number:
            parts.append(_label(x + step / 2, 16 + height - tall, f"{number:,}"))
    parts += [_label(30 + index * step, height + 36, f"{edge:,}") for index, edge in enumerate(edges)]
    parts += _max_length_mark(edges, max_length, step, height)
    return "".join([*parts, "</svg>"])


def _max_length_mark(edges: Sequence[int], max_length: int, step: float, height: int) -> list[str]:
    if max_length >= edges[-1]:
        return [_label(480, height + 54, f"tokens a row; max_length {max_length:,} is longer than every row")]
    index = next(index for index, edge in enumerate(edges[1:]) if max_length < edge)
    inside = (max_length - edges[index]) / (edges[index + 1] - edges[index])
    x = 30 + (index + inside) * step
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{20 + height}"/>'
    return [line, _label(480, height + 54, f"tokens a row; dashed: max_length {max_length:,}")]


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


def _piece(piece: Mapping[str, Any]) -> str:
    text = _safe(piece["text"])
    if piece["special"]:
        text = f"<b>{text}</b>"
    if piece["weight"] != 1:
        text = f"<sub>{piece['weight']:g}</sub>{text}"
    return f"<mark>{text}</mark>" if piece["supervised"] else text


def _safe(text: str) -> str:
    return escape(visible(text))
