"""DDP and FSDP2 on two processes give what one process gives; checkpoints go from one world to another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from two_processes import beside, in_processes, marked, once

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    ChunkedLayers,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
    RetryOnOOM,
    Strategy,
    UserError,
)
from lowmem.sharded import whole
from lowmem.strategies.distributed.data_parallel import share

Make = Callable[[], list[Strategy]]
ENGINES: dict[str, Make] = {"ddp": lambda: [DDP()], "fsdp_2": lambda: [FSDP2()]}
CASES: dict[str, Make] = {
    "plain": list,
    "gradients as they are": lambda: [AdamW(eps=1.0)],  # a wrong scale would reach the weights
    "lora": lambda: [LoRA(r=4)],
    "accumulation": lambda: [GradientAccumulation(steps=3)],
    "checkpointing": lambda: [GradientCheckpointing()],
    "packing": lambda: [Packing()],
    "chunked loss": lambda: [ChunkedCrossEntropy(chunk_size=8)],
    "ema": lambda: [EMA(decay=0.5)],
    # Rounding depends on which rows share a product: with one row each, both sides have the same ones.
    "bfloat16": lambda: [MixedPrecision(), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "float16": lambda: [MixedPrecision(dtype="float16"), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    # The 4-bit kernels round to 16 bits: weights that move far pass on a last digit that is another one.
    "4 bits": lambda: [Quantization(), LoRA(r=4), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "together": lambda: [
        LoRA(r=4),
        GradientAccumulation(micro_batch_size=2),
        GradientCheckpointing(offload="cpu"),
        ChunkedLayers(chunk_size=16),
        ChunkedCrossEntropy(chunk_size=8),
        Packing(),
        EMA(decay=0.5),
    ],
}
RUNS = [(engine, case) for engine in ENGINES for case in CASES]
# each is part of `together`
SLOW = [(engine, case) for engine in ENGINES for case in ("checkpointing", "packing", "chunked loss", "ema")]
BATCH = 5  # and 11 rows: an odd number for two ranks, and at the end of an epoch a batch of one row
LR = {"gradients as they are": 1.0, "bfloat16": 1.0, "float16": 1.0}


def numbers(case: str) -> dict[str, Any]:
    return {
        "rows": make_rows(11, weighted=True),
        "eval_rows": make_rows(5, seed=3),
        "batch_size": BATCH,
        "max_steps": 6,
        "max_grad_norm": 0.5,
        "learning_rate": LR.get(case, 1e-3),
    }


def trained(engine: Make, case: str) -> dict[str, Any]:
    """A run: losses, norms, evaluation, and the weights as they are saved."""
    run = run_training([*CASES[case](), *engine()], **numbers(case))
    found = {
        "losses": run.losses,
        "norms": [s.get("grad_norm", 0.0) for s in run.steps],
        "eval": [run.result["eval_loss"]],
    }
    with run.trainer.inference() as model:
        found["weights"] = {n: whole(p).detach().float().clone().numpy() for n, p in model.named_parameters()}
    held = [p.to_local() if hasattr(p, "to_local") else p for p in run.trainer.run.trainable.values()]
    return {**found, "bytes": sum(p.nbytes for p in held), "notices": run.result["notices"]}


def trained_together(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {run: trained(ENGINES[run[0]], run[1]) for run in runs}


def two(engine: str, case: str) -> list[dict[str, Any]]:
    """What both ranks find; the quick runs share two processes, and the slow ones do."""
    run = (engine, case)
    return [rank[run] for rank in in_processes(trained_together, beside(run, RUNS, SLOW))]


@cache
def one(case: str) -> dict[str, Any]:
    return trained(list, case)


@pytest.mark.parametrize("run", marked(RUNS, SLOW))
def test_two_processes_equal_one(run):
    case, expected = run[1], one(run[1])
    for rank, found in enumerate(two(*run)):
        for key in ("losses", "norms", "eval") if rank == 0 else ("eval",):  # observers are rank 0's
            np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5 if case != "4 bits" else 1e-4)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-5, err_msg=name)


def test_the_weights_moved_far_beyond_the_tolerance():
    start = dict(make_llama().named_parameters())
    for case in ("plain", "gradients as they are", "bfloat16"):
        moved = max(np.abs(w - start[n].detach().numpy()).max() for n, w in one(case)["weights"].items())
        assert moved > 1e-3, case


@pytest.mark.parametrize("case", ["plain", "lora"])
def test_fsdp_cuts_and_ddp_replicates(case):
    everything = one(case)["bytes"]
    for rank in (0, 1):
        assert two("ddp", case)[rank]["bytes"] == everything
        assert two("fsdp_2", case)[rank]["bytes"] == pytest.approx(everything / 2, rel=0.01)


# -- weights that are rounded at random -------------------------------------------------------------------------------


def rounded(engine: Make) -> dict[str, Any]:
    run = run_training([PureBF16(), *engine()], **numbers("plain"))
    weights = {name: whole(p).detach() for name, p in run.trainer.run.trainable.items()}
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    return {
        "losses": run.losses,
        "weights": {n: w.float().numpy() for n, w in weights.items()},
        "next": torch.rand(3).tolist(),
    }


def rounded_together() -> dict[str, Any]:
    return {name: rounded(engine) for name, engine in ENGINES.items()}


def test_all_ranks_round_alike():
    """Else what is meant to be one model becomes several, a last digit at a time; other random numbers stay theirs."""
    alone, (first, second) = rounded(list), in_processes(rounded_together)
    for name in ENGINES:
        for parameter, weight in first[name]["weights"].items():
            np.testing.assert_array_equal(weight, second[name]["weights"][parameter], err_msg=f"{name} {parameter}")
        np.testing.assert_allclose(first[name]["losses"], alone["losses"], rtol=0.01)
    assert first["ddp"]["next"] != second["ddp"]["next"]


# -- rows -------------------------------------------------------------------------------------------------------------


def rows_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [number] * n, "labels": [number] * n} for number, n in enumerate(lengths, 1)]


@pytest.mark.parametrize("sizes", [[1], [3], [2, 2], [1, 1, 1], [4, 4, 4, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_target_is_somebodys_once(sizes, size):
    batches, start = [], 1
    for number in sizes:
        rows = rows_of([5 + start + i for i in range(number)])
        batches.append([{**row, "labels": [start + i] * len(row["labels"])} for i, row in enumerate(rows)])
        start += number
    shares = [share(batches, rank, size) for rank in range(size)]
    assert len({len(mine) for mine in shares}) == 1, "ranks would wait for one another"
    supervised = [int(row["labels"][0]) for mine in shares for batch in mine for row in batch if row["labels"][0] > 0]
    assert sorted(supervised) == list(range(1, start))
    most = max(map(len, batches))
    assert all(len(batch) <= most for mine in shares for batch in mine), "more rows at a time than alone"


# -- checkpoints ------------------------------------------------------------------------------------------------------

WORLDS = {"one": list, **ENGINES}


def saved_and_resumed(folder: str, dropout: float) -> dict[str, Any]:
    """Runs of four steps that save at step 2, and others that go on from there, in this world."""
    found: dict[str, Any] = {}
    size = int(__import__("os").environ.get("WORLD_SIZE", "1"))
    for name in ENGINES if size > 1 else ["one"]:
        strategies = lambda: [LoRA(r=4, lora_dropout=dropout), EMA(decay=0.5), *WORLDS[name]()]  # noqa: E731, B023
        options = {"rows": make_rows(11), "batch_size": 4, "max_steps": 4, "save_steps": 2}
        straight = make_trainer(strategies(), output_dir=f"{folder}/{name}", **options)
        straight.train()
        found[f"{name} straight"] = weights_of(straight)
        again = make_trainer(strategies(), **options)
        again.train(resume_from=f"{folder}/{name}/checkpoint-000002")
        found[f"{name} again"] = weights_of(again)
        found[f"{name} seed"] = torch.initial_seed()
    return found


def resumed(folder: str, origin: str) -> dict[str, Any]:
    """The runs of `saved_and_resumed` that began elsewhere, gone on with in this world."""
    found: dict[str, Any] = {}
    size = int(__import__("os").environ.get("WORLD_SIZE", "1"))
    for name in ENGINES if size > 1 else ["one"]:
        trainer = make_trainer(
            [LoRA(r=4, lora_dropout=0.0), EMA(decay=0.5), *WORLDS[name]()],
            rows=make_rows(11),
            batch_size=4,
            max_steps=4,
        )
        trainer.train(resume_from=f"{folder}/{origin}/checkpoint-000002")
        found[name] = weights_of(trainer), trainer.result["notices"]
    return found


def weights_of(trainer: Any) -> dict[str, Any]:
    return {n: whole(p).detach().clone().numpy() for n, p in trainer.run.trainable.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return once("folder of ddp and fsdp_2", lambda: tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(folder) -> dict[str, Any]:
    """Without dropout; in one process and in two, side by side in one folder."""
    alone = once("ddp and fsdp_2 alone", lambda: saved_and_resumed(str(folder), 0.0))
    return alone | in_processes(saved_and_resumed, str(folder), 0.0)[0]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("origin", ENGINES)
def test_two_processes_go_on_as_one(folder, straight, origin):
    found, notices = resumed(str(folder), origin)["one"]
    close(found, straight["one straight"])
    assert any("2 processes then and 1 now" in text for text in notices)
    assert any(f"{origin} was dropped since the checkpoint; it is exact" in text for text in notices)


def test_what_began_elsewhere_goes_on_in_two_processes(folder, straight):
    for origin in ("one", "ddp"):
        for found, _ in in_processes(resumed, str(folder), origin)[1].values():
            close(found, straight["one straight"])


def test_in_the_same_world_bit_for_bit_with_dropout(tmp_path):
    ranks = in_processes(saved_and_resumed, str(tmp_path), 0.3)
    for found in ranks:
        for name in ENGINES:
            for key, value in found[f"{name} straight"].items():
                np.testing.assert_array_equal(found[f"{name} again"][key], value)
    assert ranks[0]["ddp seed"] != ranks[1]["ddp seed"], "ranks with other rows would drop the same places"


def test_the_result_is_a_plain_adapter(folder, straight):
    from safetensors.torch import load_file

    alone, two = (load_file(folder / name / "model" / "adapter_model.safetensors") for name in ("one", "fsdp_2"))
    assert alone.keys() == two.keys()
    for name in alone:
        torch.testing.assert_close(two[name], alone[name], rtol=0, atol=1e-6)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategies",
    [
        [DDP(), OptimizerInBackward()],
        [DDP(), RetryOnOOM()],
        [FSDP2(), RetryOnOOM()],
        [FSDP2(), AdamW8bit()],
        [DDP(), FSDP2()],
        [FSDP2(), GradientCheckpointing(layers_per_checkpoint=2)],
    ],
    ids=str,
)
def test_what_conflicts_is_declared(strategies):
    with pytest.raises(ConflictError):
        make_trainer(strategies)


def lone_processes() -> str:
    try:
        make_trainer([])
    except UserError as error:
        return str(error)
    return ""


def test_processes_without_work_are_refused():
    for message in in_processes(lone_processes):
        assert "2 processes were started, and no strategy shares the work among them; add ddp" in message


def test_one_process_gets_a_notice_and_trains():
    run = run_training([FSDP2()])
    assert any("fsdp_2: one process, so nothing is shared" in text for text in run.result["notices"])
    assert run.losses == run_training([]).losses


# -- joining ----------------------------------------------------------------------------------------------------------


def joined_by() -> list[bool]:
    """Whether both ranks were connected when this one could go on: with the group, and with its arrangement."""
    import torch.distributed as dist

    from lowmem import world
    from lowmem.world import World

    rank, mesh, group = int(os.environ["RANK"]), world._mesh, dist.init_process_group

    def late(connect: Callable[..., Any], name: str) -> Callable[..., Any]:
        def connected(*args: Any, **kwargs: Any) -> Any:
            found = connect(*args, **kwargs)
            time.sleep(1.5 * rank)
            world._store().set(f"{name} {rank}", "yes")
            return found

        return connected

    def all_are(name: str) -> bool:
        return bool(world._store().check([f"{name} 0", f"{name} 1"]))

    dist.init_process_group, world._mesh = late(group, "group"), late(mesh, "mesh")
    here = World.start(torch.device("cpu"))
    found = [all_are("group")]
    here.claim("data", 2, "ddp")
    assert here.mesh.shape
    found.append(all_are("mesh"))
    here.wait()  # rank 0 keeps what `all_are` reads, and ends with this function
    return found


def test_no_rank_goes_on_before_all_have_joined():
    """It might be refused, and leave, while another is still connecting to it."""
    assert in_processes(joined_by) == [[True, True], [True, True]]
