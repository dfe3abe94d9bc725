"""`lowmem waterfall`: the order, the bars, what they save and cost, the picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
from test_estimate import PNG, folder, lowmem, refusal, subject

from lowmem import (
    EMA,
    AdamW8bit,
    Adapter,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Quantization,
    Strategy,
)
from lowmem.cli.memory_tables import show_waterfall
from lowmem.memory.beside import beside_the_rule
from lowmem.memory.cards import card
from lowmem.memory.depth import figures, shallow_depths, traced
from lowmem.memory.estimate import estimate
from lowmem.memory.subject import read_subject
from lowmem.memory.waterfall import PLAIN, RULE, _rule, _size, _way_down, waterfall
from lowmem.model import blocks
from lowmem.strategy import Stage, Trait

__all__ = ["folder"]
CARD = card("RTX 4090")


def names(found) -> list[str]:
    return [bar.name for bar in found.bars]


def test_the_last_bar_is_the_estimate_and_the_savings_add_up():
    run = subject(GradientCheckpointing(), GradientAccumulation(micro_batch_size=1), AdamW8bit())
    found, whole = waterfall(run), estimate(run)
    assert names(found) == [RULE, PLAIN, "gradient_checkpointing", "gradient_accumulation", "adamw_8bit"]
    last, plain = found.bars[-1], found.bars[1]
    for name in (
        "peak_reserved_bytes",
        "peak_allocated_bytes",
        "host_bytes",
        "pinned_bytes",
        "managed_bytes",
        "ledger",
        "phase",
    ):
        assert getattr(last, name) == getattr(whole, name), name
    assert found.bars[0].saved_bytes is plain.saved_bytes is None
    assert sum(bar.saved_bytes for bar in found.bars[2:]) == plain.peak_reserved_bytes - last.peak_reserved_bytes > 0
    assert plain.peak_reserved_bytes == estimate(run.with_strategies([])).peak_reserved_bytes
    assert found.notes == []


@dataclass
class Left(Strategy):
    stage: ClassVar[Stage] = Stage.KERNEL
    needs = frozenset({Trait.AUTOCAST})
    provides = frozenset({Trait.RECOMPUTE})


@dataclass
class Right(Strategy):
    stage: ClassVar[Stage] = Stage.KERNEL
    needs = frozenset({Trait.RECOMPUTE})
    provides = frozenset({Trait.AUTOCAST})


@dataclass
class After(Strategy):
    stage: ClassVar[Stage] = Stage.KERNEL
    needs = frozenset({Trait.RECOMPUTE})


def order(*strategies) -> tuple[list[str], list[str]]:
    """What is added at each step, and the notes; nothing is traced."""
    notes: list[str] = []
    steps = _way_down(subject(*strategies), lambda _: None, None, notes)
    return [" + ".join(s.name for s in group) for group, _ in steps], notes


def test_paged_moments_are_told_to_lie_beside_the_allocator():
    found = waterfall(subject(AdamW8bit(paged=True), vocabulary=4096))
    assert found.bars[-1].managed_bytes == found.final.managed_bytes > 0
    assert "beside the allocator" in found.notes[-1]
    rows = {row.category: row.predicted_bytes for row in beside_the_rule(found.final)}
    assert rows["paged moments"] == found.final.managed_at_once > 0
    assert sum(rows.values()) == found.final.needed_bytes


def test_what_needs_a_later_one_waits_for_it_and_is_told():
    steps, notes = order(Quantization(), MixedPrecision(), LoRA(r=4), AdamW8bit())
    assert steps == ["mixed_precision", "lora", "quantization", "adamw_8bit"]
    assert notes[0].startswith("quantization comes with or after mixed_precision. Before: ")
    assert "trainable" in notes[0]
    assert notes[1].startswith("quantization comes with or after lora. ")


def test_two_that_need_each_other_come_together():
    both = f"{Left().name} + {Right().name}"
    assert order(Left(), EMA(), Right())[0] == ["ema", both]
    assert order(After(), Left(), Right())[0] == [both, After().name]


def test_without_techniques_the_plain_loop_is_the_recipe():
    run = subject()
    found = waterfall(run)
    assert names(found) == [RULE, PLAIN]
    assert found.bars[-1].peak_reserved_bytes == estimate(run).peak_reserved_bytes


def test_the_rule_is_four_times_the_weights_in_their_dtype():
    count, size = _size(read_subject("solar-10.7b-qlora-24gb"))
    rule = _rule(count, size)
    assert (count, size, rule.peak_reserved_bytes) == (10_731_524_096, 2, 85_852_192_768)
    assert sum(rule.ledger.values()) == 85_852_192_768


def test_the_plain_loop_beside_the_rule():
    found = waterfall(subject(LoRA(r=4)))
    assert sum(row.rule_bytes for row in found.differences) == found.bars[0].peak_reserved_bytes
    assert sum(row.predicted_bytes for row in found.differences) == found.bars[1].peak_reserved_bytes
    assert {row.category for row in found.differences} >= {"weights", "gradients", "optimizer state", "activations"}
    assert all(row.why for row in found.differences)


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategies",
    [
        [],
        [GradientCheckpointing(every_n_layers=2)],
        [LoRA(r=4), GradientCheckpointing(), MixedPrecision(), GradientAccumulation(micro_batch_size=1)],
    ],
)
def test_two_shallow_traces_tell_the_time_of_all_layers(strategies):
    run, lengths = subject(*strategies, layers=7), [64] * 4
    assert shallow_depths(run) is not None  # else all layers are traced
    assert figures(run, lengths).seconds(CARD) == pytest.approx(traced(run, lengths, None).seconds(CARD), rel=1e-6)


@dataclass
class LastLayers(Strategy):
    """Says nothing of how it treats layers."""

    stage: ClassVar[Stage] = Stage.ADAPT
    exact: ClassVar[bool] = False

    def wrap_model(self, model, run):
        model.requires_grad_(False)
        for layer in blocks(model)[-3:]:
            layer.requires_grad_(True)
        return model


@pytest.mark.parametrize(
    "strategy",
    [
        LastLayers(),
        Adapter("LORA", layers_to_transform=[5, 6]),
        Adapter("LORA", target_modules=r".*layers\.6\..*q_proj"),
        Adapter("LORA", target_modules=["q_proj"], rank_pattern={"layers.5.self_attn.q_proj": 64}),
        Adapter("ADAPTION_PROMPT", adapter_len=4, adapter_layers=5),
    ],
    ids=["undeclared", "layers_to_transform", "target_modules", "rank_pattern", "adapter_layers"],
)
def test_where_single_layers_are_meant_all_are_traced(strategy):
    run = subject(strategy, layers=7)
    assert run.shallow is None
    trace = run.trace([64] * 4)
    found = waterfall(run, card=CARD)
    full = traced(run, [64] * 4, None)
    assert found.bars[-1].peak_allocated_bytes >= trace.peak()[0]
    assert found.bars[-1].step_seconds == pytest.approx(full.seconds(CARD), rel=1e-6)


def test_numbers_that_end_a_word_name_no_layer():
    assert subject(Adapter("LORA", target_modules=["w1", "fc2", "wi_0"])).period == 1
    assert subject(Adapter("LORA", target_modules=r"model\.layers\.\d+\.mlp\.up_proj")).period is None


@pytest.fixture(scope="module")
def down():
    return waterfall(subject(Quantization(), LoRA(r=4), GradientCheckpointing(), length=512, rows=8), card=CARD)


def test_recomputing_costs_time_and_the_rule_has_none(down):
    rule, plain, lora, quantized, recomputed = (bar.step_seconds for bar in down.bars)
    assert rule is None
    assert min(plain, lora) > 0
    assert 1.05 < recomputed / quantized < 1.5
    assert down.card == "RTX 4090"


# -- what is printed, drawn and handed to programs --------------------------------------------------------------------


def test_the_tables_fit_100_columns_and_say_what_matters(down, capsys):
    show_waterfall(down, 12 * 2**30)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    words = ("+ gradient_checkpointing", "note: quantization comes with or after lora", "RTX 4090", "bytes x 4 =")
    assert all(word in " ".join(text.split()) for word in (*words, "A card with 12 GiB: fits"))


def test_the_command_draws_and_gives_facts(folder):
    pytest.importorskip("matplotlib")
    found = json.loads(lowmem("waterfall", "tiny.yaml", "strategies.quantization=null", "--plot", "down.png", "--json"))
    assert (folder / "down.png").read_bytes().startswith(PNG)
    keys = {"peak_reserved_bytes", "peak_allocated_bytes", "host_bytes", "pinned_bytes", "ledger"}
    assert all(keys | {"saved_bytes", "step_seconds", "strategies"} <= set(bar) for bar in found["bars"])
    assert {key: found["bars"][-1][key] for key in keys} == {key: found["final"][key] for key in keys}
    assert found["card"] == "RTX 4090"


def test_an_unknown_card_gets_the_nearest_name(folder):
    assert "did you mean" in refusal("waterfall", "tiny.yaml", "--gpu", "RTX 4091")
