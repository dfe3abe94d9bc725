"""DeepSpeedZeRO on two processes gives what one process gives, at every stage; checkpoints go from world to world."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from two_processes import in_processes, marked, once

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    Compile,
    ConflictError,
    DeepSpeedZeRO,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PipelineParallel,
    PureBF16,
    Quantization,
    RetryOnOOM,
    Strategy,
    StreamedWeights,
    TensorParallel,
    UserError,
)
from lowmem.run import Run
from lowmem.sharded import local, whole
from lowmem.strategies.distributed.deepspeed import _import_deepspeed
from lowmem.world import World

installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

Make = Callable[[], list[Strategy]]
STAGES = (1, 2, 3)
# An update in proportion to the gradient: a wrong scale of it would reach the weights.
CASES: dict[str, Make] = {
    "plain": lambda: [AdamW(eps=1.0)],
    "moments": list,
    "without clipping": lambda: [AdamW(eps=1.0)],
    "lora": lambda: [LoRA(r=4), AdamW(eps=1.0)],
    "accumulation": lambda: [GradientAccumulation(steps=3), AdamW(eps=1.0)],
    "checkpointing": lambda: [GradientCheckpointing(), AdamW(eps=1.0)],
    "packing": lambda: [Packing(), AdamW(eps=1.0)],
    "chunked loss": lambda: [ChunkedCrossEntropy(chunk_size=8), AdamW(eps=1.0)],
    "bfloat16": lambda: [MixedPrecision(), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "float16 overflows": lambda: [
        MixedPrecision(dtype="float16", initial_scale=2.0**19),
        GradientAccumulation(micro_batch_size=1),
        AdamW(eps=1.0),
    ],
    "offload": lambda: [GradientAccumulation(steps=3), AdamW(eps=1.0)],
    "small buckets": lambda: [GradientAccumulation(steps=3), AdamW(eps=1.0)],
    "small parameters whole": lambda: [AdamW(eps=1.0)],
    "ema": lambda: [EMA(decay=0.5), AdamW(eps=1.0)],
    "4 bits": lambda: [Quantization(), LoRA(r=4), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "together": lambda: [
        LoRA(r=4),
        GradientAccumulation(micro_batch_size=2),
        GradientCheckpointing(),
        ChunkedCrossEntropy(chunk_size=8),
        Packing(),
        AdamW(eps=1.0),
    ],
}
WHOLE_WEIGHTS = ("ema", "4 bits")  # not at stage 3
LR = {"moments": 1e-3, "4 bits": 0.03}
# In 16 bits the last digit of a sum may decide how a weight is rounded. A sum of two rows has one order only, and with
# one row in each micro-batch both sides have the same products; clipping's factor would be another sum.
SUMS_OF_TWO = ("bfloat16", "float16 overflows")


def zero(stage: int, case: str = "plain") -> DeepSpeedZeRO:
    offloads = case == "offload"
    return DeepSpeedZeRO(
        zero_stage=stage,  # type: ignore[arg-type]
        offload_optimizer=offloads,
        offload_param=offloads and stage == 3,
        reduce_bucket_size=1_000 if case == "small buckets" else 100_000,
        param_persistence_threshold=500 if case == "small parameters whole" else 0,
    )


RUNS = [(f"stage {stage}", case) for stage in STAGES for case in CASES if stage < 3 or case not in WHOLE_WEIGHTS]
QUICK = ("plain", "moments", "float16 overflows", "offload", "small parameters whole", "4 bits", "together")
QUICK_AT_1 = ("plain", "without clipping", "bfloat16", "ema", "together")
# stages 1 and 2 differ in when gradients are sent; each other case is part of `together`, or near to one that stays
SLOW = [run for run in RUNS if run[1] not in (QUICK_AT_1 if run[0] == "stage 1" else QUICK)]


def trained(case: str, *engine: Strategy) -> dict[str, Any]:
    """A run: losses, norms, evaluation, the weights as they are saved, and what this rank holds."""
    run = run_training(
        [*CASES[case](), *engine],
        rows=make_rows(11, weighted=True),
        eval_rows=make_rows(5, seed=3),
        batch_size=2 if case in SUMS_OF_TWO else 5,  # odd for two ranks, and an epoch ends with a batch of one row
        max_steps=6,
        max_grad_norm=None if case in ("without clipping", *SUMS_OF_TWO) else 0.5,
        learning_rate=LR.get(case, 1.0),
        weight_decay=0.01,
    )
    trainer = run.trainer
    found: dict[str, Any] = {
        "losses": run.losses,
        "norms": [s.get("grad_norm", 0.0) for s in run.steps],
        "skipped": [bool(s.get("skipped")) for s in run.steps],
        "eval": [run.result["eval_loss"]],
    }
    with trainer.inference() as model:
        found["weights"] = {n: whole(p).detach().float().clone().numpy() for n, p in model.named_parameters()}
    states = [dict(trainer.optimizer.state[p]) for p in trainer.run.trainable.values()]
    found["state bytes"] = sum(t.nbytes for state in states for t in state.values() if t.dim())
    found["weight bytes"] = sum(local(p).nbytes for p in trainer.model.parameters())
    return found


def trained_together(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {run: trained(run[1], zero(int(run[0][-1]), run[1])) for run in runs}


@cache
def attempted(stage: str, slow: bool) -> list[dict[tuple[str, str], Any]] | AssertionError:
    """All runs of a stage on two processes, which are started once; or why they failed."""
    try:
        return in_processes(trained_together, [run for run in RUNS if run[0] == stage and (run in SLOW) == slow])
    except AssertionError as error:
        return error


def two(stage: str, case: str) -> list[dict[str, Any]]:
    """What both ranks find; the quick runs of a stage share two processes, and the slow ones do."""
    found = attempted(stage, (stage, case) in SLOW)
    if isinstance(found, AssertionError):
        raise found
    return [rank[stage, case] for rank in found]


@cache
def one(case: str) -> dict[str, Any]:
    return trained(case)


@installed
@pytest.mark.parametrize("run", marked(RUNS, SLOW))
def test_two_processes_equal_one(run):
    case, expected = run[1], one(run[1])
    for rank, found in enumerate(two(*run)):
        for key in ("losses", "norms", "eval", "skipped") if rank == 0 else ("eval",):  # observers are rank 0's
            np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5 if case != "4 bits" else 1e-4)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-5, err_msg=name)


def test_the_references_put_it_to_the_test():
    start = dict(make_llama().named_parameters())
    for case in ("plain", "without clipping", "bfloat16"):
        moved = max(np.abs(w - start[n].detach().numpy()).max() for n, w in one(case)["weights"].items())
        assert moved > 1e-3, case
    assert min(one("plain")["norms"]) > 0.5, "nothing is clipped"
    assert one("plain")["losses"] != one("without clipping")["losses"]
    skipped = one("float16 overflows")["skipped"]
    assert any(skipped)
    assert not all(skipped)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_rank_holds(stage):
    alone = one("plain")
    for found in two(f"stage {stage}", "plain"):
        assert found["state bytes"] == pytest.approx(alone["state bytes"] / 2, rel=0.01)
        parts = 2 if stage == 3 else 1
        assert found["weight bytes"] == pytest.approx(alone["weight bytes"] / parts, rel=0.01)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def training(*engine: Strategy, adapter: bool = False, **changes: Any) -> Any:
    strategies: list[Strategy] = [LoRA(r=4, lora_dropout=0.0)] if adapter else []
    options = {"rows": make_rows(11), "batch_size": 4, "max_steps": 4, "save_steps": 2, "weight_decay": 0.1}
    return make_trainer([*strategies, *engine], **{**options, **changes})


def weights_of(trainer: Any) -> dict[str, Any]:
    return {n: whole(p).detach().clone().numpy() for n, p in trainer.run.trainable.items()}


def from_world_to_world(folder: str) -> dict[str, Any]:
    """Of each stage: a run that saves, one that goes on from there, and one that goes on from one process."""
    found: dict[str, Any] = {}
    for name, stage, case, adapter in RESUMED:
        straight = training(zero(stage, case), adapter=adapter, output_dir=f"{folder}/{name}")
        straight.train()
        found[f"{name} straight"] = weights_of(straight)
        for origin in (name, "one-adapter" if adapter else "one"):
            again = training(zero(stage, case), adapter=adapter)
            again.train(resume_from=f"{folder}/{origin}/checkpoint-000002")
            found[f"{name} from {origin}"] = weights_of(again)
    return found


RESUMED = [
    ("stage-1", 1, "plain", False),
    ("stage-2", 2, "plain", False),
    ("stage-2-offload", 2, "offload", False),
    ("stage-3", 3, "plain", False),
    ("stage-3-offload", 3, "offload", False),
    ("stage-3-adapter", 3, "small parameters whole", True),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder with the runs of both worlds, and the weights they ended with."""
    return once("worlds of DeepSpeed", lambda: _worlds(tmp_path_factory.mktemp("runs")))


