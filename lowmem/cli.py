"""The command line. Nothing heavy is imported before a command needs it: `lowmem --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="Fine-tune large language models on one GPU: composable memory techniques, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
recipes_app = typer.Typer(help="Recipes that come with lowmem.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")

RecipeArgument = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one (quickstart).")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, such as training.learning_rate=1e-4; strategies.NAME=null takes one out."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]

_NEWEST = "newest"


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 something the user can put right, 130 interrupted, 1 anything else."""
    _speak_utf8()
    _wait_politely()
    try:
        app(args=_with_resume_value(sys.argv[1:]), prog_name="lowmem")
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _wait_politely() -> None:
    """Let idle OpenMP threads spin for a moment only (set before torch is imported; the user's own setting wins).

    By default they spin for long at the end of every operation. When anything else wants a core, the thread that spins
    keeps the one it waits for from running. A short spin costs nothing alone and less then
    (`benchmarks/openmp_wait.py`).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _version(wanted: bool) -> None:
    if wanted:
        from lowmem.version import __version__

        print(f"lowmem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]", help="Go on from a checkpoint folder; without PATH, from the newest one of output_dir."
        ),
    ] = None,
) -> None:
    """Train as a recipe says."""
    from lowmem.recipe import load_recipe

    _quiet_bars()
    loaded = load_recipe(recipe, overrides or ())  # complains before anything heavy is imported
    from lowmem.console import Console
    from lowmem.memory.meter import MemoryLedger
    from lowmem.trainer import Trainer

    console = Console()
    try:
        trainer = Trainer.from_recipe(
            str(loaded.path), overrides=list(overrides or ()), observers=[MemoryLedger(), console]
        )
        trainer.train(resume_from=True if resume == _NEWEST else resume)
    except KeyboardInterrupt:
        console.close()
        saves = loaded.training.output_dir and loaded.training.save_steps
        hint = f"; --resume goes on from the newest checkpoint in {loaded.training.output_dir}" if saves else ""
        print(f"interrupted{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        console.close()


@recipes_app.command("list")
def recipes_list(as_json: JsonOption = False) -> None:
    """List the shipped recipes."""
    from lowmem.recipe_paths import shipped_recipes, summary

    found = {name: summary(path) for name, path in shipped_recipes().items()}
    if as_json:
        _print_json([{"name": name, "summary": text} for name, text in found.items()])
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


@app.command()
def strategies(as_json: JsonOption = False) -> None:
    """What each strategy saves, costs and refuses, and whether it is exact."""
    from lowmem.facts import strategy_facts

    facts = strategy_facts()
    if as_json:
        _print_json(facts)
        return
    table = _table("name", "stage", "exact", "saves", "costs", "needs and refuses")
    for fact in facts:
        words = [f"needs {need} ({' or '.join(partners)})" for need, partners in fact["needs"].items()]
        words += [f"not with {other}: {reason}" for other, reason in fact["refuses"].items()]
        exact = "exact" if fact["exact"] else "approximate"
        table.add_row(fact["name"], fact["stage"], exact, fact["saves"], fact["costs"], "\n".join(words))
    _print_table(table)


@app.command()
def explain(recipe: RecipeArgument, overrides: OverridesArgument = None, as_json: JsonOption = False) -> None:
    """The resolved chain of every part, inner to outer. Reads no weights and no data."""
    from lowmem.facts import explain as explained
    from lowmem.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), check_files=False)
    facts = explained(loaded.strategies, loaded.training)
    if as_json:
        _print_json({**facts, "recipe": loaded.as_dict()})
        return
    width = max(map(len, facts["chains"]))
    for part, chain in facts["chains"].items():
        print(f"{part + ':':<{width + 1}} {' > '.join(chain)}")
    print()
    for name, described in facts["strategies"].items():
        settings = ", ".join(f"{key}={value}" for key, value in described["settings"].items())
        added = " (added by the trainer)" if described["added_by_trainer"] else ""
        print(f"{name}{added}: {settings or 'no settings'}")


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option(help="Write to a file instead of standard output.")] = None,
) -> None:
    """The JSON Schema of recipes, for completion and checks in editors."""
    from lowmem.recipe import json_schema

    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output.absolute()}: cannot be written: {error.strerror}") from None
    print(output)


@app.command()
def dtypes(as_json: JsonOption = False) -> None:
    """Bytes, bits, range and resolution of the number formats of training."""
    from lowmem.dtypes import table as dtype_table

    rows = [row.as_dict() for row in dtype_table()]
    if as_json:
        _print_json(rows)
        return
    table = _table(*(key.replace("_", " ") for key in rows[0]))
    for row in rows:
        table.add_row(*("-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()))
    _print_table(table)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Get small public weights into the cache."""
    from lowmem.fetch import fetch as get

    print(get(name, lambda text: print(text, file=sys.stderr)))


def _with_resume_value(arguments: list[str]) -> list[str]:
    """`--resume` takes a folder if one follows, else means the newest checkpoint; overrides may follow it, too."""
    result = list(arguments)
    for index, argument in enumerate(arguments):
        follower = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument == "--resume" and not os.path.isdir(follower):
            result[index] = f"--resume={_NEWEST}"
    return result


def _quiet_bars() -> None:
    """Progress bars of the libraries stay off where there is no terminal: a log file would fill with redraws."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def _speak_utf8() -> None:
    """Files and pipes get UTF-8 whatever the locale says; file names that are no valid text keep their bytes."""
    for stream in (sys.stdout, sys.stderr):
        encoding = str(getattr(stream, "encoding", "")).lower().replace("-", "")
        if hasattr(stream, "reconfigure"):
            utf8 = encoding == "ascii" or encoding.startswith("ansi_x3") or not stream.isatty()
            stream.reconfigure(encoding="utf-8" if utf8 else None, errors="surrogateescape" if utf8 else "replace")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(table: Table) -> None:
    from rich.console import Console

    # without a terminal there is no width to fit into
    Console(markup=False, width=None if sys.stdout.isatty() else 160).print(table)
