"""The planner: what it searches, that its figures are those of a full trace, and that nothing beats its choice."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_rows
from typer.testing import CliRunner

from lowmem import Trainer, TrainingConfig
from lowmem.cli import app
from lowmem.cli.plan import _notes
from lowmem.errors import UserError
from lowmem.memory.choose import MARGIN, Plan, Search, needed
from lowmem.memory.depth import figures, shallow_depths, traced
from lowmem.memory.estimate import CONTEXT_BYTES, GIB
from lowmem.memory.furthest import Furthest
from lowmem.memory.guess import Costs, Problem
from lowmem.memory.plan import NothingFitsError, furthest, plan, problem
from lowmem.memory.plan_recipe import write_recipe
from lowmem.memory.search import Axis, Choice, Option, axes_for, choices, rows_per_pass
from lowmem.memory.side_by_side import can_fork, side_by_side
from lowmem.recipe import load_recipe
from lowmem.sizes import parse_size
from lowmem.strategies import STRATEGIES

NUMBERS = TrainingConfig(batch_size=4, max_length=128)
MIB = 2**20


def save_config(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A folder with a config.json, and nothing else."""
    from transformers import Gemma2Config, GPT2Config, LlamaConfig

    shape = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    if kind == "gpt2":
        made = GPT2Config(vocab_size=2000, n_embd=128, n_layer=6, n_head=4, n_positions=512)
    elif kind == "gemma":
        made = Gemma2Config(**{**shape, **heads, "head_dim": 32, "sliding_window": 64, **changes})
    else:
        made = LlamaConfig(**{**shape, **heads, "dtype": torch.bfloat16, **changes})
    made.save_pretrained(folder)
    return folder


def small_axes(
    numbers: TrainingConfig, keep: dict[str, Sequence[str]], methods: Sequence[str], further: bool = False
) -> tuple[Axis, ...]:
    """The search space with some of its answers."""
    return tuple(
        replace(axis, options=tuple(o for o in axis.options if o.name in keep.get(axis.name, [o.name])))
        for axis in axes_for(numbers, methods=methods, further=further)
    )


def on_gib(given: Problem, gib: float) -> Problem:
    return replace(given, capacity=int(gib * GIB))


# -- sizes and cards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("7.5GiB", int(7.5 * GIB)), ("512 mib", 512 * MIB), (123456, 123456)],
)
def test_sizes_are_read_in_both_units(text: str | int, size: int) -> None:
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["24 gigs", "", "-1GiB", "GiB", "0GiB", "1e3GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--host-memory: a size such as 24GiB"):
        parse_size(text, "--host-memory")


def test_the_context_is_left_free(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path))
    assert problem(folder, "24GiB").capacity == 24 * GIB - CONTEXT_BYTES
    assert problem(folder, None, gpu="rtx 4090").card.name == "RTX 4090"
    with pytest.raises(UserError, match="CUDA itself takes"):
        problem(folder, "0.4GiB")
    with pytest.raises(UserError, match="give --gpu-memory"):
        problem(folder, None)
    with pytest.raises(UserError, match="did you mean qlora"):
        problem(folder, "24GiB", method="qlorra")


def test_a_card_without_bfloat16_is_planned_in_float16(tmp_path: Path) -> None:
    found = problem(str(save_config(tmp_path)), None, gpu="t4", training=NUMBERS)
    every = list(choices(found.axes, NUMBERS))
    assert every
    assert not any("pure_bf16" in choice.settings() for choice in every)
    assert {c.settings()["mixed_precision"]["dtype"] for c in every if "mixed_precision" in c.settings()} == {"float16"}
    assert {c.dtype for c in every if c.method != "full"} == {"float16"}
    # its loss scale needs all gradients at the step: refused by declaration
    assert not any({"optimizer_in_backward", "mixed_precision"} <= set(c.settings()) for c in every)


# -- what is searched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("further", [False, True])
def test_every_row_of_the_search_names_strategies_that_exist(further: bool) -> None:
    for axis in axes_for(NUMBERS, gpus=2, further=further):
        assert len({option.name for option in axis.options}) == len(axis.options)
        for option in axis.options:
            for key, settings in option.strategies.items():
                assert STRATEGIES[key](**settings).name == key