def _worlds(folder: Path) -> tuple[Path, dict[str, Any]]:
    alone = {}
    for name in ("one", "one-adapter"):
        trainer = training(adapter=name != "one", output_dir=str(folder / name))
        trainer.train()
        alone[name] = weights_of(trainer)
    return folder, alone | in_processes(from_world_to_world, str(folder))[1]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in found)


@installed
@pytest.mark.parametrize(("name", "stage", "case", "adapter"), RESUMED, ids=[r[0] for r in RESUMED])
def test_runs_go_on_in_another_world(worlds, name, stage, case, adapter):
    folder, found = worlds
    origin = "one-adapter" if adapter else "one"
    expected = found[origin]
    assert differences(found[f"{name} straight"], expected) < 2e-6
    assert differences(found[f"{name} from {origin}"], expected) < 2e-6
    assert differences(found[f"{name} from {name}"], found[f"{name} straight"]) == 0, "the same world: bit for bit"
    alone = training(adapter=adapter)
    alone.train(resume_from=str(folder / name / "checkpoint-000002"))
    assert differences(weights_of(alone), expected) < 2e-6
    assert any("deepspeed_zero was dropped since the checkpoint; it is exact" in n for n in alone.result["notices"])


@installed
def test_the_result_is_whole(worlds):
    from safetensors.torch import load_file

    folder, _ = worlds
    for name, alone, file in (
        ("stage-3", "one", "model.safetensors"),
        ("stage-3-adapter", "one-adapter", "adapter_model.safetensors"),
    ):
        found, expected = (load_file(folder / run / "model" / file) for run in (name, alone))
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-6)


