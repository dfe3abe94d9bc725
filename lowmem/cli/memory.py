"""`lowmem estimate` and `lowmem waterfall`: what a run will need, before it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from lowmem.cli.common import JsonOption, OverridesArgument, print_json, quiet_bars, short_lived

SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or a model: a folder, a config.json, a hub id.")
]
LengthOption = Annotated[int | None, typer.Option("--seq-length", min=2, help="Tokens per row (training.max_length).")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Rows per optimizer step (training.batch_size).")
]
ExpandableOption = Annotated[
    bool, typer.Option("--expandable/--no-expandable", help="Allocator with expandable segments (the default).")
]
MemoryOption = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help="A card's memory, such as 24GiB: does it fit?")
]
PlotOption = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="A picture: .png, .svg or .pdf.")]


def estimate(
    recipe: SubjectArgument,
    overrides: OverridesArgument = None,
    seq_length: LengthOption = None,
    batch_size: BatchOption = None,
    gpu_memory: MemoryOption = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Cards that share the run, by its strategies.")] = 1,
    device: Annotated[str, typer.Option(help="cuda: as on a card; cpu: as on a CPU.")] = "cuda",
    expandable: ExpandableOption = True,
    data: Annotated[
        bool, typer.Option("--data", help="Read the recipe's data, and predict for its longest batch.")
    ] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a run will need: neither weights nor a GPU are looked at."""
    short_lived()
    from lowmem.cli.memory_tables import show_estimate
    from lowmem.errors import UserError
    from lowmem.memory.picture import require_plot
    from lowmem.memory.subject import Subject, read_recipe
    from lowmem.sizes import parse_size

    if device not in ("cuda", "cpu"):
        raise UserError(f"--device: cuda or cpu; got {device}")
    if gpu_memory and device == "cpu":
        raise UserError("--gpu-memory: has no meaning with --device cpu")
    card = parse_size(gpu_memory, "--gpu-memory") if gpu_memory else None
    file = require_plot(plot) if plot else None
    quiet_bars()
    read = read_recipe(recipe, overrides or (), seq_length, batch_size, check_files=data)
    from lowmem.memory.estimate import estimate as predict
    from lowmem.memory.trace import Trace
    from lowmem.memory.worst_batch import heaviest, worst_batches, worst_batches_of

    run, worst, held_out = replace(Subject.of(read), gpus=gpus), worst_batches(None, read.training), None
    if data:
        worst, held_out = worst_batches_of(read)
        run = replace(run, evaluation=held_out or ())
    trace = Trace(device)
    with _said_in_one_line():
        lengths = heaviest(run, worst.batches, device)  # type: ignore[arg-type]
        found = predict(run, lengths=lengths, device=device, expandable_segments=expandable, trace=trace)  # type: ignore[arg-type]
    if file:
        from lowmem.memory.step import second_step
        from lowmem.memory.step_picture import draw

        usable = None if card is None else card - found.context_bytes
        draw(found, second_step(trace, run.vocabulary), file, usable)
    if as_json:
        fits = {} if card is None else {"gpu_memory_bytes": card, "fits": found.needed_bytes <= card}
        rows = {"batch": worst.words, "eval_lengths": held_out and list(held_out)}
        print_json(found.as_dict() | rows | fits)
    else:
        show_estimate(found, card, recipe, worst.words + ("" if data else " (--data reads the real rows)"))


def waterfall(
    recipe: SubjectArgument,
    overrides: OverridesArgument = None,
    seq_length: LengthOption = None,
    batch_size: BatchOption = None,
    gpu_memory: MemoryOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="CARD", help="Whose speed the times are for, such as 'RTX 4090'.")
    ] = None,
    expandable: ExpandableOption = True,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go from plain full fine-tuning down to a recipe, one technique at a time: what each saves, and costs in time."""
    short_lived()
    from lowmem.cli.memory_tables import show_waterfall
    from lowmem.memory.cards import card, card_for
    from lowmem.memory.picture import require_plot
    from lowmem.memory.subject import Subject, read_recipe
    from lowmem.sizes import parse_size

    size = parse_size(gpu_memory, "--gpu-memory") if gpu_memory else None
    paced = card(gpu) if gpu else card_for(size or 24 * 1024**3)
    file = require_plot(plot) if plot else None
    quiet_bars()
    from lowmem.memory.estimate import CONTEXT_BYTES
    from lowmem.memory.waterfall import waterfall as go_down

    run = Subject.of(read_recipe(recipe, overrides or (), seq_length, batch_size))
    with _said_in_one_line():
        found = go_down(run, expandable_segments=expandable, card=paced, progress=_progress)
    if file:
        from lowmem.memory.waterfall_picture import draw

        draw(found, file, None if size is None else size - CONTEXT_BYTES)
    if as_json:
        print_json(found.as_dict())
    else:
        show_waterfall(found, size)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"tracing {text}", file=sys.stderr)


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """What torch says where a part of a run looks at data, which a prediction has none of."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        from lowmem.memory.estimate import unpredictable

        raise unpredictable(error) from error
