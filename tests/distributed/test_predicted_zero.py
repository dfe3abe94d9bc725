"""What one rank of two is predicted to hold under DeepSpeedZeRO, beside what two processes that train really hold."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_predicted_bytes import TRIES, WITHIN, model, numbers
from torch import Tensor
from two_processes import in_processes

from lowmem import DeepSpeedZeRO, GradientAccumulation, GradientCheckpointing, LoRA, Strategy, Trainer
from lowmem.memory.meta import _random_states as random_states_are_seen
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.predict import record, without_collections
from lowmem.memory.trace import Trace

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

TRAINED: dict[str, Callable[[], list[Strategy]]] = {
    "full": list,
    "lora": lambda: [LoRA(r=4, target_modules="all-linear")],
}
PASSES: dict[str, Callable[[], list[Strategy]]] = {
    "at once": list,
    "accumulated": lambda: [GradientAccumulation(micro_batch_size=1)],
    "checkpointed": lambda: [GradientCheckpointing()],
}
LENGTHS = (40, 40, 36, 36)  # with one row at a time both ranks have rows of the same lengths
NEAR = {"stage3_max_live_parameters": 90_000, "stage3_max_reuse_distance": 20_000}  # weights are let go of, here, too


def zero(stage: int, how: str) -> DeepSpeedZeRO:
    return DeepSpeedZeRO(
        zero_stage=stage,  # type: ignore[arg-type]
        offload_optimizer="offload" in how,
        offload_param="offload" in how and stage == 3,
        reduce_bucket_size=20_000 if "small" in how else 40_000,
        param_persistence_threshold=100,
    )


def strategies(case: tuple[int, str, str, str]) -> list[Strategy]:
    stage, how, trained, passes = case
    return [zero(stage, how), *TRAINED[trained](), *PASSES[passes]()]


def live_bytes(cases: list[tuple[int, str, str, str]]) -> list[int]:
    """The most that lives at once on this rank during two steps, of each case."""
    rows = [{"input_ids": [(7 * i + 3 * j * j) % 499 for j in range(n)]} for i, n in enumerate(LENGTHS)]
    return [min(_live_bytes(case, rows) for _ in range(TRIES)) for case in cases]


def _live_bytes(case: tuple[int, str, str, str], rows: list[dict[str, list[int]]]) -> int:
    gc.collect()
    with near(case):
        trainer = Trainer(model("cpu"), rows, training=numbers(), strategies=strategies(case))
    with without_collections(), random_states_are_seen(), Trace("cpu") as trace:
        for _, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                trace.see(tensor)
        trainer.train()
    return trace.peak()[0]


def near(case: tuple[int, str, str, str]) -> Any:
    real = DeepSpeedZeRO._config

    def config(self: DeepSpeedZeRO, run: Any) -> dict[str, Any]:
        found = real(self, run)
        if "near" in case[1]:
            found["zero_optimization"] |= NEAR
        return found

    return patch.object(DeepSpeedZeRO, "_config", config)


def predicted(case: tuple[int, str, str, str]) -> int:
    with near(case):
        return record(model("meta"), numbers(), strategies(case), "cpu", LENGTHS, ranks=2).peak()[0]