def uneven_counts(folder: str) -> str:
    trainer = training(zero(2))
    try:
        trainer.train(resume_from=f"{folder}/checkpoint-000002")
    except UserError as error:
        return str(error)
    return ""


@installed
def test_parameters_that_were_updated_unequally_often_are_refused(tmp_path):
    from lowmem.durable import MANIFEST, seal

    trainer = training(output_dir=str(tmp_path / "run"), max_steps=2)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-000002"
    states = torch.load(folder / "optimizer.pt", weights_only=True)
    next(iter(states.values()))["step"] += 1
    torch.save(states, folder / "optimizer.pt")
    (folder / MANIFEST).unlink()
    seal(folder)
    for message in in_processes(uneven_counts, str(tmp_path / "run")):
        assert "has one count for all of them" in message


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ([DeepSpeedZeRO(), DDP()], "slot 'data_parallel'"),
        ([DeepSpeedZeRO(), FSDP2()], "slot 'data_parallel'"),
        ([DeepSpeedZeRO(), PureBF16()], "trained to be float32"),
        ([DeepSpeedZeRO(), AdamW8bit()], "ordinary tensors"),
        ([DeepSpeedZeRO(), OptimizerInBackward()], "all gradients of the step"),
        ([DeepSpeedZeRO(), RetryOnOOM()], "this process's own affair"),
        ([DeepSpeedZeRO(), StreamedWeights(), LoRA(), GradientCheckpointing()], "ordinary tensors"),
        ([DeepSpeedZeRO(), TensorParallel()], "compute all of a layer"),
        ([DeepSpeedZeRO(), PipelineParallel()], "ordinary tensors"),
        ([DeepSpeedZeRO(zero_stage=3), EMA()], "a weight to be whole"),
        ([DeepSpeedZeRO(zero_stage=3), Quantization(), LoRA()], "matrices of plain numbers"),
        ([DeepSpeedZeRO(zero_stage=3), Compile()], "forward to do nothing but compute"),
        ([DeepSpeedZeRO(zero_stage=3), GradientCheckpointing(layers_per_checkpoint=2)], "called by itself"),
    ],
    ids=str,
)
def test_what_conflicts_is_declared(strategies, words):
    with pytest.raises(ConflictError) as caught:
        make_trainer(strategies)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_stage": 4}, "zero_stage: 1, 2 or 3"),
        ({"zero_stage": 2, "offload_param": True}, "set zero_stage: 3"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size"),
        ({"param_persistence_threshold": -1}, "param_persistence_threshold"),
    ],
)
def test_settings_that_cannot_be_meant(settings, words):
    with pytest.raises(UserError) as caught:
        DeepSpeedZeRO(**settings)
    assert words in str(caught.value)


def test_one_process_gets_a_notice_and_trains():
    run = run_training([DeepSpeedZeRO(zero_stage=3)])
    assert any("deepspeed_zero: one process, so nothing is shared" in text for text in run.result["notices"])
    assert run.losses == run_training([]).losses


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    run = Run(None, torch.device("cpu"), frozenset(), World())  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        _import_deepspeed(run)
    assert "pip install 'lowmem[deepspeed]'" in str(caught.value)
