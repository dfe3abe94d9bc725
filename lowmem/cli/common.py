"""What the commands share: argument types, printing. Nothing heavy is imported here."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (quickstart).")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, such as training.learning_rate=1e-4; strategies.NAME=null takes one out."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def quiet_bars() -> None:
    """Progress bars of the libraries stay off where there is no terminal: a log file would fill with redraws."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def short_lived() -> None:
    """The process lasts for seconds: Python's search for cycles, also that at its end, would take a fifth of them."""
    gc.disable()
    atexit.register(gc.freeze)


def print_json(value: Any) -> None:
    """Facts for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def new_table(*columns: str) -> Table:
    """An empty table with these columns."""
    from rich.table import Table

    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Show a table on standard output."""
    from rich.console import Console

    # without a terminal there is no width to fit into
    Console(markup=False, width=None if sys.stdout.isatty() else 160).print(table)
