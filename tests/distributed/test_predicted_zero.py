"""What one rank of two is predicted to hold under DeepSpeedZeRO, and with parts on the host, beside what two hold."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from conftest import make_rows, run_training
from held import is_held, most_held, rows_of
from test_predicted_bytes import PASSES as PLAIN_PASSES
from test_predicted_bytes import TRAINED, model, numbers
from two_processes import in_processes

from lowmem import (
    FSDP2,
    AdamW,
    ChunkedCrossEntropy,
    DeepSpeedZeRO,
    GradientCheckpointing,
    MixedPrecision,
    Strategy,
    Trainer,
)
from lowmem.memory.depth import StepWork
from lowmem.memory.predict import record
from lowmem.memory.work import Work

installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

Case = tuple[str, str, str]
WITHIN = 0.005  # a message fetched ahead is 1.6 %
LENGTHS = (40, 40, 36, 36)  # with one row at a time both ranks have rows of the same lengths
PASSES: dict[str, Callable[[], list[Strategy]]] = {
    **PLAIN_PASSES,
    "chunked loss": lambda: [GradientCheckpointing(), ChunkedCrossEntropy(chunk_size=16)],  # reads the head's weight
}
# By default, more weights than the model here has are kept for their next use.
LET_GO = {"stage3_max_live_parameters": 90_000, "stage3_max_reuse_distance": 20_000}
ZERO: list[Case] = [
    ("stage 1", "full", "accumulated"),
    ("stage 1, offload", "lora", "at once"),
    ("stage 2", "full", "checkpointed"),
    ("stage 2, offload", "full", "accumulated"),
    ("stage 3", "full", "chunked loss"),
    ("stage 3, let go", "lora", "checkpointed"),
    ("stage 3, let go, offload", "full", "accumulated"),
]
FSDP: list[Case] = [("fsdp, offload", "full", "accumulated"), ("fsdp, offload", "lora", "checkpointed")]
CASES = [pytest.param(case, marks=installed, id=" ".join(case)) for case in ZERO]
CASES += [pytest.param(case, id=" ".join(case)) for case in FSDP]


def engine(words: str) -> Strategy:
    if words.startswith("fsdp"):
        return FSDP2(offload=True)
    stage = int(words.split(",")[0][-1])
    return DeepSpeedZeRO(
        zero_stage=stage,  # type: ignore[arg-type]
        offload_optimizer="offload" in words,
        offload_param="offload" in words and stage == 3,
        reduce_bucket_size=20_000,
        param_persistence_threshold=100,
    )


def strategies(case: Case) -> list[Strategy]:
    words, trained, passes = case
    return [engine(words), *TRAINED[trained](), *PASSES[passes]()]


def letting_go(case: Case) -> AbstractContextManager[Any]:
    """Inside, DeepSpeed and its prediction are told to keep less."""
    real = DeepSpeedZeRO._config

    def config(self: DeepSpeedZeRO, run: Any) -> dict[str, Any]:
        found = real(self, run)
        if "let go" in case[0]:
            found["zero_optimization"] |= LET_GO
        return found

    return patch.object(DeepSpeedZeRO, "_config", config)


def live_bytes(cases: list[Case], number: int = 0) -> dict[Case, int]:
    """The most that lives at once on this rank during two steps, of each case; the try of this number."""
    return {case: most_held(trainer(case)) for case in cases}


def trainer(case: Case) -> Trainer:
    with letting_go(case):
        return Trainer(model("cpu"), rows_of(LENGTHS), training=numbers(), strategies=strategies(case))


def losses(engine: list[Strategy]) -> list[float]:
    run = run_training([AdamW(eps=1.0), *engine], rows=make_rows(11), batch_size=4, max_steps=4, learning_rate=1.0)
    return run.losses


def measured(case: Case, number: int) -> int:
    """Of the rank that holds most."""
    return max(found[case] for found in in_processes(live_bytes, FSDP if case in FSDP else ZERO, number))


def predicted(case: Case) -> int:
    with letting_go(case):
        return record(model("meta"), numbers(), strategies(case), "cpu", LENGTHS, ranks=2).peak()[0]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_was_predicted(case: Case) -> None:
    assert is_held(predicted(case), partial(measured, case), WITHIN)


def test_parts_on_the_host_are_trained_as_whole_weights_are() -> None:
    alone = losses([])
    for shared in in_processes(losses, [FSDP2(offload=True)]):
        assert shared == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("case", ZERO, ids=" ".join)
def test_a_prediction_needs_no_deepspeed(case: Case) -> None:
    with patch.dict(sys.modules, {"deepspeed": None}):
        assert predicted(case) > 0


@pytest.mark.parametrize("words", ["stage 2", "stage 3"])
def test_on_a_card_offloaded_states_are_the_hosts(words: str) -> None:
    def at_rest(words: str) -> tuple[int, int, int]:
        case = (words, "full", "accumulated")
        trace = record(model("meta"), numbers(), [*strategies(case), MixedPrecision()], "cuda", LENGTHS, ranks=2)
        live = dict.fromkeys(("host", "pinned"), 0)
        for number, size in trace.host_events:
            live[trace.storages[number].kept_on] += size
        cublas = sum(s.size for s in trace.storages if s.label == "workspaces")
        return sum(size for _, size in trace.events) - cublas, live["host"], live["pinned"]

    weights = sum(p.nbytes for p in model("meta").parameters())
    embedding = 501 * 64 * 4  # the largest weight: a buffer for it stays on the card at stage 2
    card, host, pinned = at_rest(f"{words}, offload")
    assert card == pytest.approx(weights + embedding if words == "stage 2" else 4 * 20_000, rel=0.05)
    assert host == pytest.approx(weights, rel=0.01)  # two moments of a half
    assert pinned >= weights  # the copies, and their gradients
    card_alone, host_alone, _ = at_rest(words)
    assert card_alone > card + weights
    assert host_alone == 0


def sent(words: str, passes: str, ranks: int) -> float:
    work = Work()
    step = StepWork(work)
    case = (words, "full", passes)
    record(model("meta"), numbers(), strategies(case), "cuda", LENGTHS, step.watch, work, ranks=ranks)
    return sum(total.sent_bytes for total in step.step().totals().values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_sent_per_step_at_stage_1_and_per_micro_batch_later(ranks: int) -> None:
    weights = sum(p.nbytes for p in model("meta").parameters())
    share, norm, padding = (ranks - 1) / ranks, 8, 4 * 4 * 16
    micro_batches = len(LENGTHS) // ranks
    for words, times in (("stage 1", 1), ("stage 2", micro_batches)):
        found = sent(words, "accumulated", ranks)
        assert found == pytest.approx(share * (2 * times + 1) * weights, abs=norm + padding)
    # all weights are kept to the end of the step; parts of 38 weights are padded
    assert sent("stage 3", "at once", ranks) == pytest.approx(share * 2 * weights, abs=norm + 2 * 38 * 4 * ranks)
