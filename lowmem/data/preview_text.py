"""The facts of `preview` as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from lowmem.data.pieces import visible
from lowmem.data.report import DataReport

BAR = 40
SHOWN_CHARACTERS = 2000
_EIGHTHS = "▏▎▍▌▋▊▉█"


def lines(facts: Mapping[str, Any], marks: bool) -> Iterator[Text]:
    """The whole preview, line by line.

    Args:
        facts: what `preview` returned.
        marks: supervised tokens stand in [[ ]] (where colours do not show).
    """
    for name, split in facts["splits"].items():
        files = ", ".join(_file(part) for part in split["files"])
        yield Text(visible(f"{name}: {files}"), style="bold")
        for line in split_lines(split, facts["max_length"]):
            yield Text(f"  {line}")
        yield Text()
    for name, shared in facts["shared_with_train"].items():
        yield Text(shared_line(name, shared), style="bold yellow" if shared["rows"] or shared["prompts"] else "")
    how = "[[ ]] around what is learnt, loss weights other than 1 in front" if marks else "what is learnt is green"
    yield Text(f"rows ({how}; special tokens as they are)")
    for name, split in facts["splits"].items():
        for row in split["rows"]:
            yield Text()
            yield Text(f"{name} row {row['row']:,}: {row['tokens']:,} tokens, {row['targets']:,} learnt", style="bold")
            yield row_text(row["pieces"], marks)


def split_lines(split: Mapping[str, Any], max_length: int) -> Iterator[str]:
    """Counts, histogram, supervision, duplicates and batches of one data set."""
    yield from DataReport(**split["report"]).lines()
    lengths = split["lengths"]
    percentiles = ", ".join(f"{key} {value:,}" for key, value in lengths.items() if key[0] == "p")
    yield f"tokens a row: min {lengths['min']:,}, {percentiles}, max {lengths['max']:,}, mean {lengths['mean']:,.1f}"
    yield from histogram(lengths["histogram"], max_length)
    yield from supervised_lines(split["supervised"])
    yield duplicate_line(split["duplicates"], split["files"])
    if "batches" in split:
        yield from batch_lines(split["batches"])


def histogram(facts: Mapping[str, Any], max_length: int) -> Iterator[str]:
    """A bar for every bin; the bin that `max_length` falls into is marked."""
    edges, rows, tokens = facts["edges"], facts["rows"], facts["tokens"]
    width = len(f"{edges[-1]:,}")
    count = max(len(f"{number:,}") for number in rows)
    for low, high, number, held in zip(edges, edges[1:], rows, tokens, strict=False):
        mark = f"  <- max_length {max_length:,}" if low <= max_length < high else ""
        span = f"{low:>{width},} to {high - 1:>{width},}" if high - low > 1 else f"{low:>{2 * width + 4},}"
        bar = f"{span}  {_bar(number / max(rows)):<{BAR}}  {number:>{count},} rows, {held:,} tokens{mark}"
        yield bar
    if max_length >= edges[-1]:
        yield f"max_length {max_length:,} is longer than every row"


def _bar(share: float) -> str:
    eighths = max(round(share * BAR * 8), 1 if share else 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest - 1] if rest else "")


def supervised_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """How much of the rows is learnt."""
    targets = facts["targets_per_row"]
    yield (
        f"learnt: {facts['share']:.1%} of the tokens; targets a row: min {targets['min']:,}, p5 {targets['p5']:,}, "
        f"p50 {targets['p50']:,}, p95 {targets['p95']:,}, max {targets['max']:,}"
    )
    tenths = (f"{10 * n}-{10 * n + 10} %: {rows:,}" for n, rows in enumerate(facts["rows_by_tenth"]) if rows)
    yield f"rows by their share of targets: {', '.join(tenths)}"
    if facts["rows_with_few"]:
        yield f"{facts['rows_with_few']:,} rows with {facts['few']} targets or fewer"
    if facts["rows_with_fractional_weights"]:
        yield f"{facts['rows_with_fractional_weights']:,} rows with loss weights other than 0 and 1"


def duplicate_line(facts: Mapping[str, int], files: list[dict[str, Any]]) -> str:
    """Duplicates in words."""
    words = f"duplicates: {facts['extra_copies']:,} extra copies of {facts['repeated_rows']:,} rows"
    if any(part["weight"] > 1 for part in files):
        words += " (a file with a weight above 1 repeats its rows)"
    several = facts["prompts_with_several_answers"]
    return f"{words}; {several:,} prompts with different answers ({facts['rows_of_such_prompts']:,} of them)"


def batch_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Steps and padding."""
    yield (
        f"steps: {facts['steps_per_epoch']:,} an epoch of {facts['batch_size']:,} rows each, "
        f"{facts['total_steps']:,} in all"
    )
    shares, passes = facts["padding_share"], facts["passes_per_step"]
    parts = [f"{key.replace('_', ' ')} {shares[key]:.1%}" for key in ("without_packing", "with_packing")]
    yield (
        f"padding: {shares['recipe']:.1%} of the model's input as the recipe says ({', '.join(parts)}); "
        f"{passes['recipe']:.3g} micro-batches a step (the first {facts['batches_looked_at']:,} batches)"
    )


def shared_line(name: str, facts: Mapping[str, int]) -> str:
    """Leakage in words."""
    return (
        f"{name}: {facts['rows']:,} of {facts['of_rows']:,} rows are in train as well, "
        f"{facts['prompts']:,} with their prompt at least"
    )


def row_text(pieces: Sequence[Mapping[str, Any]], marks: bool) -> Text:
    """A row with its supervised tokens highlighted; the middle of a long one is left out, and says so."""
    length = sum(len(piece["text"]) for piece in pieces)
    if length <= SHOWN_CHARACTERS:
        return Text().join(_highlighted(pieces, marks))
    half = SHOWN_CHARACTERS // 2
    head, tail = _between(pieces, 0, half), _between(pieces, length - half, length)
    gap = Text(f" (... {length - 2 * half:,} characters ...) ", style="dim italic")
    return Text().join([*_highlighted(head, marks), gap, *_highlighted(tail, marks)])


def _between(pieces: Sequence[Mapping[str, Any]], start: int, end: int) -> list[Mapping[str, Any]]:
    """The pieces, or parts of them, between two places of the row's text."""
    found: list[Mapping[str, Any]] = []
    at = 0
    for piece in pieces:
        text = piece["text"][max(start - at, 0) : max(end - at, 0)]
        at += len(piece["text"])
        if text:
            found.append({**piece, "text": text})
    return found


def _highlighted(pieces: Sequence[Mapping[str, Any]], marks: bool) -> Iterator[Text]:
    for (learnt, weight), run in groupby(pieces, key=lambda piece: (piece["supervised"], piece["weight"])):
        text = Text(f"({weight:g})" if weight != 1 else "")
        for piece in run:
            text.append(visible(piece["text"]), style="bold" if piece["special"] else "")
        if learnt and marks:
            text = Text.assemble("[[", text, "]]")
        elif learnt:
            text.stylize("green")
        yield text


def _file(part: Mapping[str, Any]) -> str:
    return f"{part['path']} x {part['weight']:g}" if part["weight"] != 1 else str(part["path"])
