"""Layers in parts: what one rank of two is predicted to hold and to send, beside what two processes really hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from held import is_held, most_held, rows_of
from test_plan import NUMBERS, save_config
from test_tensor_parallel import make_olmo, make_opt, some_on_four
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from two_processes import in_processes

from lowmem import (
    FSDP2,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Strategy,
    TensorParallel,
    Trainer,
    TrainingConfig,
)
from lowmem.config import ModelConfig
from lowmem.memory.depth import StepWork, figures, traced
from lowmem.memory.estimate import estimate
from lowmem.memory.meta import on_meta
from lowmem.memory.predict import record
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work
from lowmem.world import World

WITHIN = 0.03
LENGTHS = (40, 32, 40, 36)
LAYERS = 2
HIDDEN = 4 * 40 * 64 * 4  # bytes of the hidden states of all rows, padded, in float32
RANK = 4


def lora() -> LoRA:
    return LoRA(r=RANK, target_modules="all-linear")


CASES: dict[str, Callable[[], list[Strategy]]] = {
    "full, accumulated": lambda: [GradientAccumulation(micro_batch_size=1)],
    "full, checkpointed, loss in chunks": lambda: [GradientCheckpointing(), ChunkedCrossEntropy(chunk_size=16)],
    "full, bfloat16": lambda: [MixedPrecision()],
    "lora": lambda: [lora()],
    "lora, all": lambda: [
        LoRA(r=RANK, target_modules="all-linear", lora_dropout=0.1),
        GradientAccumulation(micro_batch_size=2),
        GradientCheckpointing(),
        ChunkedCrossEntropy(chunk_size=16),
    ],
    "olmo": list,
    "opt": list,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {"olmo": make_olmo, "opt": make_opt}
TWO_DIMENSIONS = ["full, bfloat16", "lora, all"]


def model(case: str, device: str) -> Any:
    with torch.device(device):
        if case in OTHERS:
            return OTHERS[case]()
        return make_llama(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=176, vocab_size=501)


def numbers() -> TrainingConfig:
    return TrainingConfig(batch_size=len(LENGTHS), max_length=64, max_steps=2, shuffle=False, max_grad_norm=0.5)


def engine(ranks: int) -> list[Strategy]:
    return [TensorParallel()] if ranks == 2 else [TensorParallel(size=2), FSDP2()]


def live_bytes(cases: list[str], ranks: int, number: int = 0) -> dict[str, int]:
    """The most that lives at once on this rank during two steps, of each case; the try of this number."""
    return {case: most_held(trainer(case, ranks), _of_plain_tensors) for case in cases}


def measured(case: str, number: int) -> int:
    """Of the rank that holds most."""
    return max(found[case] for found in in_processes(live_bytes, list(CASES), 2, number))


def measured_on_four(case: str, number: int) -> int:
    return max(rank["live bytes"][number][case] for rank in in_processes(some_on_four, number=4, seconds=400))


def trainer(case: str, ranks: int) -> Trainer:
    strategies = [*engine(ranks), *CASES[case]()]
    return Trainer(model(case, "cpu"), rows_of(LENGTHS, 127), training=numbers(), strategies=strategies)


def _of_plain_tensors(trace: Trace) -> Trace:
    """A message counts once: torch's wrapper around what is on its way has no memory."""
    assert {s.op for s in trace.storages if "_c10d_functional" in s.op} <= {
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_gather_into_tensor.default",
    }
    return trace


def predicted(case: str, ranks: int) -> int:
    strategies = [*engine(ranks), *CASES[case]()]
    trace = record(model(case, "meta"), numbers(), strategies, "cpu", LENGTHS, ranks=ranks)
    return _of_plain_tensors(trace).peak()[0]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_was_predicted(case: str) -> None:
    assert is_held(predicted(case, 2), partial(measured, case), WITHIN)


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("case", TWO_DIMENSIONS)
def test_so_it_is_in_two_dimensions(case: str) -> None:
    assert is_held(predicted(case, 4), partial(measured_on_four, case), WITHIN)


@pytest.mark.parametrize("case", ["full, accumulated", "lora"])
def test_the_bound_tells_two_ranks_from_one(case: str) -> None:
    alone = record(model(case, "meta"), numbers(), CASES[case](), "cpu", LENGTHS).peak()[0]
    assert abs(alone / predicted(case, 2) - 1) > 3 * WITHIN


def test_weights_and_moments_of_parts_are_all_that_stays() -> None:
    net = model("full", "meta")
    cut = sum(p.nbytes for p in net.model.layers.parameters() if p.dim() > 1)
    whole = sum(p.nbytes for p in net.parameters()) - cut
    trace = record(net, numbers(), engine(2), "cpu", LENGTHS, ranks=2)
    assert sum(size for _, size in trace.events) == pytest.approx(3 * (cut / 2 + whole), abs=1024)


