"""What the predictor says a run will peak at on a CPU, beside what the run's allocator hands out: to the byte.

Every configuration of `predictor_cases.py` trains two optimizer steps with real tensors under `torch.profiler`, whose
memory events are what torch's CPU allocator hands out and takes back; the highest sum during the run is the truth. The
prediction is the peak of the same run on the meta device with the profile `cpu`, unrounded. Both go through the same
Trainer, strategies and loop; each configuration has a process of its own.

Not counted on either side: Python, code, and numpy's arrays (token ids). Rows that torch borrows from numpy are copied
into torch's own memory on the real side, where the allocator sees them, as the prediction does.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from predictor_cases import ARCHITECTURES, CASES, Case
from torch.profiler import ProfilerActivity, profile, record_function

from lowmem import Trainer, TrainingConfig
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import model_without_data
from lowmem.memory.meta import Device
from lowmem.memory.predict import record
from lowmem.memory.trace import Storage, Trace
from lowmem.strategies import STRATEGIES
from lowmem.strategy import Strategy

RUN = "the run"
LIMIT, SHARE, NONE_ABOVE = 0.0005, 0.8, 0.01  # at least this share within the limit, none above the last


def config_of(case: Case) -> Any:
    """The configuration of the case's model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(case.architecture, **ARCHITECTURES[case.architecture])
    config._attn_implementation = case.attention
    config.dtype = getattr(torch, case.dtype)
    return config


def strategies_of(case: Case) -> list[Strategy]:
    """New instances of the case's strategies."""
    return [STRATEGIES[name](**settings) for name, settings in case.strategies.items()]


def training_of(case: Case) -> TrainingConfig:
    """The numbers of the case."""
    numbers: dict[str, Any] = {"max_grad_norm": None, "max_length": 512, **case.training}
    return TrainingConfig(batch_size=len(case.lengths), max_steps=2, shuffle=False, **numbers)


def _rows(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": [(7 * i + j) % 3999 + 1 for j in range(length)]} for i, length in enumerate(lengths)]


def _evaluate(trainer: Trainer, lengths: Sequence[int]) -> None:
    """One batch of an evaluation, as `Trainer.evaluate` does it."""
    if lengths:
        batch: list[Any] = [
            {name: torch.ones(length).int().numpy() for name in ("input_ids", "labels")} for length in lengths
        ]
        with trainer.inference():
            trainer.forward_backward([batch], 1.0)


# -- the truth --------------------------------------------------------------------------------------------------------


def measured(case: Case) -> int:
    """Highest number of bytes that torch's allocator had handed out during the run, the model included."""
    from transformers import AutoModelForCausalLM

    real = torch.from_numpy
    with (
        patch.object(torch, "from_numpy", lambda array: real(array).clone()),
        patch.dict(import_bitsandbytes().functional.name2qmap, clear=True),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(case))
        trainer = Trainer(model, _rows(case.lengths), training=training_of(case), strategies=strategies_of(case))
        del model
        gc.collect()
        with record_function(RUN):
            _evaluate(trainer, case.evaluate)
            trainer.train()
    return _highest(profiler.profiler.kineto_results.events())


def _highest(events: Iterable[Any]) -> int:
    events = list(events)
    run = next(event for event in events if event.name() == RUN)
    start, end = run.start_ns(), run.start_ns() + run.duration_ns()
    live = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if start <= event.start_ns() <= end:
            highest = max(highest, live)
    return highest


# -- the prediction ---------------------------------------------------------------------------------------------------


def predicted(case: Case, device: Device = "cpu") -> Trace:
    """The record of the same run without data."""
    model = model_without_data(config_of(case))
    look = partial(_evaluate, lengths=case.evaluate)
    return record(model, training_of(case), strategies_of(case), device, case.lengths, look)


RULES: dict[str, Callable[[Storage], bool]] = {
    "flash attention": lambda s: "flash_attention" in s.op and "for_cpu" not in s.op,
    "memory-efficient attention": lambda s: "efficient_attention" in s.op,
    "byte masks of dropout": lambda s: "native_dropout" in s.op,
    "all tensors at once (foreach)": lambda s: "_foreach_" in s.op,
    "cuBLAS workspaces": lambda s: s.label == "workspaces",
    "4-bit products of a card": lambda s: s.op.startswith("inside bitsandbytes.gemm_4bit"),
    "int8 products of a card": lambda s: "bitsandbytes.int8_scaled_mm" in s.op,
    "managed (paged) memory": lambda s: s.kept_on == "managed",
    "pinned host memory": lambda s: s.kept_on == "pinned",
}
EVERY = "rounding to 512 bytes, segments and pools of the caching allocator"


def unseen_rules(case: Case) -> list[str]:
    """What the same run would meet on a card, and does not meet here: by the storages of its record for a card."""
    card = predicted(case, "cuda").storages
    found = [name for name, met in RULES.items() if any(map(met, card))]
    return [*found, *(["autocast's list of a card"] if "mixed_precision" in case.strategies else [])]


# -- all of them ------------------------------------------------------------------------------------------------------


def outcome(case: Case) -> dict[str, Any]:
    """Predicted and measured bytes of a case, and how long each took."""
    found: dict[str, Any] = {"name": case.name, "case": asdict(case)}
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler's chatter; errors are returned
    try:
        start = time.perf_counter()
        trace = predicted(case)
        peak, index = trace.peak()
        between = time.perf_counter()
        truth = measured(case)
        after = time.perf_counter()
        unseen = unseen_rules(case)
    except Exception as error:
        return {**found, "failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    born = trace.storages[trace.events[index][0]]
    return {
        **found,
        "predicted_bytes": peak,
        "measured_bytes": truth,
        "error": peak / truth - 1,
        "phase": born.phase,
        "operation": born.op,
        "only_on_a_card": unseen,
        "seconds_predicted": between - start,
        "seconds_measured": after - between,
    }


def run(cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """The outcomes, in the order of the cases; each in a process that ends with it."""
    import_bitsandbytes()
    import peft  # noqa: F401  (once, before the processes part)

    found = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(outcome, cases, chunksize=1):
            print(f"{row.get('error', float('nan')):+9.4%}  {row['name']}  {row.get('failed', '')}", flush=True)
            found.append(row)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the bars are about."""
    strategies = [row["case"]["strategies"] for row in rows]
    errors = [abs(row["error"]) for row in rows if "error" in row]
    return {
        "configurations": len(rows),
        "failed": len(rows) - len(errors),
        "architectures": len({row["case"]["architecture"] for row in rows}),
        "with autocast": sum("mixed_precision" in s for s in strategies),
        "with NF4": sum(s.get("quantization", {"format": None}).get("format", "nf4") == "nf4" for s in strategies),
        "packed": sum("packing" in s for s in strategies),
        "three or more strategies": sum(len(s) >= 3 for s in strategies),
        "share within 0.05 %": sum(e <= LIMIT for e in errors) / len(rows),
        "largest error": max(errors),
        "passed": len(errors) == len(rows)
        and sum(e <= LIMIT for e in errors) >= SHARE * len(rows)
        and max(errors) <= NONE_ABOVE,
    }