def test_declarations_refuse_what_cannot_stand_together() -> None:
    every = list(choices(axes_for(NUMBERS), NUMBERS))
    assert not any({"optimizer_in_backward", "gradient_accumulation"} <= set(c.settings()) for c in every)
    assert any({"optimizer_in_backward", "pure_bf16", "adamw_8bit"} <= set(c.settings()) for c in every)
    assert all(c.training(NUMBERS).max_grad_norm is None for c in every if "optimizer_in_backward" in c.settings())
    assert len({c.key for c in every}) == len(every)


def test_the_batch_is_split_into_equal_parts() -> None:
    numbers = TrainingConfig(batch_size=12)
    found = {rows_per_pass(choice, 12) for choice in choices(axes_for(numbers), numbers)}
    assert found == {1, 2, 3, 4, 6, 12}


def test_a_new_strategy_is_one_more_row(tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path)), "24GiB", training=NUMBERS, method="full")
    averages = Axis("average", (Option("none"), Option("ema", {"ema": {"decay": 0.9}})))
    wider = replace(given, axes=(*given.axes, averages))
    assert len(Costs(wider).choices) == 2 * len(Costs(given).choices)
    costs = Costs(wider)
    with_it = next(c for c in costs.choices if "ema" in c.settings())
    without = with_it.with_(average=averages.options[0])
    weights = sum(p.numel() for p in given.subject(without).make_model(None).parameters())
    assert costs.figures(with_it).floor - costs.figures(without).floor == pytest.approx(4 * weights, rel=0.01)


# -- figures ----------------------------------------------------------------------------------------------------------

FAST = {"precision": ["autocast"], "optimizer": ["8-bit AdamW"], "placement": ["step"]}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_figures_of_two_shallow_traces_are_those_of_the_full_depth(kind: str, tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path, kind)), "24GiB", training=NUMBERS, method="lora")
    axes = small_axes(NUMBERS, {**FAST, "split": ["1 at a time"], "loss": ["whole"]}, ["lora"])
    for choice in choices(axes, NUMBERS):
        subject = given.subject(choice)
        depths = shallow_depths(subject)
        assert depths is not None
        assert depths[1] < subject.layers
        shallow, full = figures(subject, given.lengths), traced(subject, given.lengths, None)
        assert shallow.allocated == full.allocated
        assert shallow.floor == full.floor
        assert shallow.seconds(given.card) == pytest.approx(full.seconds(given.card), rel=1e-9)


def test_the_work_of_a_step_counts_every_micro_batch(tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path)), "24GiB", training=replace(NUMBERS, batch_size=6), method="full")
    found = {
        rows_per_pass(c, 6): figures(given.subject(c), given.lengths)
        for c in choices(small_axes(given.training, {**FAST, "checkpointing": ["none"], "loss": ["whole"]}, ["full"]),
                         given.training)
    }  # fmt: skip
    products = {rows: sum(t.flops["bfloat16"] for t in figure.work.totals().values()) for rows, figure in found.items()}
    assert products[1] == pytest.approx(products[6], rel=1e-9)
    assert products[2] == pytest.approx(products[6], rel=1e-9)
    launches = {rows: sum(t.launches for t in figure.work.totals().values()) for rows, figure in found.items()}
    assert launches[1] > launches[2] > launches[6]
    assert found[1].seconds(given.card) > found[2].seconds(given.card) > found[6].seconds(given.card)


# -- the choice -------------------------------------------------------------------------------------------------------


def fastest_of_all(given: Problem, method: str, known: dict[Any, Any]) -> tuple[float, Choice] | None:
    """The same question by brute force: every combination traced at its full depth, in order of time."""
    every = []
    for choice in choices(given.axes, given.training):
        if choice.method == method:
            key = (*choice.key, given.training.batch_size, given.training.max_length, id(given.config))
            if key not in known:
                known[key] = traced(given.subject(choice), given.lengths, None)
            every.append((known[key].seconds(given.card), known[key].allocated, choice))
    search = Search(given)
    for seconds, allocated, choice in sorted(every, key=lambda item: item[0]):
        if allocated > given.capacity:
            continue
        key = ("estimate", *choice.key, given.training.batch_size, given.training.max_length, id(given.config))
        if key not in known:
            known[key] = search.estimate(choice)
        if needed(known[key]) <= given.capacity:
            return seconds, choice
    return None


