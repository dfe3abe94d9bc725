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
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Quantization,
    Strategy,
)
from lowmem.memory.cards import card
from lowmem.memory.estimate import estimate
from lowmem.memory.pace import step_seconds
from lowmem.memory.subject import read_subject
from lowmem.memory.trace import Trace
from lowmem.memory.waterfall import PLAIN, RULE, _rule, _size, waterfall
from lowmem.memory.work import Work
from lowmem.strategy import Stage, Trait

__all__ = ["folder"]
CARD = card("RTX 4090")


def names(found) -> list[str]:
    return [bar.name for bar in found.bars]


def test_the_last_bar_is_the_estimate_and_the_savings_add_up():
    run = subject(GradientCheckpointing(), GradientAccumulation(micro_batch_size=1), AdamW8bit(min_8bit_size=0))
    found, whole = waterfall(run), estimate(run)
    assert names(found) == [RULE, PLAIN, "gradient_checkpointing", "gradient_accumulation", "adamw_8bit"]
    last, plain = found.bars[-1], found.bars[1]
    for name in ("peak_reserved_bytes", "peak_allocated_bytes", "host_bytes", "pinned_bytes", "ledger", "phase"):
        assert getattr(last, name) == getattr(whole, name), name
    assert found.bars[0].saved_bytes is plain.saved_bytes is None
    assert sum(bar.saved_bytes for bar in found.bars[2:]) == plain.peak_reserved_bytes - last.peak_reserved_bytes > 0
    assert plain.peak_reserved_bytes == estimate(run.with_strategies([])).peak_reserved_bytes
    assert found.notes == []


def test_what_needs_a_later_one_waits_for_it_and_is_told():
    found = waterfall(subject(Quantization(), EMA(), LoRA(r=4)))
    assert names(found)[2:] == ["ema", "lora", "quantization"]
    assert found.notes[0].startswith("quantization comes with or after ")
    assert "trainable" in found.notes[0]


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


def test_two_that_need_each_other_come_together():
    found = waterfall(subject(Left(), LoRA(r=4), Right()))
    assert [bar.strategies for bar in found.bars[2:]] == [("lora",), (Left().name, Right().name)]


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
    "strategies", [[], [LoRA(r=4), GradientCheckpointing(), MixedPrecision(), GradientAccumulation(micro_batch_size=1)]]
)
def test_two_shallow_traces_tell_the_time_of_all_layers(strategies):
    run = subject(*strategies)
    work = Work()
    trace = run.trace([64] * 4, work=work)
    passes = 3 if strategies else 2
    times = work.scaled(dict.fromkeys(("forward", "backward"), 2 * (4 if strategies else 1) / passes)).seconds(CARD)
    assert isinstance(trace, Trace)
    assert step_seconds(run, [64] * 4, CARD) == pytest.approx(sum(times.values()) / 2, rel=1e-6)


def test_recomputing_costs_time_and_the_first_bars_have_none_before_them():
    found = waterfall(subject(GradientCheckpointing(), length=512, rows=8), card=CARD)
    rule, plain, recomputed = (bar.step_seconds for bar in found.bars)
    assert rule is None
    assert 1.05 < recomputed / plain < 1.5
    assert found.card == "RTX 4090"


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_draws_and_gives_facts(folder):
    pytest.importorskip("matplotlib")
    text = lowmem("waterfall", "tiny.yaml", "--gpu-memory", "12GiB", "--plot", "down.png")
    assert max(map(len, text.splitlines())) <= 100
    assert "+ gradient_checkpointing" in text
    assert "note: quantization comes with or after lora" in " ".join(text.split())
    assert "RTX 3060" in text
    assert "A card with 12 GiB: fits" in text
    assert (folder / "down.png").read_bytes().startswith(PNG)
    found = json.loads(lowmem("waterfall", "tiny.yaml", "--json"))
    whole = json.loads(lowmem("estimate", "tiny.yaml", "--json"))
    keys = {"peak_reserved_bytes", "peak_allocated_bytes", "host_bytes", "pinned_bytes", "ledger"}
    assert all(keys | {"saved_bytes", "step_seconds", "strategies"} <= set(bar) for bar in found["bars"])
    assert {key: found["bars"][-1][key] for key in keys} == {key: whole[key] for key in keys}
    assert found["final"] == whole


def test_an_unknown_card_gets_the_nearest_name(folder):
    assert "did you mean" in refusal("waterfall", "tiny.yaml", "--gpu", "RTX 4091")
