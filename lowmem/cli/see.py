"""Commands to look at runs: report, compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from lowmem.cli.common import JsonOption, new_table, print_json, print_table

RunArgument = Annotated[Path, typer.Argument(help="A run folder, finished or not.")]


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; by default report.html in the run folder.")
    ] = None,
) -> None:
    """Write the page of a run anew: curves, memory, data, settings, answers."""
    from lowmem.report.page import write_report

    print(write_report(run, output))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="From two to ten run folders.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the runs over each other in this HTML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Settings that differ between runs, and their results; with -o a page with their curves over each other."""
    from lowmem.report import compare as comparison

    records = comparison.read_runs(runs)
    facts = comparison.differences(records)
    if output:
        from lowmem.durable import write_text

        write_text(output, comparison.render(records))
    if as_json:
        print_json(_finite({"runs": {label: str(r.path.absolute()) for label, r in records.items()}, **facts}))
        return
    for part, title in (
        ("results", "results"),
        ("settings", "settings that differ"),
        ("versions", "versions that differ"),
    ):
        if facts[part]:
            table = new_table(title, *records)
            for row in comparison.rows(facts, part):
                table.add_row(*row)
            print_table(table)
        else:
            print(f"{title}: none")
    if output:
        print(output)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