def check_against_all(given: Problem, method: str, known: dict[Any, Any]) -> bool:
    """Whether there was a plan; it must be confirmed, and no combination that fits may be faster."""
    found = next(Search(given).plans(method), None)
    best = fastest_of_all(given, method, known)
    if found is None or best is None:
        assert found is None
        assert best is None
        return False
    assert needed(found.estimate) <= given.capacity
    assert found.estimate.peak_allocated_bytes <= found.estimate.peak_reserved_bytes
    assert found.seconds <= best[0] * (1 + 1e-9), (found.choice.key, best)
    return True


def random_problems(folder: Path, number: int, seed: int = 0) -> list[tuple[Problem, str]]:
    """Models of up to 8 layers, at most 64 combinations, and a memory that only some of them fit."""
    rng = random.Random(seed)
    found: list[tuple[Problem, str]] = []
    while len(found) < number:
        kind, method = rng.choice(["llama", "llama", "gemma", "gpt2"]), rng.choice(["full", "lora", "qlora"])
        width = rng.choice([128, 256])
        changes = {"num_hidden_layers": rng.randint(3, 8), "vocab_size": rng.choice([500, 8000]),
                   "hidden_size": width, "intermediate_size": 3 * width}  # fmt: skip
        place = save_config(folder / str(len(found)), kind, **changes)
        numbers = TrainingConfig(batch_size=rng.choice([2, 4]), max_length=rng.choice([64, 256, 500]))
        card = rng.choice(["rtx 4090", "rtx 3060", "a100 80gb", "l4"])
        placement = rng.choice([["step"], ["in backward", "step"]])
        precision = rng.sample(["autocast", "pure bfloat16"], 1)
        axes = small_axes(numbers, {"precision": precision, "placement": placement}, [method])
        given = problem(str(place), "24GiB", gpu=card, training=numbers, method=method, axes=axes)
        assert len(Costs(given).choices) <= 64
        sizes = [between(given, rng.uniform(-0.05, 1.05)) for _ in range(min(5, number - len(found)))]
        found += [(replace(given, capacity=size), method) for size in sizes]
    return found


def test_no_combination_that_fits_is_faster(tmp_path: Path) -> None:
    given = problem(
        str(save_config(tmp_path, num_hidden_layers=3)),
        "24GiB",
        gpu="rtx 3060",
        training=replace(NUMBERS, batch_size=2),
        axes=small_axes(
            replace(NUMBERS, batch_size=2),
            {"precision": ["pure bfloat16"], "optimizer": ["8-bit AdamW"], "loss": ["whole"]},
            ["full"],
        ),
    )
    known: dict[Any, Any] = {}
    assert {check_against_all(on_gib(given, gib), "full", known) for gib in (0.02, 0.05)} == {True, False}


@pytest.mark.slow  # about 20 minutes
def test_exhaustive_search_never_beats_the_choice(tmp_path: Path) -> None:
    known: dict[Any, Any] = {}
    fitting = [check_against_all(given, method, known) for given, method in random_problems(tmp_path, 30)]
    assert sum(fitting) >= 15


DEEP = [
    ("smollm2-135m", "full", 512),
    ("tinyllama-1.1b-chat", "lora", 1024),
    ("llama-3.2-1b", "qlora", 2048),
    ("qwen2.5-0.5b", "full", 512),
    ("solar-10.7b", "qlora", 2048),
]


def between(given: Problem, share: float) -> int:
    """A memory between what the leanest and what the most wasteful combination needs."""
    costs = Costs(given)
    low = costs.figures(costs.family(costs.choices[0]).base).allocated
    return int(low + share * (max(costs.guess(choice).allocated for choice in costs.choices) - low))


@pytest.mark.slow  # about 5 minutes
@pytest.mark.parametrize(("model", "method", "length"), DEEP, ids=[row[0] for row in DEEP])
def test_exhaustive_search_never_beats_the_choice_at_full_depth(model: str, method: str, length: int) -> None:
    numbers = TrainingConfig(batch_size=4, max_length=length)
    keep = {"precision": ["pure bfloat16"], "optimizer": ["8-bit AdamW"], "loss": ["in chunks"]}
    axes = small_axes(numbers, keep, [method])
    given = problem(model, None, gpu="rtx 4090", training=numbers, method=method, axes=axes)
    assert check_against_all(replace(given, capacity=between(given, 0.4)), method, {})


