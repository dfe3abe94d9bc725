"""Planning and estimating for several cards: depth, choice, and what the commands print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_plan import NUMBERS, save_config
from typer.testing import CliRunner

from lowmem import DDP, FSDP2, DeepSpeedZeRO, LoRA, Quantization, Strategy, TrainingConfig
from lowmem.cli import app
from lowmem.config import ModelConfig
from lowmem.errors import UserError
from lowmem.memory.depth import figures, traced
from lowmem.memory.estimate import estimate
from lowmem.memory.furthest import LARGEST
from lowmem.memory.plan import plan, problem
from lowmem.memory.search import Axis, axes_for, choices
from lowmem.memory.subject import Subject, model_config
from lowmem.sizes import parse_size

WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8}


def subject(folder: Path, strategy: Strategy, gpus: int, training: TrainingConfig = NUMBERS) -> Subject:
    model = ModelConfig(str(folder))
    return replace(Subject.of_config(model_config(model), model, training, [strategy]), gpus=gpus)


def few_axes() -> list[Axis]:
    """Only how two cards share full training, and how many rows pass at once."""
    kept = {"optimizer": "AdamW", "placement": "step", "checkpointing": "every layer", "loss": "whole"}
    kept |= {"precision": "float32"}
    return [
        replace(axis, options=tuple(o for o in axis.options if o.name == kept.get(axis.name, o.name)))
        for axis in axes_for(NUMBERS, methods=("full",), gpus=2)
    ]


@pytest.mark.parametrize("strategy", [DDP(), FSDP2(), DeepSpeedZeRO(zero_stage=2)], ids=lambda s: s.name)
def test_figures_of_two_shallow_traces_are_those_of_the_full_depth(strategy: Strategy, tmp_path: Path) -> None:
    run = subject(save_config(tmp_path), strategy, 2)
    near, whole = figures(run, (128,) * 4), traced(run, (128,) * 4, None)
    assert near.allocated == pytest.approx(whole.allocated, rel=0.005)
    assert near.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-6)


def test_more_cards_leave_less_on_each_with_fsdp_and_not_with_ddp(tmp_path: Path) -> None:
    folder = save_config(tmp_path, **WIDE)

    def at_rest(strategy: Strategy, gpus: int) -> int:
        ledger = estimate(subject(folder, strategy, gpus), band=False).phases["at rest"].ledger
        return sum(size for category, size in ledger.items() if category != "workspaces")

    assert at_rest(FSDP2(), 4) == pytest.approx(at_rest(FSDP2(), 2) / 2, rel=0.01)
    assert at_rest(DDP(), 4) == at_rest(DDP(), 2)


def test_the_longest_rows_are_those_of_the_card_that_is_predicted(tmp_path: Path) -> None:
    run = subject(save_config(tmp_path), DDP(), 2)
    one, other = (estimate(run, lengths=rows, band=False) for rows in ((16, 16, 128, 16), (128, 16, 16, 16)))
    assert one.peak_allocated_bytes == other.peak_allocated_bytes


def test_cards_share_what_one_cannot_hold(tmp_path: Path) -> None:
    """0.3 GiB of weights, and as much of gradients and of each moment: parts where whole ones do not fit."""
    folder = str(save_config(tmp_path, **WIDE))
    axes = few_axes()
    for memory, engine in (("1.5GiB", "fsdp_2"), ("4GiB", "ddp")):
        found = plan(folder, memory, training=NUMBERS, method="full", gpus=2, few=1, axes=axes)[0]
        assert engine in found.choice.settings()
        assert found.needed_bytes <= parse_size(memory, "memory")
        assert found.rows_per_pass == NUMBERS.batch_size // 2


def test_the_search_space_shares_the_rows(tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path)), "8GiB", training=NUMBERS, gpus=2)
    names = {option.name for axis in given.axes if axis.name == "split" for option in axis.options}
    assert names == {"all rows at once", "1 at a time"}
    assert all({"ddp", "fsdp_2"} & set(choice.settings()) for choice in choices(given.axes, NUMBERS))


def test_rows_at_once_are_those_of_each_card(tmp_path: Path) -> None:
    given = problem(str(save_config(tmp_path)), "8GiB", training=NUMBERS, gpus=2)
    assert LARGEST["batch_size"].at(given, 3).training.batch_size == 6


def test_a_recipe_that_shares_nothing_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(str(save_config(tmp_path)))
    run = replace(Subject.of_config(model_config(model), model, NUMBERS, []), gpus=2)
    with pytest.raises(UserError, match="2 processes were started, and no strategy shares the work"):
        estimate(run)


@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=lambda s: s.name)
def test_weights_in_4_bits_are_on_every_card(strategy: Strategy, tmp_path: Path) -> None:
    """Quantised on the host, as parts are made there, with scales that are quantised, too."""
    folder = save_config(tmp_path)

    def frozen(*strategies: Strategy, gpus: int) -> int:
        model = ModelConfig(str(folder))
        run = Subject.of_config(model_config(model), model, NUMBERS, [Quantization(), LoRA(r=4), *strategies])
        return int(estimate(replace(run, gpus=gpus), band=False).phases["at rest"].ledger["weights, frozen"])

    alone, shared = frozen(gpus=1), frozen(strategy, gpus=2)
    in_16_bits = 2 * (2 * 2000 * 128 + 13 * 128)  # embedding, head, and norms, which are cut
    cut = in_16_bits // 2 if strategy.name == "fsdp_2" else 0
    assert shared == pytest.approx(alone - cut, rel=0.02)


def test_parts_that_wait_on_the_host_leave_the_card_empty(tmp_path: Path) -> None:
    run = subject(save_config(tmp_path, **WIDE), FSDP2(offload=True), 2)
    found, weights = estimate(run, band=False), sum(p.nbytes for p in run.make_model(None).parameters())
    kept = sum(size for name, size in found.phases["at rest"].ledger.items() if name != "workspaces")
    assert kept < 0.01 * weights
    assert found.host_bytes > 2 * weights  # parts and their gradients in blocks of powers of two, and two moments


def test_at_stage_3_all_layers_are_followed(tmp_path: Path) -> None:
    run = subject(save_config(tmp_path), DeepSpeedZeRO(zero_stage=3), 2)
    assert run.shallow is None
    assert figures(run, (128,) * 4).allocated == traced(run, (128,) * 4, None).allocated


def test_the_commands_say_what_each_card_holds_and_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, runner = save_config(tmp_path), CliRunner()
    asked = ["estimate", str(folder), "strategies.ddp={}", "--gpus", "2", "--seq-length", "64"]
    text = runner.invoke(app, asked)
    assert text.exit_code == 0, text.output
    assert "of GPU memory on each of 2 cards" in text.output
    assert "from each card to the others" in text.output
    facts = json.loads(runner.invoke(app, [*asked, "--json"]).stdout)
    # a ring of two sends half of what it adds up, twice: every gradient once
    gradients = facts["phases"]["step"]["ledger"]["gradients"]
    assert (facts["gpus"], facts["sent_bytes"]) == (2, pytest.approx(gradients, rel=1e-4))
    monkeypatch.setattr("lowmem.memory.plan.axes_for", lambda *_, **__: few_axes())
    more = ["plan", "--model", str(folder), "--gpu-memory", "4GiB", "--gpus", "2", "--method", "full", "--batch-size"]
    text = runner.invoke(app, [*more, "4"])
    assert "each of 2 cards and processes needs that much" in text.output
    facts = json.loads(runner.invoke(app, [*more, "4", "--json"]).stdout)
    assert {one["gpus"] for one in facts["plans"]} == {2}
    assert all(one["sent_bytes"] > 0 for one in facts["plans"])
