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
import os
import multiprocessing
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
from predictor_cases import ARCHITECTURES, CASES, Case
from torch.profiler import ProfilerActivity, profile, record_function

from lowmem import Trainer, TrainingConfig
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import model_without_data
from lowmem.memory.meta import on_meta
from lowmem.memory.predict import record
from lowmem.memory.trace import Trace
from lowmem.strategies import STRATEGIES
from lowmem.strategy import Strategy

RUN = "the run"
LIMIT, FEW, NONE_ABOVE = 0.0005, 0.8, 0.01  # at least this share within the limit, none above


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
        batch = [{"input_ids": torch.ones(n).int().numpy(), "labels": torch.ones(n).int().numpy()} for n in lengths]
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
            trainer.train()
            _evaluate(trainer, case.evaluate)
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


def predicted(case: Case) -> Trace:
    """The record of the same run without data."""
    model = model_without_data(config_of(case))
    return record(model, training_of(case), strategies_of(case), "cpu", case.lengths)


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
        "operations": sorted({storage.op for storage in trace.storages}),
        "seconds_predicted": between - start,
        "seconds_measured": time.perf_counter() - between,
    }


def run(cases: Sequence[Case] = CASES, processes: int = 1) -> list[dict[str, Any]]:
    """The outcomes, in the order of the cases; each in a process that ends with it."""
    import transformers  # noqa: F401  (once, before the processes part)

    import_bitsandbytes()
    import peft  # noqa: F401

    found = []
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for row in pool.imap(outcome, cases, chunksize=1):
            print(f"{row.get('error', float('nan')):+9.4%}  {row.get('failed', '')}  {row['name']}", flush=True)
            found.append(row)
    return found


if __name__ == "__main__":
    import sys

    chosen = [case for case in CASES if all(word in case.name for word in sys.argv[1:])]
    run(chosen)