def test_plans_give_up_less_and_less_and_say_why_none_is_faster(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, num_hidden_layers=2, vocab_size=8000))
    keep = {"placement": ["step"], "split": ["all rows at once"], "precision": ["autocast"]}
    axes = small_axes(NUMBERS, {**keep, "checkpointing": ["none", "every layer"]}, ["full"])
    costs = Costs(problem(folder, "24GiB", training=NUMBERS, axes=axes))
    heaviest = max(costs.figures(choice).allocated for choice in costs.choices)
    size = heaviest + CONTEXT_BYTES
    found = plan(folder, size, gpu="rtx 4090", training=NUMBERS, method="full", axes=axes)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert all(not set(a.choice.gives_up) <= set(b.choice.gives_up) for a, b in pairwise(found))
    assert all(one.needed_bytes <= size for one in found)
    misses = [one.faster for one in found if one.faster is not None]
    assert misses
    assert all(miss.seconds < one.seconds for one, miss in zip(found, misses, strict=False))
    assert all(miss.over_bytes > 0 and miss.where in ("forward", "backward", "step") for miss in misses)


@pytest.mark.skipif(not can_fork(), reason="searches run side by side on Linux, with two CPUs")
def test_methods_searched_side_by_side_give_the_same_plans(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, num_hidden_layers=2))
    keep = {**FAST, "split": ["1 at a time"], "checkpointing": ["none"], "loss": ["whole"]}
    options: dict[str, Any] = {"training": NUMBERS, "axes": small_axes(NUMBERS, keep, ["full", "lora"])}
    apart, together = (plan(folder, "2GiB", fork=fork, **options) for fork in (True, False))
    assert [one.method for one in apart] == ["full", "lora"]
    for one, other in zip(apart, together, strict=True):
        assert one.choice.key == other.choice.key
        assert one.seconds == other.seconds
        assert one.needed_bytes == other.needed_bytes
        assert one.tokens_per_second == other.tokens_per_second


@pytest.mark.skipif(not can_fork(), reason="searches run side by side on Linux, with two CPUs")
def test_what_fails_side_by_side_fails_here() -> None:
    def refuse() -> int:
        raise UserError("no such thing")

    assert side_by_side([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(UserError, match="no such thing"):
        side_by_side([lambda: 1, refuse])
    with pytest.raises(RuntimeError, match="ended from outside"):
        side_by_side([lambda: os._exit(1)])


def test_host_memory_is_a_bound_of_its_own(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, num_hidden_layers=2))
    keep = {**FAST, "split": ["1 at a time"], "checkpointing": ["none"], "loss": ["whole"]}
    axes = small_axes(NUMBERS, keep, ["full"])
    options: dict[str, Any] = {"training": NUMBERS, "method": "full", "axes": axes}
    (found,) = plan(folder, "2GiB", host_memory="8GiB", **options)
    assert 0 < found.estimate.host_bytes <= 8 * GIB
    with pytest.raises(NothingFitsError, match="--host-memory: nothing fits"):
        plan(folder, "2GiB", host_memory=found.estimate.host_bytes - 1, **options)


def test_where_nothing_fits_it_says_what_would(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, num_hidden_layers=3))
    keep = {**FAST, "split": ["1 at a time"], "loss": ["in chunks"], "checkpointing": ["every layer"]}
    axes = small_axes(NUMBERS, keep, ["full"])
    given = problem(folder, "1GiB", training=replace(NUMBERS, max_length=512), method="full", axes=axes)
    search = Search(given)
    least = needed(search.estimate(search.leanest(["full"])))
    size = least + CONTEXT_BYTES - 4 * MIB
    with pytest.raises(NothingFitsError, match=r"nothing fits .* a card with 1 GiB would do; [\d,]+ tokens a row") as e:
        plan(folder, size, training=given.training, method="full", axes=axes)
    assert "\n" not in str(e.value)


FEW = {"precision": ["pure bfloat16"], "placement": ["step"], "optimizer": ["AdamW"], "split": ["all rows at once"]}
LONG = TrainingConfig(batch_size=1, max_length=400)


