"""What each stage of a pipeline is predicted to hold and send, beside what two processes that train really hold."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_predicted_bytes import TRIES, WITHIN, model, numbers
from two_processes import in_processes

from lowmem import GradientAccumulation, GradientCheckpointing, LoRA, PipelineParallel, Strategy, Trainer
from lowmem.memory.depth import StepWork
from lowmem.memory.meta import _random_states as random_states_are_seen
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.predict import record, without_collections
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

LENGTHS = (40, 32, 40, 36, 40, 24, 40)  # more micro-batches than a prediction runs under 1F1B
TRAINED: dict[str, Callable[[], list[Strategy]]] = {
    "full": list,
    "lora": lambda: [LoRA(r=4, target_modules="all-linear")],
}
PASSES: dict[str, Callable[[], list[Strategy]]] = {
    "kept": list,
    "checkpointed": lambda: [GradientCheckpointing()],
}
Case = tuple[str, str, str]
CASES: list[Case] = [
    (schedule, trained, passes) for schedule in ("1f1b", "gpipe") for trained in TRAINED for passes in PASSES
]
NUMBERS = replace(numbers(), batch_size=len(LENGTHS))


def strategies(case: Case) -> list[Strategy]:
    schedule: Any = case[0]
    return [
        PipelineParallel(schedule=schedule),
        GradientAccumulation(micro_batch_size=1),
        *TRAINED[case[1]](),
        *PASSES[case[2]](),
    ]


def live_bytes(cases: list[Case]) -> list[int]:
    """The most that lives at once on this rank during two steps, of each case; every storage counts with its size."""
    rows = [{"input_ids": [(7 * i + 3 * j * j) % 499 for j in range(n)]} for i, n in enumerate(LENGTHS)]
    return [min(_live_bytes(case, rows) for _ in range(TRIES)) for case in cases]


def _live_bytes(case: Case, rows: list[dict[str, list[int]]]) -> int:
    gc.collect()
    trainer = Trainer(model("cpu"), rows, training=NUMBERS, strategies=strategies(case))
    with without_collections(), random_states_are_seen(), Trace("cpu") as trace:
        for _, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                trace.see(tensor)
        trainer.train()
    return trace.peak()[0]


@pytest.fixture(scope="module")
def measured() -> dict[Case, list[int]]:
    """Of each case what both stages hold."""
    return dict(zip(CASES, map(list, zip(*in_processes(live_bytes, CASES), strict=True)), strict=True))


def predicted(case: Case, rank: int) -> int:
    return record(model("meta"), NUMBERS, strategies(case), "cpu", LENGTHS, ranks=2, rank=rank).peak()[0]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_stage_holds_what_was_predicted(case: Case, measured: dict[Case, list[int]]) -> None:
    found = [predicted(case, rank) for rank in (0, 1)]
    print(case, found, measured[case], [f"{a / b - 1:.4f}" for a, b in zip(found, measured[case])])
    for rank in (0, 1):
        assert abs(found[rank] / measured[case][rank] - 1) <= WITHIN
