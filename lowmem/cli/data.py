"""`lowmem data`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lowmem.cli.common import JsonOption, OverridesArgument, print_json, quiet_bars
from lowmem.errors import UserError

_DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".txt", ".csv", ".parquet", ".gz")


def data(
    recipe: Annotated[str, typer.Argument(help="A recipe, or with --model a data file.", metavar="RECIPE|FILE")],
    overrides: OverridesArgument = None,
    split: Annotated[
        Literal["train", "eval", "exact_match", "all"], typer.Option(help="Which data of the recipe are read.")
    ] = "all",
    rows: Annotated[int, typer.Option(min=0, help="How many rows are shown in full.")] = 3,
    seed: Annotated[int, typer.Option(help="Which rows are drawn.")] = 0,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="No recipe but a data file: the model whose tokenizer reads it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="PAGE", help="Write it as a page, in one file, instead.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a model will see of its data, before any training. Loads a tokenizer, and no weights."""
    from lowmem.recipe import load_recipe, recipe_from_overrides

    quiet_bars()
    if model is not None:
        named = [f"model.name_or_path={json.dumps(model)}", f"data.train={json.dumps(recipe)}"]
        loaded = recipe_from_overrides([*named, *(overrides or ())])
    elif recipe.lower().endswith(_DATA_SUFFIXES) and os.path.exists(recipe):
        raise UserError(f"{recipe}: a data file; --model NAME says whose tokenizer reads it")
    else:
        loaded = load_recipe(recipe, overrides or ())
    from lowmem.data.preview import preview

    facts = preview(loaded, split, rows, seed)
    if html is not None:
        from lowmem.data.preview_html import page
        from lowmem.durable import write_text

        write_text(html, page(facts))
        print(html, file=sys.stderr)
    if as_json:
        print_json(facts)
    elif html is None:
        _print(facts)


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    from lowmem.data.preview_text import lines

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    colours = console.is_terminal and not console.no_color and console.color_system is not None
    for line in lines(facts, marks=not colours):
        console.print(line)
