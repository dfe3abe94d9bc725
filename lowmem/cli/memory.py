"""`lowmem estimate`: what a run will need, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lowmem.cli.common import JsonOption, OverridesArgument, new_table, print_json, print_table, quiet_bars

if TYPE_CHECKING:
    from rich.table import Table

    from lowmem.memory.estimate import Estimate

GIB = 1024**3
SubjectArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or a model: a folder, a config.json, a hub id.")
]
LengthOption = Annotated[int | None, typer.Option("--seq-length", min=2, help="Tokens per row (training.max_length).")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Rows per optimizer step (training.batch_size).")
]


def estimate(
    recipe: SubjectArgument,
    overrides: OverridesArgument = None,
    seq_length: LengthOption = None,
    batch_size: BatchOption = None,
    device: Annotated[str, typer.Option(help="cuda: as on a card; cpu: as on a CPU.")] = "cuda",
    expandable: Annotated[
        bool, typer.Option("--expandable/--no-expandable", help="Allocator with expandable segments (the default).")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Say what a run will need: neither weights nor a GPU are looked at."""
    from lowmem.errors import UserError
    from lowmem.memory.subject import read_subject

    if device not in ("cuda", "cpu"):
        raise UserError(f"--device: cuda or cpu; got {device}")
    quiet_bars()
    run = read_subject(recipe, overrides or (), seq_length, batch_size)
    from lowmem.memory.estimate import estimate as predict

    found = predict(run, device=device, expandable_segments=expandable)  # type: ignore[arg-type]
    if as_json:
        print_json(found.as_dict())
        return
    _show(found)


def _show(found: Estimate) -> None:
    rows = f"{len(found.lengths)} rows of up to {max(found.lengths):,} tokens"
    place = f", {found.place}" if found.place else ""
    print(f"{found.model}: {rows} per optimizer step")
    if found.device == "cuda":
        print(
            f"  {gib(found.needed_bytes)} needed on the card: {gib(found.peak_reserved_bytes)} reserved by the "
            f"allocator (at most {gib(found.peak_allocated_bytes)} in use) and {gib(found.context_bytes)} for CUDA"
        )
    else:
        print(f"  {gib(found.peak_allocated_bytes)} of tensors at most")
    print(f"  peak in {found.phase}{place}, at {found.operation}")
    parts = ", ".join(f"{gib(size)} {category}" for category, size in found.host_phases[found.host_phase].items())
    print(f"  host: {gib(found.host_bytes)} in {found.host_phase} ({parts})")
    if found.managed_bytes:
        print(
            f"  paged optimizer state: {gib(found.managed_bytes)}, on the card where there is room, else on the host; "
            f"one update needs {gib(found.managed_at_once)} of it on the card"
        )
    for text in found.left_out:
        print(f"  left out: {text}")
    print(f"  tolerance: {found.error_band}")
    print_table(_ledger(found))
    largest = new_table("at the peak: largest", "GiB", "pieces")
    for size, count, what in found.holders[:8]:
        largest.add_row(what, f"{size / GIB:.3f}", f"{count:,}")
    print_table(largest)


def _ledger(found: Estimate) -> Table:
    table = new_table("GiB", "at the peak", *found.phases)
    categories = list(dict.fromkeys([*found.ledger, *(c for m in found.phases.values() for c in m.ledger)]))
    for category in categories:
        cells = [found.ledger.get(category, 0), *(m.ledger.get(category, 0) for m in found.phases.values())]
        table.add_row(category, *(f"{size / GIB:.3f}" if size else "" for size in cells))
    totals = [sum(found.ledger.values()), *(m.bytes for m in found.phases.values())]
    table.add_row("in all", *(f"{size / GIB:.3f}" for size in totals))
    return table


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB"