@pytest.mark.slow  # half a minute
def test_what_is_dear_is_chosen_where_nothing_else_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem.memory import plan as planner

    folder = str(save_config(tmp_path, num_hidden_layers=3))
    keep = {**FEW, "checkpointing": ["every layer"], "loss": ["in chunks"]}

    def few(numbers: TrainingConfig, *_: Any, further: bool = False, **__: Any) -> tuple[Axis, ...]:
        return small_axes(numbers, keep, ["lora"], further)

    monkeypatch.setattr(planner, "axes_for", few)
    asked: dict[str, Any] = {"training": LONG, "method": "lora"}
    cheap = Search(problem(folder, "24GiB", **asked))
    (only,) = cheap.costs.choices
    least = needed(cheap.estimate(only)) + CONTEXT_BYTES
    (plain,) = plan(folder, least, **asked)
    assert plain.choice.key == only.key
    assert plain.problem.host is None
    dear = plan(folder, least - MIB, **asked)
    assert set(dear[0].choice.settings()) & {"tiled_mlp", "chunked_layers", "streamed_weights"}
    assert dear[0].needed_bytes <= least - MIB
    assert dear[0].problem.host == planner.HOST_BYTES
    assert dear[0].seconds >= plain.seconds
    assert "64 GiB of the host's memory" in " ".join(_notes(LONG, dear[0], host_assumed=True))
    assert not _notes(LONG, dear[0], host_assumed=False)
    assert not _notes(LONG, plain, host_assumed=True)
    with pytest.raises(NothingFitsError, match="--host-memory"):
        plan(folder, least - MIB, host_memory=MIB, **asked)


def test_what_a_model_refuses_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem import TiledMLP

    def refuse(self: Any, model: Any, run: Any) -> Any:
        if hasattr(model, "peft_config"):
            raise UserError("tiled_mlp: no such MLP")
        return model

    monkeypatch.setattr(TiledMLP, "wrap_model", refuse)
    found = problem(str(save_config(tmp_path)), "24GiB", training=NUMBERS, further=True)
    (layers,) = (axis for axis in found.axes if axis.name == "layers")
    assert [(option.name, option.methods) for option in layers.options] == [
        ("whole", ("full", "lora", "qlora")),
        ("MLP in slices", ("full",)),
        ("layers in slices", ("full", "lora", "qlora")),
    ]
    assert not any("tiled_mlp" in c.settings() and "lora" in c.settings() for c in Costs(found).choices)


@pytest.mark.slow  # about a minute
def test_of_what_is_dear_no_combination_that_fits_is_faster(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, num_hidden_layers=4))
    axes = small_axes(LONG, FEW, ["lora"], further=True)
    given = problem(folder, "24GiB", gpu="rtx 3060", training=LONG, method="lora", axes=axes)
    search, known = Search(given), dict[Any, Any]()
    every = sorted(needed(search.estimate(choice)) for choice in search.costs.choices)
    sizes = [every[0] - 1, every[0], every[len(every) // 2], every[-1] - 1]
    fitting = [check_against_all(replace(given, capacity=size), "lora", known) for size in sizes]
    assert fitting == [False, True, True, True]


@pytest.mark.slow  # about a minute
def test_the_hosts_memory_bounds_the_length(tmp_path: Path) -> None:
    """Inputs of layers that wait in the host's memory grow with the rows."""
    folder = str(save_config(tmp_path, num_hidden_layers=4))
    keep = {**FEW, "checkpointing": ["every layer, inputs on the host"], "layers": ["layers in slices"],
            "frozen weights": ["weights on the card"]}  # fmt: skip
    axes = small_axes(LONG, keep, ["lora"], further=True)
    given = replace(problem(folder, "24GiB", training=LONG, method="lora", axes=axes), capacity=GIB)
    free = Furthest(given, "seq_length", ["lora"]).find()
    assert free is not None
    host = free[1].estimate.host_bytes
    bound = Furthest(replace(given, host=host - 16 * MIB), "seq_length", ["lora"]).find()
    assert bound is not None
    assert bound[0] < 0.99 * free[0]
    assert host - 48 * MIB < bound[1].estimate.host_bytes <= host - 16 * MIB


# -- how far ----------------------------------------------------------------------------------------------------------


SLOW = [pytest.param(value, marks=pytest.mark.slow) for value in ("batch_size", "rank")]


@pytest.mark.parametrize("value", ["seq_length", *SLOW])
def test_the_largest_value_fits_and_a_few_per_cent_more_does_not(value: str, tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path, num_hidden_layers=2)), "24GiB", training=NUMBERS, method="lora")
    keep = {**FAST, "checkpointing": ["every layer"], "loss": ["whole"], "split": ["1 at a time"]}
    if value == "batch_size":
        keep["split"] = ["all rows at once"]
    given = replace(given, axes=small_axes(NUMBERS, keep, ["lora"]), capacity=GIB)
    search = Furthest(given, value, ["lora"])
    found = search.find()
    assert found is not None
    largest, best = found
    assert needed(best.estimate) <= given.capacity
    if value == "rank":  # of a model as narrow as this, any fits
        assert largest == search.limit == 128
        return
    at = search.kind.at(given, round(largest * 1.05))
    for choice in Costs(at).choices:
        assert needed(Search(at).estimate(choice)) > given.capacity


