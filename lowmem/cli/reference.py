"""Commands that look things up: recipes, strategies, explain, schema, dtypes, fetch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lowmem.cli.common import JsonOption, OverridesArgument, RecipeArgument, new_table, print_json, print_table

recipes_app = typer.Typer(help="Recipes that come with lowmem.", no_args_is_help=True, rich_markup_mode=None)


@recipes_app.command("list")
def recipes_list(as_json: JsonOption = False) -> None:
    """List the shipped recipes."""
    from lowmem.recipe_paths import shipped_recipes, summary

    found = {name: summary(path) for name, path in shipped_recipes().items()}
    if as_json:
        print_json([{"name": name, "summary": text} for name, text in found.items()])
        return
    width = max(map(len, found), default=0)
    for name, text in found.items():
        print(f"{name:<{width}}  {text}")


@recipes_app.command("show")
def recipes_show(name: RecipeArgument) -> None:
    """Print a recipe with its comments."""
    from lowmem.recipe import find_recipe

    print(find_recipe(name).read_text(encoding="utf-8"), end="")


@recipes_app.command("copy")
def recipes_copy(
    name: RecipeArgument,
    destination: Annotated[Path, typer.Argument(help="A folder, or a new .yaml file.")] = Path(),
) -> None:
    """Copy a recipe and the data files it names; existing files are never overwritten."""
    from lowmem.recipe_copy import copy_recipe

    for path in copy_recipe(name, destination):
        print(path)


def strategies(as_json: JsonOption = False) -> None:
    """What each strategy saves, costs and refuses, and whether it is exact."""
    from lowmem.facts import strategy_facts

    facts = strategy_facts()
    if as_json:
        print_json(facts)
        return
    table = new_table("name", "stage", "exact", "saves", "costs", "needs and refuses")
    for fact in facts:
        words = [f"needs {need} ({' or '.join(partners)})" for need, partners in fact["needs"].items()]
        words += [f"not with {other}: {reason}" for other, reason in fact["refuses"].items()]
        exact = "exact" if fact["exact"] else "approximate"
        table.add_row(fact["name"], fact["stage"], exact, fact["saves"], fact["costs"], "\n".join(words))
    print_table(table)


def explain(recipe: RecipeArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """The resolved chain of every part, inner to outer. Reads no weights and no data."""
    from lowmem.facts import explain as explained
    from lowmem.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), check_files=False)
    facts = explained(loaded.strategies, loaded.training)
    if as_json:
        print_json({**facts, "recipe": loaded.as_dict()})
        return
    width = max(map(len, facts["chains"]))
    for part, chain in facts["chains"].items():
        print(f"{part + ':':<{width + 1}} {' > '.join(chain)}")
    print()
    for name, described in facts["strategies"].items():
        settings = ", ".join(f"{key}={value}" for key, value in described["settings"].items())
        added = " (added by the trainer)" if described["added_by_trainer"] else ""
        print(f"{name}{added}: {settings or 'no settings'}")


def schema(
    output: Annotated[Path | None, typer.Option(help="Write to a file instead of standard output.")] = None,
) -> None:
    """The JSON Schema of recipes, for completion and checks in editors."""
    from lowmem.recipe import json_schema

    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        print(text, end="")
        return
    from lowmem.durable import write_text

    write_text(output, text)
    print(output)


def dtypes(as_json: JsonOption = False) -> None:
    """Bytes, bits, range and resolution of the number formats of training."""
    from lowmem.dtypes import table as dtype_table

    rows = [row.as_dict() for row in dtype_table()]
    if as_json:
        print_json(rows)
        return
    table = new_table(*(key.replace("_", " ") for key in rows[0]))
    for row in rows:
        table.add_row(*("-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()))
    print_table(table)


def fetch(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Get small public weights into the cache."""
    from lowmem.fetch import fetch as get

    print(get(name, lambda text: print(text, file=sys.stderr)))
