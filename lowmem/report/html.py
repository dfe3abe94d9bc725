"""HTML as text: everything that comes from a run is escaped here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_HERE = Path(__file__).parent


class Html(str):
    """Text that is HTML already; everything else is escaped on its way into a page."""

    __slots__ = ()


def esc(value: object) -> str:
    """Any value as text in HTML or in a quoted attribute; characters no page may hold become `�`."""
    if isinstance(value, Html):
        return value
    text = "".join(c if c in "\n\t" or (c >= " " and not "\ud800" <= c <= "\udfff") else "\ufffd" for c in str(value))
    return escape(text, quote=True)


def table(
    caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "", hidden: bool = False
) -> Html:
    """A table whose first column names the row.

    Args:
        caption: what the table is about.
        head: titles of the columns; empty for none.
        rows: cells; `Html` is taken as it is.
        kind: `numbers` where all but the first column are, `stack` for long texts (cells below each other on a phone).
        hidden: the caption is for screen readers only.
    """
    table_class = f' class="{kind}"' if kind else ""
    caption_class = ' class="unseen"' if hidden else ""
    titles = "".join(f'<th scope="col">{esc(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{esc(first)}</th>' + "".join(f"<td>{esc(cell)}</td>" for cell in rest) + "</tr>\n"
        for first, *rest in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>\n" if head else ""
    return Html(
        f'<div class="scroll" tabindex="0" role="group" aria-label="{esc(caption)}"><table{table_class}>'
        f"<caption{caption_class}>{esc(caption)}</caption>\n{top}<tbody>\n{body}</tbody></table></div>\n"
    )


def section(ident: str, title: str, *body: str) -> Html:
    """A section with a heading that the contents can point at."""
    heading = f'<h2 id="{ident}-title">{esc(title)}</h2>'
    return Html(f'<section id="{ident}" aria-labelledby="{ident}-title">{heading}\n{"".join(body)}</section>\n')


def paragraph(text: object, kind: str = "none") -> Html:
    """A remark."""
    return Html(f'<p class="{kind}">{esc(text)}</p>\n')


def document(title: str, body: str) -> str:
    """A whole page that needs nothing but itself.

    The browser is told to fetch nothing, and to run the one script by its hash: no text of a run can become code.
    """
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "hover.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{esc(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