def test_learned_positions_bound_the_length(tmp_path: Path) -> None:
    folder = str(save_config(tmp_path, "gpt2"))
    given = problem(folder, "24GiB", training=NUMBERS, method="lora", axes=small_axes(NUMBERS, FAST, ["lora"]))
    assert Furthest(given, "seq_length", ["lora"]).limit == 512
    with pytest.raises(UserError, match="seq_length, batch_size, rank; got length"):
        furthest(folder, "24GiB", value="length")
    with pytest.raises(UserError, match="full fine-tuning has no adapters"):
        furthest(folder, "24GiB", value="rank", method="full")


# -- what is written --------------------------------------------------------------------------------------------------


def a_plan(folder: Path, **options: Any) -> Plan:
    axes = small_axes(NUMBERS, {**FAST, "checkpointing": ["every layer"], "loss": ["in chunks"],
                                "split": ["2 at a time"]}, ["qlora"])  # fmt: skip
    return plan(str(folder), "2GiB", training=NUMBERS, method="qlora", axes=axes, **options)[0]


def test_the_written_recipe_trains_as_it_is(tmp_path: Path) -> None:
    from conftest import make_llama

    model = make_llama()
    model.save_pretrained(tmp_path / "model")
    found = a_plan(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, make_rows())))
    write_recipe(found, tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text()
    assert "Given up: adapters of rank 16" in text
    assert "frozen weights rounded to 4 bits" in text
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert {s.name for s in recipe.strategies} == set(found.choice.settings())
    assert recipe.training.batch_size == NUMBERS.batch_size
    assert recipe.training.max_length == NUMBERS.max_length
    trainer = Trainer.from_recipe(tmp_path / "recipe.yaml", ["training.max_steps=2", "training.output_dir=null"])
    assert trainer.train()["steps"] == 2


def test_the_command_prints_the_plan_and_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem.memory import plan as planner

    folder = save_config(tmp_path / "model", num_hidden_layers=2)
    found = a_plan(folder)
    monkeypatch.setattr(planner, "plan", lambda *_, **__: [found])
    asked = ["plan", "--model", str(folder), "--gpu-memory", "2GiB", "--method", "qlora"]
    shown = CliRunner().invoke(app, [*asked, "-o", str(tmp_path / "r.yaml")], catch_exceptions=False)
    assert "take 1" in shown.stdout
    assert f"{found.needed_bytes / GIB:.2f}" in shown.stdout
    assert load_recipe(tmp_path / "r.yaml", check_files=False).model.name_or_path == str(folder)
    printed = json.loads(CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False).stdout)
    (one,) = printed["plans"]
    assert one["peak_reserved_bytes"] == found.estimate.peak_reserved_bytes
    assert sum(one["ledger"].values()) == one["peak_reserved_bytes"]
    assert one["needed_bytes"] == int(one["peak_reserved_bytes"] * (1 + MARGIN)) + CONTEXT_BYTES
    assert one["tokens_per_second"] == pytest.approx(4 * 128 / one["step_seconds"])
    for useless, what in (["--train", "x"], "--train"), (["--max", "seq_length", "--seq-length", "9"], "--max"):
        assert str(CliRunner().invoke(app, [*asked, *useless]).exception).startswith(what)
    monkeypatch.setattr(planner, "furthest", lambda *_, **__: (640, found))
    printed = json.loads(CliRunner().invoke(app, [*asked, "--max", "seq_length", "--json"]).stdout)
    assert printed["max"] == 640
    assert printed["peak_allocated_bytes"] == found.estimate.peak_allocated_bytes