def test_a_plan_of_our_own_shares_heads_in_a_prediction_too() -> None:
    seen: list[Trainer] = []
    record(model("opt", "meta"), numbers(), engine(2), "cpu", LENGTHS, seen.append, ranks=2)
    assert {m.num_heads for m in seen[0].model.modules() if hasattr(m, "num_heads")} == {2}


def test_what_comes_back_from_others_is_seen() -> None:
    with on_meta("cpu", 2):
        mesh = World(size=2, device_type="meta", sizes={"tensor": 2}).mesh["tensor"]
        with Trace("cpu") as trace:
            result = all_reduce(torch.empty(3, device="meta"), "sum", mesh)
            assert trace.place_of(result) == "device"
            assert [s.op for s in trace.storages] == ["aten.empty.memory_format", "_c10d_functional.all_reduce.default"]


# -- what is sent -----------------------------------------------------------------------------------------------------


def four_heads() -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 176, "vocab_size": 501}
    with torch.device("meta"):
        return make_llama(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, **shape)


def sent(strategies: list[Strategy], ranks: int) -> float:
    work = Work()
    step = StepWork(work)
    record(four_heads(), numbers(), strategies, "cuda", LENGTHS, step.watch, work, ranks=ranks)
    return sum(total.sent_bytes for total in step.step().totals().values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_hidden_states_are_sent_twice_forward_and_five_times_backward(ranks: int) -> None:
    ring = 2 * (ranks - 1) / ranks
    norm = ring * 4  # of gradients, for clipping: a number
    assert sent([TensorParallel()], ranks) == pytest.approx(ring * LAYERS * 7 * HIDDEN + norm, abs=1)
    assert sent([TensorParallel(), GradientCheckpointing()], ranks) == pytest.approx(
        ring * LAYERS * 8 * HIDDEN + norm, abs=1
    ), "of what is computed again, the last sum of a layer is not asked for"


def test_lora_sends_its_narrow_hidden_states_too() -> None:
    """And no gradient for the input of the first layer's queries, keys and values, under which nothing is trained."""
    narrow = HIDDEN // 64 * RANK
    expected = (7 * LAYERS - 3) * HIDDEN + 7 * LAYERS * narrow + 4
    assert sent([TensorParallel(), lora()], 2) == pytest.approx(expected, abs=1)


def test_two_dimensions_send_parts_of_parts() -> None:
    """Half of the hidden states, as each pair has half of the rows; weights twice, and gradients once, of halves."""
    net = four_heads()
    linear = sum(p.nbytes for p in net.model.layers.parameters() if p.dim() > 1) // 2
    norms = sum(p.nbytes for p in net.model.layers.parameters() if p.dim() == 1)
    padding = 2 * 4 * 64 * (-501 % 2)
    ends = sum(p.nbytes for n, p in net.named_parameters() if "layers" not in n) + padding
    weights = 2 * (linear + norms) + ends + (linear + norms + ends)
    clipping = 3 * 4
    expected = LAYERS * 7 * HIDDEN / 2 + weights / 2 + clipping
    assert sent([TensorParallel(size=2), FSDP2()], 4) == pytest.approx(expected, abs=1)


# -- whole runs -------------------------------------------------------------------------------------------------------


def run(folder: Path, gpus: int) -> Subject:
    config = ModelConfig(str(save_config(folder, num_key_value_heads=4, dtype=torch.float32)))
    strategies = [TensorParallel(), GradientCheckpointing()]
    return replace(Subject.of_config(model_config(config), config, NUMBERS, strategies), gpus=gpus)


def test_figures_of_two_shallow_traces_are_those_of_the_full_depth(tmp_path: Path) -> None:
    near, deep = figures(run(tmp_path, 2), (128,) * 4), traced(run(tmp_path, 2), (128,) * 4, None)
    assert near.allocated == pytest.approx(deep.allocated, rel=0.005)
    assert near.sent_bytes == pytest.approx(deep.sent_bytes, rel=1e-6)


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_card_loads_its_parts_alone(gpus: int, tmp_path: Path) -> None:
    subject = run(tmp_path, gpus)
    net: Any = subject.make_model(None)
    cut = sum(p.nbytes for p in net.model.layers.parameters() if p.dim() > 1)
    whole = sum(p.nbytes for p in net.parameters()) - cut
    found = estimate(subject, band=False)
    assert found.phases["load"].bytes == pytest.approx(cut / gpus + whole, abs=1024)
    assert found.host_phases["load"]["tensors"] == pytest.approx(cut + whole, rel=0.01)
