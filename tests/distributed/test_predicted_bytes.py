"""What one rank of two is predicted to hold, beside what two processes that train really hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import make_llama
from held import is_held, most_held, rows_of
from two_processes import in_processes

from lowmem import (
    DDP,
    FSDP2,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    PureBF16,
    Strategy,
    Trainer,
    TrainingConfig,
)
from lowmem.memory.depth import StepWork
from lowmem.memory.predict import record
from lowmem.memory.work import Work

Case = tuple[str, str, str]
WITHIN = 0.03
LENGTHS = (40, 32, 40, 36)
ENGINES: dict[str, Callable[[], list[Strategy]]] = {
    "ddp": lambda: [DDP()],
    "fsdp": lambda: [FSDP2()],
    "fsdp, layers kept": lambda: [FSDP2(reshard_after_forward=False)],
    "fsdp, bfloat16": lambda: [FSDP2(param_dtype="bfloat16")],
}
TRAINED: dict[str, Callable[[], list[Strategy]]] = {
    "full": list,
    "lora": lambda: [LoRA(r=4, target_modules="all-linear")],
}
PASSES: dict[str, Callable[[], list[Strategy]]] = {
    "at once": list,
    "accumulated": lambda: [GradientAccumulation(micro_batch_size=1)],
    "checkpointed": lambda: [GradientCheckpointing()],
}
CASES: list[Case] = [
    (engine, trained, passes) for engine in ("ddp", "fsdp") for trained in TRAINED for passes in PASSES
]
CASES += [(engine, "full", "accumulated") for engine in ("fsdp, layers kept", "fsdp, bfloat16")]


def strategies(case: Case) -> list[Strategy]:
    engine, trained, passes = case
    return [*ENGINES[engine](), *TRAINED[trained](), *PASSES[passes]()]


def numbers() -> TrainingConfig:
    return TrainingConfig(batch_size=len(LENGTHS), max_length=64, max_steps=2, shuffle=False, max_grad_norm=0.5)


def model(device: str) -> Any:
    with torch.device(device):
        return make_llama(num_hidden_layers=4, hidden_size=64, intermediate_size=176, vocab_size=501)


def live_bytes(cases: list[Case], number: int = 0) -> dict[Case, int]:
    """The most that lives at once on this rank during two steps, of each case; the try of this number."""
    rows = rows_of(LENGTHS)
    return {
        case: most_held(Trainer(model("cpu"), rows, training=numbers(), strategies=strategies(case))) for case in cases
    }


def foreseen_inside(cases: list[Case]) -> list[int]:
    """What a run of two processes predicts of itself; its own process group goes on as before."""
    rows = [{"input_ids": [1] * n} for n in LENGTHS]
    found = []
    for case in cases:
        trainer = Trainer(model("cpu"), rows, training=numbers(), strategies=strategies(case))
        found.append(trainer.memory.trace(LENGTHS).peak()[0])
        assert trainer.world.from_all(trainer.world.rank) == [0, 1]
        trainer.train()
    return found


def measured(case: Case, number: int = 0) -> int:
    """Of the rank that holds most."""
    return max(found[case] for found in in_processes(live_bytes, CASES, number))


INSIDE = [("ddp", "full", "at once"), ("fsdp", "lora", "accumulated")]


def test_a_run_of_two_foresees_one_of_two() -> None:
    for case, *seen in zip(INSIDE, *in_processes(foreseen_inside, INSIDE), strict=True):
        assert seen == [predicted(case)] * 2


def predicted(case: Case, ranks: int = 2) -> int:
    return record(model("meta"), numbers(), strategies(case), "cpu", LENGTHS, ranks=ranks).peak()[0]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_rank_holds_what_was_predicted(case: Case) -> None:
    assert is_held(predicted(case), partial(measured, case), WITHIN)


@pytest.mark.parametrize("case", [case for case in CASES if case[2] == "at once"], ids=" ".join)
def test_the_bound_tells_two_ranks_from_one(case: Case) -> None:
    alone = record(model("meta"), numbers(), strategies(case)[1:], "cpu", LENGTHS).peak()[0]
    assert abs(alone / measured(case) - 1) > 3 * WITHIN


def at_rest(strategies: list[Strategy], ranks: int) -> int:
    trace = record(model("meta"), numbers(), strategies, "cpu", LENGTHS, ranks=ranks)
    return sum(size for _, size in trace.events)


def test_a_wide_stand_in_is_given_back_in_parts_too() -> None:
    """Weights and moments, and nothing beside, stay between two updates in bfloat16."""
    assert at_rest([PureBF16(), FSDP2()], 2) == pytest.approx(at_rest([PureBF16()], 1) / 2, rel=0.01)


def sent(strategies: list[Strategy], ranks: int) -> float:
    work = Work()
    step = StepWork(work)
    record(model("meta"), numbers(), strategies, "cuda", LENGTHS, step.watch, work, ranks=ranks)
    return sum(total.sent_bytes for total in step.step().totals().values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_sends_every_gradient_once(ranks: int) -> None:
    trained = sum(p.nbytes for p in model("meta").parameters())
    assert sent([DDP()], ranks) == pytest.approx(2 * (ranks - 1) / ranks * trained, abs=1)
    many = [DDP(), GradientAccumulation(micro_batch_size=1)]
    assert sent(many, ranks) == pytest.approx(2 * (ranks - 1) / ranks * trained, abs=1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_sends_layers_twice_and_gradients_once(ranks: int) -> None:
    net = model("meta")
    # parts are padded to the same number of rows: 501 rows of the embedding and the head are 502, or 504
    padding = 2 * 4 * 64 * (-501 % ranks)
    layers = sum(p.nbytes for p in net.model.layers.parameters())
    ends = sum(p.nbytes for p in net.parameters()) - layers + padding
    whole = 2 * layers + ends + (layers + ends)  # the ends stay together between the passes
    norms = 2 * 4 * (ranks - 1) / ranks  # of gradients, for clipping: a number
    assert sent([FSDP2()], ranks) == pytest.approx((ranks - 1) / ranks * whole + norms, abs=1)
