"""The command line. Nothing heavy is imported before a command needs it: `lowmem --help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from lowmem.cli import convert, memory, reference, see, use
from lowmem.cli.data import data
from lowmem.cli.doctor import doctor
from lowmem.cli.plan import plan
from lowmem.cli.train import train, with_resume_value
from lowmem.errors import ExplainedError, UserError

app = typer.Typer(
    help="Fine-tune large language models on one GPU: composable memory techniques, exact by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(reference.recipes_app, name="recipes")
for command in (
    train,
    memory.estimate,
    memory.waterfall,
    plan,
    data,
    use.evaluate,
    use.generate,
    use.chat,
    convert.merge,
    convert.export,
    convert.quantize,
    see.report,
    see.compare,
    reference.strategies,
    reference.explain,
    reference.schema,
    reference.dtypes,
    reference.fetch,
    doctor,
):
    app.command()(command)


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 something the user can put right, 130 Ctrl-C, 143 SIGTERM, 1 anything else."""
    _speak_utf8()
    _wait_politely()
    try:
        app(args=with_resume_value(sys.argv[1:]), prog_name="lowmem")
    except UserError as error:
        text = str(error) if isinstance(error, ExplainedError) else " ".join(str(error).split())
        print(f"{_rank()}error: {text}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _rank() -> str:
    """Who speaks, where several processes do."""
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


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


def _speak_utf8() -> None:
    """Files and pipes get UTF-8 whatever the locale says; file names that are no valid text keep their bytes."""
    for stream in (sys.stdout, sys.stderr):
        encoding = str(getattr(stream, "encoding", "")).lower().replace("-", "")
        if hasattr(stream, "reconfigure"):
            utf8 = encoding == "ascii" or encoding.startswith("ansi_x3") or not stream.isatty()
            stream.reconfigure(encoding="utf-8" if utf8 else None, errors="surrogateescape" if utf8 else "replace")
