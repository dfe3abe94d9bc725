"""What each stage of a pipeline is predicted to hold and send, beside what two processes that train really hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from held import is_held, most_held, rows_of
from test_plan import save_config
from test_predicted_bytes import TRAINED, WITHIN, model, numbers
from two_processes import beside, in_processes, marked

from lowmem import DDP, GradientAccumulation, GradientCheckpointing, LoRA, Packing, PipelineParallel, Strategy, Trainer
from lowmem.config import ModelConfig
from lowmem.memory.depth import StepWork, figures
from lowmem.memory.depth import traced as traced_fully
from lowmem.memory.estimate import estimate
from lowmem.memory.predict import judge, record
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

LENGTHS = (40, 32, 40, 36, 40, 24, 40)  # more micro-batches than a prediction runs under 1F1B
PASSES: dict[str, Callable[[], list[Strategy]]] = {
    "kept": list,
    "checkpointed": lambda: [GradientCheckpointing()],
}
Case = tuple[str, str, str]
CASES: list[Case] = [
    (schedule, trained, passes) for schedule in ("1f1b", "gpipe") for trained in TRAINED for passes in PASSES
]
SLOW = [case for case in CASES if case[0] == "gpipe" and case != ("gpipe", "full", "kept")]
NUMBERS = replace(numbers(), batch_size=len(LENGTHS))


def strategies(case: Case) -> list[Strategy]:
    schedule: Any = case[0]
    return [
        PipelineParallel(schedule=schedule),
        GradientAccumulation(micro_batch_size=1),
        *TRAINED[case[1]](),
        *PASSES[case[2]](),
    ]


def live_bytes(cases: list[Case], number: int = 0) -> dict[Case, int]:
    """The most that lives at once on this rank during two steps, of each case; the try of this number."""
    rows = rows_of(LENGTHS)
    return {
        case: most_held(Trainer(model("cpu"), rows, training=NUMBERS, strategies=strategies(case))) for case in cases
    }


def measured(case: Case, rank: int, number: int = 0) -> int:
    """What a stage holds."""
    return in_processes(live_bytes, beside(case, CASES, SLOW), number)[rank][case]


def predicted(case: Case, rank: int) -> int:
    return record(model("meta"), NUMBERS, strategies(case), "cpu", LENGTHS, ranks=2, rank=rank).peak()[0]


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_each_stage_holds_what_was_predicted(case: Case) -> None:
    for rank in (0, 1):
        assert is_held(predicted(case, rank), partial(measured, case, rank), WITHIN)


def test_the_bound_tells_the_schedules_and_the_stages_apart() -> None:
    alternating, all_at_once = (
        [measured((schedule, "full", "kept"), rank) for rank in (0, 1)] for schedule in ("1f1b", "gpipe")
    )
    for found, other in zip(alternating, all_at_once, strict=True):
        assert abs(found / other - 1) > 3 * WITHIN
    for first, last in (alternating, all_at_once):
        assert abs(first / last - 1) > 2 * WITHIN


# -- without processes ------------------------------------------------------------------------------------------------


def traced(ranks: int, rank: int, *more: Strategy, rows: int = 8, **fields: Any) -> tuple[Trace, float]:
    """Two steps of a rank, and the bytes it sends in one."""
    work = Work()
    step = StepWork(work)
    given = [PipelineParallel(**fields), GradientAccumulation(micro_batch_size=1), *more]
    numbers = replace(NUMBERS, batch_size=rows)
    trace = record(model("meta"), numbers, given, "cuda", (40,) * rows, step.watch, work, ranks=ranks, rank=rank)
    return trace, sum(total.sent_bytes for total in step.step().totals().values())


HIDDEN = 40 * 64 * 4


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_hidden_states_go_forward_and_gradients_back(schedule: str, rows: int) -> None:
    sent = [traced(4, rank, schedule=schedule, rows=rows)[1] for rank in range(4)]
    assert sent == pytest.approx([rows * HIDDEN, 2 * rows * HIDDEN, 2 * rows * HIDDEN, rows * HIDDEN])


def test_ddp_sends_the_gradients_of_a_stage_beside() -> None:
    whole = model("meta")
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in whole.model.layers]
    gradients = whole.lm_head.weight.nbytes + whole.model.norm.weight.nbytes + sum(layers[2:])
    # of four micro-batches each of two pipelines has two; a ring of two sends as much as it adds up
    sent = traced(4, 1, DDP(), rows=4, stages=2)[1]
    assert sent == pytest.approx(2 * HIDDEN + gradients)


def test_micro_batches_that_are_left_out_have_their_buffers() -> None:
    """A stage in between keeps hidden states and gradients received, of every micro-batch, and what 1F1B has begun."""

    def peak(rows: int) -> int:
        return traced(4, 1, rows=rows)[0].peak()[0]

    one_more = 2 * HIDDEN + 2 * 40 * 8  # and its token ids and labels
    assert peak(40) - peak(20) == 20 * one_more


def test_masks_of_packed_rows_are_foreseen() -> None:
    """A row that holds two samples is attended under a mask, whichever micro-batch it is in."""

    numbers = replace(NUMBERS, batch_size=8, max_length=80)
    trace = record(
        model("meta"),
        numbers,
        [PipelineParallel(), GradientAccumulation(micro_batch_size=1), Packing()],
        "cuda",
        (40,) * 8,
        ranks=2,
        rank=1,
    )
    assert any(storage.shape == (1, 1, 80, 80) for storage in trace.storages)


def test_an_estimate_is_of_the_stage_that_needs_most(tmp_path: Path) -> None:
    """With a wide vocabulary that is the last one, by its logits; its figures are those of two shallow traces."""
    config = save_config(tmp_path, vocab_size=50_000)
    source, strategies = ModelConfig(str(config)), [PipelineParallel(stages=2), LoRA(r=4)]
    run = replace(Subject.of_config(model_config(source), source, NUMBERS, strategies), gpus=2)
    found = estimate(run, lengths=LENGTHS, band=False)
    alone = [judge(replace(run, rank=rank).trace(LENGTHS, whole=True), expandable=True) for rank in (0, 1)]
    assert found.rank == 1
    assert found.peak_allocated_bytes == alone[1].peak_allocated_bytes > alone[0].peak_allocated_bytes
    assert estimate(replace(run, gpus=1), band=False).rank is None
    near, whole = figures(run, LENGTHS), traced_fully(replace(run, rank=1), LENGTHS, None)
    assert near.allocated == pytest.approx(whole.allocated, rel=0.005)
    assert near.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-6)


def test_ranks_that_are_looked_at() -> None:
    assert [sorted(PipelineParallel().ranks_apart(n, 48)) for n in (1, 2, 4, 8)] == [[0], [0, 1], [0, 1, 3], [0, 1, 7]]
    assert sorted(PipelineParallel(stages=4).ranks_apart(8, 6)) == [0, 1, 2, 3]  # 1, 2, 1 and 2 layers
    assert sorted(DDP().ranks_apart(8, 48)) == [0]
