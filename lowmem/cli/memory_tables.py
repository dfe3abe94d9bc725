"""What `lowmem estimate` and `lowmem waterfall` print, for a width of 100 columns."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from lowmem.memory.beside import Difference, beside_the_rule, operation, ordered, rows, short
from lowmem.memory.estimate import GIB, Estimate
from lowmem.memory.waterfall import Bar, Waterfall

_WIDTH = 100
MIB = 1024**2


class Unit(NamedTuple):
    """What a table counts in."""

    name: str
    size: int

    @classmethod
    def of(cls, largest: int) -> Unit:
        """GiB, or MiB where the largest number is below one."""
        return cls("GiB", GIB) if largest >= GIB else cls("MiB", MIB)

    def cell(self, size: int, digits: int = 3) -> str:
        """A number; nothing for one that would be shown as 0."""
        return f"{size / self.size:,.{digits}f}" if self.shows(size, digits) else ""

    def shows(self, size: int, digits: int = 3) -> bool:
        """Whether a number differs from 0 in so many digits."""
        return abs(size) / self.size >= 0.5 / 10.0**digits


_HOLDER = re.compile(r"(?P<what>.*) \[(?P<shape>[\d, ]*)\] (?P<phase>[\w ]+)")


def show_estimate(found: Estimate, card: int | None, asked: str, batch: str) -> None:
    """The headline, the ledger, the rule beside it, the largest holders.

    Args:
        found: the estimate.
        card: bytes of a card that it is held against.
        asked: the recipe or model as the user wrote it.
        batch: which rows it is for, in words.
    """
    if found.device == "cuda":
        print(
            f"{short(found.model)} needs {gib(found.needed_bytes)} of GPU memory{_each(found)} "
            f"({rows(found.lengths)} per optimizer step)"
        )
        _line(
            "card",
            f"{gib(found.peak_reserved_bytes)} reserved by PyTorch, {gib(found.peak_allocated_bytes)} of them in use; "
            f"{gib(found.context_bytes)} for CUDA itself",
        )
    else:
        print(
            f"{short(found.model)} needs {gib(found.peak_allocated_bytes)} for tensors ({rows(found.lengths)} per step)"
        )
    _line("rows", batch)
    if found.gpus > 1:
        which = "each" if found.rank is None else "that"
        _line("sent", f"{gib(found.sent_bytes)} from {which} card to the others in an optimizer step")
    place = f", {found.place}" if found.place else ""
    _line("peak", f"in phase {found.phase}{place}, at {operation(found.operation)}")
    parts = ", ".join(f"{gib(size)} {category}" for category, size in found.host_phases[found.host_phase].items())
    _line("host", f"{gib(found.host_bytes)} in phase {found.host_phase} ({parts})")
    if found.managed_bytes:
        _line(
            "paged",
            f"{gib(found.managed_bytes)} of optimizer state, on the card where there is room, else on the host; one "
            f"update needs {gib(found.managed_at_once)} of it on the card",
        )
    for text in found.left_out:
        _line("left out", text)
    if found.device == "cuda":
        low, high = found.reserved_band
        _line("nearby", f"lengths within 1 % reserve {gib(low)} to {gib(high)}; the highest counts")
    _line("tolerance", found.error_band)
    if card is not None:
        _line(f"{card / GIB:.4g} GiB", verdict(found, card))
    unit = Unit.of(found.peak_reserved_bytes)
    _print(_ledger(found, unit))
    _print(_beside(beside_the_rule(found), "predicted peak", unit))
    _print(_holders(found, unit))
    if found.device == "cuda":
        print(f"What each technique saves: lowmem waterfall {asked}")
        print(f"What fits a card: lowmem plan --model {found.model} --gpu-memory 24GiB")


def _each(found: Estimate) -> str:
    if found.rank is not None:
        return f" on the card of rank {found.rank}, which of {found.gpus} needs most"
    return f" on each of {found.gpus} cards" if found.gpus > 1 else ""


def show_waterfall(found: Waterfall, card: int | None) -> None:
    """The bars as a table, and why the plain loop is not what the rule says."""
    print(f"{short(found.model)}: predicted peak with {rows(found.lengths)} per optimizer step")
    unit = Unit.of(max(bar.peak_reserved_bytes for bar in found.bars))
    _print(_bars(found, unit))
    for note in found.notes:
        _print(f"note: {note}")
    _print(
        f"The rule counts {found.parameters:,} weights x {found.bytes_per_parameter} bytes x 4 = "
        f"{found.bars[0].peak_reserved_bytes:,} bytes. What the plain loop needs beside it:"
    )
    _print(_beside(found.differences, "plain loop", unit))
    if card is not None:
        print(f"A card with {card / GIB:.4g} GiB: {verdict(found.final, card)}")


def verdict(found: Estimate, card: int) -> str:
    """Whether it fits, in words."""
    spare = card - found.needed_bytes
    tolerance = found.needed_bytes // (50 if found.expandable_segments else 25)
    if spare < 0:
        return f"does not fit: {gib(-spare)} too much"
    if spare < tolerance:
        return f"too close to call: {gib(spare)} to spare, less than the tolerance of {gib(tolerance)}"
    return f"fits, with {gib(spare)} to spare"


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.2f} GiB"


# -- tables -----------------------------------------------------------------------------------------------------------


def _ledger(found: Estimate, unit: Unit) -> Table:
    table = _table(unit.name, *found.phases, "peak")
    categories = ordered(dict.fromkeys([*(c for m in found.phases.values() for c in m.ledger), *found.ledger]))
    for category in categories:
        sizes = [*(m.ledger.get(category, 0) for m in found.phases.values()), found.ledger.get(category, 0)]
        if any(map(unit.shows, sizes)):
            table.add_row(category, *(unit.cell(size) for size in sizes))
    table.add_section()
    table.add_row(
        "in all", *(unit.cell(s) for s in (*(m.bytes for m in found.phases.values()), sum(found.ledger.values())))
    )
    return table


def _beside(differences: Sequence[Difference], heading: str, unit: Unit) -> Table:
    table = _table(unit.name, "rule of thumb", heading, "why", words=1)
    for row in differences:
        if unit.shows(row.rule_bytes) or unit.shows(row.predicted_bytes):
            table.add_row(row.category, unit.cell(row.rule_bytes), unit.cell(row.predicted_bytes), row.why)
    table.add_section()
    table.add_row(
        "in all",
        unit.cell(sum(d.rule_bytes for d in differences)),
        unit.cell(sum(d.predicted_bytes for d in differences)),
        "",
    )
    return table


def _holders(found: Estimate, unit: Unit) -> Table:
    table = _table("largest at the peak", unit.name, "pieces", "shape", "born", words=2)
    for size, count, words in found.holders[:6]:
        match = _HOLDER.fullmatch(words)
        what, shape, phase = match.group("what", "shape", "phase") if match else (words, "", "")
        table.add_row(operation(what), unit.cell(size), f"{count:,}", shape.replace(", ", " x "), phase)
    return table


def _bars(found: Waterfall, unit: Unit) -> Table:
    timed, host = found.card is not None, len({bar.host_bytes // (64 * MIB) for bar in found.bars[1:]}) > 1
    heads = ["reserved", "saves", "in use", *(["host"] if host else []), *(["step, s", "time"] if timed else [])]
    table = _table(unit.name, *heads, caption=f"time: predicted for {found.card} with memory enough" if timed else None)
    for before, bar in pairwise([None, *found.bars]):
        assert bar is not None
        cells = [
            unit.cell(bar.peak_reserved_bytes, 2),
            unit.cell(bar.saved_bytes or 0, 2),
            unit.cell(bar.peak_allocated_bytes, 2),
        ]
        cells += [unit.cell(bar.host_bytes, 2)] if host else []
        cells += [_seconds(bar), _factor(before, bar)] if timed else []
        table.add_row(("+ " if bar.strategies else "") + bar.name, *cells)
    return table


def _seconds(bar: Bar) -> str:
    return "" if bar.step_seconds is None else f"{bar.step_seconds:,.2f}"


def _factor(before: Bar | None, bar: Bar) -> str:
    if before is None or not before.step_seconds or bar.step_seconds is None:
        return ""
    return f"x {bar.step_seconds / before.step_seconds:.2f}"


def _table(*heads: str, words: int = 0, caption: str | None = None) -> Table:
    """A table of numbers, after whose first column only the last `words` hold text."""
    close = len(heads) > 8
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if close else 1), caption=caption, caption_justify="left"
    )
    for number, head in enumerate(heads):
        is_text = number == 0 or number >= len(heads) - words
        table.add_column(head, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


def _line(name: str, text: str) -> None:
    """A name, and words that are folded beside it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=11)
    grid.add_column(overflow="fold")
    grid.add_row(f"  {name}", text)
    _print(grid)


def _print(what: Table | str) -> None:
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(what)
