"""`lowmem plan`: the techniques that make a model fit a card, fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowmem.cli.common import JsonOption, new_table, print_json, print_table, quiet_bars

if TYPE_CHECKING:
    from lowmem.config import TrainingConfig
    from lowmem.memory.choose import Miss, Plan

GIB = 1024**3


def plan(
    model: Annotated[str, typer.Option(help="A hub id, a known shape (llama-3.1-8b), a folder, a config.json.")],
    gpu_memory: Annotated[str | None, typer.Option(help="Of the card: 24GiB, 24GB (10^9 bytes each), bytes.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Cards of that memory which share the run.")] = 1,
    gpu: Annotated[str | None, typer.Option(help="The card whose speed is reckoned with: rtx 4090.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="What a process may take of the host's memory.")] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per row (training.max_length); 1024 without it.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows per optimizer step (training.batch_size); 8 without it.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora; without it all three.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the first plan as a recipe.")] = None,
    train: Annotated[
        str | None, typer.Option(metavar="FILE", help="The recipe's rows (data.train); train.jsonl without it.")
    ] = None,
    largest: Annotated[
        str | None, typer.Option("--max", metavar="VALUE", help="How far can I go: seq_length, batch_size or rank.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the strategies with which a model fits a card: neither weights nor a GPU are looked at."""
    quiet_bars()
    from lowmem.config import TrainingConfig
    from lowmem.errors import UserError
    from lowmem.memory import plan as planner

    if (largest == "seq_length" and seq_length) or (largest == "batch_size" and batch_size):
        raise UserError(f"--max {largest}: is what is looked for; leave out --{largest.replace('_', '-')}")
    if train and output is None:
        raise UserError("--train: has no effect without -o, which writes a recipe")
    plain = TrainingConfig()
    numbers = TrainingConfig(batch_size=batch_size or plain.batch_size, max_length=seq_length or plain.max_length)
    asked: dict[str, Any] = {
        "gpu": gpu,
        "host_memory": host_memory,
        "training": numbers,
        "method": method,
        "gpus": gpus,
    }
    value: int | None = None
    if largest is not None:
        value, best = planner.furthest(model, gpu_memory, value=largest, **asked)
        found = [best]
    else:
        found = planner.plan(model, gpu_memory, **asked, fork=True)
    if output is not None:
        from lowmem.memory.plan_recipe import write_recipe

        write_recipe(found[0], output, train or "train.jsonl")
    notes = _notes(found[0].training, found[0], host_memory is None)
    if as_json:
        plans = [plan_as_dict(one) for one in found]
        print_json({"max": value, **plans[0], "notes": notes} if largest else {"plans": plans, "notes": notes})
        return
    if largest is not None:
        each = f" on each of {gpus} cards" if largest == "batch_size" and gpus > 1 else ""
        print(f"largest {largest}: {value:,}{each}")
    _show(found, method, largest is not None)
    for note in notes:
        print(f"note: {note}")
    if output is not None:
        print(f"written: {output}")


def plan_as_dict(one: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    found = one.estimate.as_dict()
    kept = ("peak_reserved_bytes", "peak_allocated_bytes", "host_bytes", "pinned_bytes", "ledger", "reserved_band")
    return {
        "method": one.method,
        "strategies": one.choice.settings(),
        "dtype": one.choice.dtype,
        "rows_per_pass": one.rows_per_pass,
        "max_grad_norm": one.training.max_grad_norm,
        "given_up": list(one.choice.gives_up),
        **{key: found[key] for key in kept},
        "needed_bytes": one.needed_bytes,
        "capacity_bytes": one.problem.capacity,
        "card": one.problem.card.name,
        "gpus": one.problem.gpus,
        "sent_bytes": one.estimate.sent_bytes,
        "step_seconds": one.seconds,
        "tokens_per_second": one.tokens_per_second,
        "next_faster": one.faster and _miss_as_dict(one.faster),
    }


def _miss_as_dict(miss: Miss) -> dict[str, Any]:
    return {
        "strategies": miss.choice.settings(),
        "step_seconds": miss.seconds,
        "over_bytes": miss.over_bytes,
        "where": miss.where,
        "category": miss.category,
    }


def _show(found: list[Plan], method: str | None, is_largest: bool) -> None:
    first = found[0]
    numbers, given = first.training, first.problem
    usable, context = given.capacity / GIB, first.estimate.context_bytes / GIB
    print(
        f"{given.model.name_or_path}: {numbers.batch_size} rows of {numbers.max_length:,} tokens per optimizer step; "
        f"{usable:.2f} GiB for the allocator, {context:.2f} for CUDA itself; speed of {given.card.name}"
    )
    many = given.gpus > 1
    columns = ["plan", "card, GiB", "host, GiB", *(["sent, GiB"] if many else [])]
    columns += ["s/step", "tokens/s", "with", "given up", "next faster"]
    table = new_table(*columns[: -1 if is_largest else None])
    for number, one in enumerate(found, 1):
        table.add_row(
            f"{number} {one.method}",
            f"{one.needed_bytes / GIB:.2f}",
            f"{one.estimate.host_bytes / GIB:.2f}",
            *([f"{one.estimate.sent_bytes / GIB:.2f}"] if many else []),
            f"{one.seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            _words(one.choice.settings()),
            "; ".join(one.choice.gives_up) or "nothing",
            *(() if is_largest else (_why(one),)),
        )
    print_table(table)
    print("card: reserved at most, 2 % margin, and CUDA's share")
    if many:
        print(
            f"each of {given.gpus} cards and processes needs that much, and sends so much to the others in a step; "
            "times are those of messages over the host's bus"
        )
    if is_largest:
        return
    why = "the fastest" if method else "of the methods that fit, it gives up least; the fastest of that method"
    print(f"take 1: {why}")


def _words(settings: dict[str, dict[str, Any]]) -> str:
    """`gradient_accumulation(micro_batch_size=2)`."""
    shown = {"gradient_accumulation": None, "gradient_checkpointing": None, "lora": ("r",), "quantization": ("format",)}
    words = []
    for key, values in settings.items():
        names = shown.get(key, ())
        inside = ", ".join(f"{n}={v}" for n, v in values.items() if names is None or n in names)
        words.append(f"{key}({inside})" if inside else key)
    return ", ".join(words) or "plain training"


def _why(one: Plan) -> str:
    miss = one.faster
    if miss is None:
        return "none is faster"
    changes = [
        option.name if option.name not in ("none", "whole", "step") else f"{axis}: {option.name}"
        for axis, option in miss.choice.picks.items()
        if option.name != one.choice.picks[axis].name
    ]
    return (
        f"{', '.join(changes)}: {miss.seconds:.3g} s, but {miss.over_bytes / GIB:.2f} GiB too much in {miss.where} "
        f"(most of it {miss.category})"
    )


def _notes(numbers: TrainingConfig, one: Plan, host_assumed: bool) -> list[str]:
    notes = []
    if host_assumed and one.problem.host is not None:
        notes += [
            f"{one.problem.host / GIB:.0f} GiB of the host's memory are reckoned with; --host-memory says another"
        ]
    text = one.problem.config(one.choice.dtype).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions and numbers.max_length > positions:
        notes += [
            f"rows of {numbers.max_length:,} tokens go beyond the {positions:,} positions the model was trained with; "
            "they are computed, so it runs, but quality there is another matter"
        ]
    return notes
