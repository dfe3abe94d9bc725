"""`lowmem train`."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

from lowmem.cli.common import OverridesArgument, RecipeArgument, quiet_bars

_NEWEST = "newest"


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            help="Go on from a checkpoint, or the newest one of a run folder; without PATH, the newest of output_dir.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train, too, where memory is predicted to be too small.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Start N processes here, for strategies that share work (ddp, fsdp_2)."),
    ] = None,
) -> None:
    """Train as a recipe says."""
    from lowmem.memory import segments
    from lowmem.recipe import load_recipe

    quiet_bars()
    segments.turn_on()  # before torch is imported
    loaded = load_recipe(recipe, overrides or ())  # complains before anything heavy is imported
    if nproc is not None:
        from lowmem.launch import launch

        again = ["train", str(recipe), *(overrides or ())]
        again += [f"--resume={resume}"] if resume is not None else []
        again += ["--force"] if force else []
        raise typer.Exit(launch(again, nproc))
    from lowmem.console import Console
    from lowmem.interrupts import Terminated, terminable
    from lowmem.memory.comparison import MemoryComparison
    from lowmem.memory.meter import MemoryLedger
    from lowmem.memory.out_of_memory import explained_loading
    from lowmem.trainer import Trainer
    from lowmem.world import leave

    console = Console()
    try:
        with terminable():
            with explained_loading():
                trainer = Trainer.from_recipe(
                    str(loaded.path),
                    overrides=list(overrides or ()),
                    observers=[MemoryLedger(), MemoryComparison(), console],
                    check_memory="warn" if force else "refuse",
                )
            trainer.train(resume_from=True if resume == _NEWEST else resume)
    except (KeyboardInterrupt, Terminated) as stop:
        console.close()
        print(str(stop) or "interrupted before the first step", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    finally:
        console.close()
        leave()


def with_resume_value(arguments: list[str]) -> list[str]:
    """`--resume` takes a folder if one follows, else means the newest checkpoint; overrides may follow it, too."""
    result = list(arguments)
    for index, argument in enumerate(arguments):
        follower = arguments[index + 1] if index + 1 < len(arguments) else ""
        # A checkpoint that is gone is named, and an error, not the newest one.
        named = os.path.isdir(follower) or re.fullmatch(r"checkpoint-\d+", os.path.basename(follower.rstrip("/")))
        if argument == "--resume" and not named:
            result[index] = f"--resume={_NEWEST}"
    return result
