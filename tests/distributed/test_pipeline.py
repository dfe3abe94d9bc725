"""Stages on two processes, and with DDP on four, give what one process gives; what cannot be is refused."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from torch import nn
from two_processes import beside, in_processes, marked, once

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    ChunkedCrossEntropy,
    ChunkedLayers,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PipelineParallel,
    Quantization,
    RetryOnOOM,
    Strategy,
    StreamedWeights,
    UserError,
)
from lowmem.answers import ExactMatch
from lowmem.sharded import gathered
from lowmem.stage_checks import prove
from lowmem.stages import Stages
from lowmem.strategies.distributed.pipeline import even
from lowmem.strategy import resolve

Make = Callable[[], list[Strategy]]
CASES: dict[str, Make] = {
    "plain": list,
    "gradients as they are": lambda: [AdamW(eps=1.0)],  # a wrong scale would reach the weights
    "lora": lambda: [LoRA(r=4)],
    "accumulation": lambda: [GradientAccumulation(steps=3)],
    "checkpointing": lambda: [GradientCheckpointing()],
    "packing": lambda: [Packing()],
    "chunked loss": lambda: [ChunkedCrossEntropy(chunk_size=8)],
    "4 bits": lambda: [Quantization(), LoRA(r=4), GradientAccumulation(micro_batch_size=1)],
    "bfloat16": lambda: [MixedPrecision(), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "float16": lambda: [MixedPrecision("float16"), GradientAccumulation(micro_batch_size=1), AdamW(eps=1.0)],
    "together": lambda: [
        LoRA(r=4),
        GradientAccumulation(micro_batch_size=2),
        GradientCheckpointing(),
        ChunkedLayers(chunk_size=16),
        ChunkedCrossEntropy(chunk_size=8),
        Packing(),
        EMA(decay=0.5),
    ],
}
SIXTEEN_BITS = ("bfloat16", "float16")
SAME_SHAPE = (*SIXTEEN_BITS, "4 bits")
LR = {"gradients as they are": 1.0, "bfloat16": 0.3, "float16": 0.3}
BATCH = 5  # of 11 rows: stages get uneven micro-batches, and at the end of an epoch a single row


def rows_of_one_length() -> list[dict[str, Any]]:
    """Micro-batches are padded to one shape, which rounds otherwise in few bits: these have it already."""
    rows = []
    for number in range(11):
        ids = [(7 * number + 3 * place * place) % 128 for place in range(20)]
        prompt = 1 + number % 5
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def weights_of(trainer: Any) -> dict[str, Any] | None:
    """All parameters of all stages, on rank 0."""
    with trainer.inference() as model:
        mine = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        weights = gathered(mine, trainer.run.world)
    return weights and {name: weight.numpy() for name, weight in weights.items()}


def trained(engine: Make, case: str) -> dict[str, Any]:
    same = case in SAME_SHAPE
    rows = rows_of_one_length() if same else make_rows(11, weighted=True)
    run = run_training(
        [*CASES[case](), *engine()],
        model=make_llama(num_hidden_layers=3),
        rows=rows,
        eval_rows=rows[:3] if same else make_rows(5, seed=3),
        eval_batch_size=1 if same else 3,
        batch_size=BATCH,
        max_steps=6,
        max_grad_norm=0.5,
        learning_rate=LR.get(case, 1e-3),
    )
    return {
        "losses": run.losses,
        "norms": [step["grad_norm"] for step in run.steps],
        "eval": [run.result["eval_loss"]],
        "weights": weights_of(run.trainer),
        "trainable": list(run.trainer.run.trainable),
        "bytes": sum(p.nbytes for p in run.trainer.model.parameters()),
    }


# -- what two processes do, once for all tests ------------------------------------------------------------------------

ENGINES: dict[str, Make] = {
    "1f1b": lambda: [PipelineParallel()],
    "gpipe": lambda: [PipelineParallel(schedule="gpipe")],
}


def most_at_once(schedule: str) -> int:
    """The most micro-batches whose activations the stage of this rank has held."""
    from torch.distributed.pipelining import PipelineStage

    most, plain = 0, PipelineStage.forward_one_chunk

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        output = plain(self, *args, **kwargs)
        most = max(most, len(self.fwd_cache))
        return output

    PipelineStage.forward_one_chunk = watched
    try:
        run_training([PipelineParallel(schedule=schedule), GradientAccumulation()], batch_size=6, max_steps=2)
    finally:
        PipelineStage.forward_one_chunk = plain
    gc.collect()
    assert not any(isinstance(thing, PipelineStage) for thing in gc.get_objects()), "engines of old steps are kept"
    return most


def refusal(make: Callable[[], Any]) -> str:
    try:
        make()
    except UserError as error:
        return str(error)
    return "it ran"


def only_the_first_layer() -> nn.Module:
    model = make_llama()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0." in name)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**shape, tie_word_embeddings=False))


def refusals(file: str) -> dict[str, str]:
    pipeline = PipelineParallel
    return {
        "too many": refusal(lambda: make_trainer([pipeline()], model=make_llama(num_hidden_layers=1))),
        "does not divide": refusal(lambda: make_trainer([pipeline(stages=3)])),
        "tied": refusal(lambda: make_trainer([pipeline()], model=make_llama(tied=True))),
        "nothing to train": refusal(lambda: make_trainer([pipeline()], model=only_the_first_layer())),
        "learned positions": refusal(lambda: make_trainer([pipeline()], model=gpt2())),
        "head beside lora": refusal(lambda: make_trainer([pipeline(), LoRA(modules_to_save=["lm_head"])])),
        "answers": refusal(lambda: run_training([pipeline()], observers=[ExactMatch(file)])),
        "not finite": refusal(lambda: run_training([pipeline(), LoRA()], model=infinite())),
    }


def infinite() -> nn.Module:
    model: Any = make_llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("inf"))
    return model


def tied_and_frozen() -> dict[str, Any]:
    run = run_training([*pipelines(), LoRA(r=4)], model=make_llama(tied=True), max_steps=5)
    return {"losses": run.losses, "weights": weights_of(run.trainer)}


def pipelines() -> list[Strategy]:
    return [PipelineParallel()] if "RANK" in os.environ else []


KINDS: dict[str, Make] = {"full": list, "lora": lambda: [LoRA(r=4)], "dora": lambda: [LoRA(r=4, use_dora=True)]}


def saved_and_resumed(folder: str, origin: str) -> dict[str, Any]:
    """A run that saves at step 2, and others that go on from there: from the one here, and from `origin`."""
    found: dict[str, Any] = {}
    for name, strategies in KINDS.items():
        options = {"rows": make_rows(11), "batch_size": 4, "max_steps": 4, "save_steps": 2}
        here = f"{folder}/{'two' if pipelines() else 'one'}-{name}"
        straight = make_trainer([*strategies(), EMA(decay=0.5), *pipelines()], output_dir=here, **options)
        straight.train()
        found[f"{name} straight"] = weights_of(straight)
        for start in (here, f"{folder}/{origin}-{name}"):
            again = make_trainer([*strategies(), EMA(decay=0.5), *pipelines()], **options)
            again.train(resume_from=f"{start}/checkpoint-000002")
            found[f"{name} {os.path.basename(start)[:3]}"] = weights_of(again)
    return found


RUNS = [(engine, case) for engine in ENGINES for case in CASES]
# each is part of `together`, or near to another; stages do the same under both schedules, in another order
SLOW = [run for run in RUNS if run[0] == "gpipe" and run[1] not in ("gradients as they are", "together")]
SLOW += [("1f1b", case) for case in ("lora", "checkpointing", "chunked loss", "float16")]


def some_in_two(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {run: trained(ENGINES[run[0]], run[1]) for run in runs}


def runs_in_two(engine: str, case: str) -> list[dict[str, Any]]:
    """What both ranks find; the quick runs share two processes, and the slow ones do."""
    run = (engine, case)
    return [rank[run] for rank in in_processes(some_in_two, beside(run, RUNS, SLOW))]


def others_in_two(folder: str) -> dict[str, Any]:
    return {
        "most": {schedule: most_at_once(schedule) for schedule in ENGINES},
        "refusals": refusals(f"{folder}/questions.jsonl"),
        "tied": tied_and_frozen(),
        "resumed": saved_and_resumed(folder, "one"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return once("folder of the pipelines", lambda: str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """First: the two processes go on from its checkpoints."""
    (Path(folder) / "questions.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    return once("a pipeline alone", lambda: saved_and_resumed(folder, "one"))


@pytest.fixture(scope="module")
def two(folder, alone) -> list[dict[str, Any]]:
    return in_processes(others_in_two, folder)


@cache
def one(case: str) -> dict[str, Any]:
    return trained(list, case)


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("run", marked(RUNS, SLOW))
def test_two_stages_equal_one_process(run):
    expected, ranks = one(run[1]), runs_in_two(*run)
    for key in ("losses", "norms", "eval"):
        np.testing.assert_allclose(ranks[0][key], expected[key], rtol=0, atol=1e-5, err_msg=key)
    assert ranks[1]["eval"] == ranks[0]["eval"]
    same(ranks[0]["weights"], expected["weights"])


def test_the_weights_moved_far_beyond_the_tolerance():
    start = {n: p.detach().numpy() for n, p in make_llama(num_hidden_layers=3).named_parameters()}
    for case in ("plain", "gradients as they are", *SIXTEEN_BITS):
        moved = max(np.abs(w - start[n]).max() for n, w in one(case)["weights"].items())
        assert moved > 1e-3, case


def test_every_rank_has_its_layers_under_their_own_names():
    names = [set(rank["trainable"]) for rank in runs_in_two("1f1b", "plain")]
    assert names[0] | names[1] == set(one("plain")["trainable"])
    assert not names[0] & names[1]
    assert {"model.embed_tokens.weight"} == {n for n in names[0] if "layers" not in n}
    assert {"model.norm.weight", "lm_head.weight"} == {n for n in names[1] if "layers" not in n}
    assert sum(rank["bytes"] for rank in runs_in_two("1f1b", "4 bits")) == one("4 bits")["bytes"]


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left(two):
    assert [rank["most"] for rank in two] == [{"1f1b": 2, "gpipe": 6}, {"1f1b": 1, "gpipe": 6}]


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "too many": ["pipeline_parallel.stages: 2", "1 layers"],
        "does not divide": ["3 processes in a group", "do not divide the 2"],
        "tied": ["model.embed_tokens.weight is trained", "stages 0, 1", "lora"],
        "nothing to train": ["stage 1 (layers 1 to 1) has nothing to train"],
        "learned positions": ["GPT2LMHeadModel does more", "fsdp_2 or ddp"],
        "head beside lora": ["lm_head", "modules_to_save", "leave out"],
        "answers": ["data.exact_match", "whole model", "lowmem evaluate"],
        "not finite": ["step 1: the loss is nan"],
    }.items(),
)
def test_what_cannot_be_is_refused_in_one_line_on_every_rank(two, what, words):
    for rank in two:
        message = rank["refusals"][what]
        assert "\n" not in message
        for word in words:
            assert word in message


def test_a_frozen_head_that_is_tied_to_the_embedding(two):
    expected = tied_and_frozen()
    np.testing.assert_allclose(two[0]["tied"]["losses"], expected["losses"], rtol=0, atol=1e-5)
    same(two[0]["tied"]["weights"], expected["weights"])


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_from_one_world_to_the_other(folder, alone, two, kind):
    expected, found = alone[f"{kind} straight"], two[0]["resumed"]
    for start in ("straight", "two", "one"):
        same(found[f"{kind} {start}"], expected, 2e-6)
    back = make_trainer([*KINDS[kind](), EMA(decay=0.5)], rows=make_rows(11), batch_size=4, max_steps=4)
    back.train(resume_from=f"{folder}/two-{kind}/checkpoint-000002")
    same(weights_of(back), expected, 2e-6)
    assert any("2 processes then and 1 now" in text for text in back.result["notices"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_what_one_process_writes(folder, alone, two, kind):
    from safetensors.torch import load_file

    files = "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    expected, found = (load_file(f"{folder}/{name}-{kind}/model/{files}") for name in ("one", "two"))
    same(found, expected, 2e-6)
    listed = [sorted(os.listdir(f"{folder}/{name}-{kind}/model")) for name in ("one", "two")]
    assert listed[0] == listed[1]


# -- two dimensions ---------------------------------------------------------------------------------------------------

FOUR = ("plain", "gradients as they are", "lora", "accumulation", "float16", "together")
SLOW_ON_FOUR = ("plain", "lora", "accumulation", "float16")


def on_four(cases: list[str]) -> dict[str, Any]:
    return {case: trained(lambda: [PipelineParallel(stages=2), DDP(bucket_cap_mb=0.02)], case) for case in cases}


@pytest.mark.parametrize("case", marked(FOUR, SLOW_ON_FOUR))
def test_two_pipelines_of_two_stages_equal_one_process(case):
    four = [rank[case] for rank in in_processes(on_four, beside(case, FOUR, SLOW_ON_FOUR), number=4)]
    for key in ("losses", "norms", "eval"):
        np.testing.assert_allclose(four[0][key], one(case)[key], rtol=0, atol=1e-5, err_msg=key)
    same(four[0]["weights"], one(case)["weights"])
    assert [rank["trainable"] for rank in four[:2]] == [rank["trainable"] for rank in four[2:]]


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [2], [7], [3, 3], [4, 4, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_target_is_in_one_of_the_even_micro_batches(sizes, stages):
    lengths = iter(range(5, 40))
    batches = [[{"input_ids": [0] * n, "labels": [n] * n} for n in (next(lengths) for _ in range(k))] for k in sizes]
    rows, number = even(batches, stages)
    assert number == (len(sizes) if len(sizes) >= stages else min(sum(sizes), stages))
    assert len(rows) % number == 0
    assert len(rows) < sum(sizes) + number
    supervised = Counter(int(row["labels"][0]) for row in rows if row["labels"][0] > 0)
    assert supervised == Counter(range(5, 5 + sum(sizes)))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "opt", "granite"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_stages_are_the_model_or_are_refused(architecture, number):
    model = small(architecture)
    stages = Stages(model, number)
    before = [name for name, _ in model.named_modules()]
    if number > 1 and architecture in ("opt", "granite"):  # positions are added, or the embedding scaled, in between
        with pytest.raises(UserError, match="does more between its embedding and its head"):
            prove(stages)
    else:
        prove(stages)
    assert [name for name, _ in model.named_modules()] == before
    assert not any(type(module).__module__ == Stages.__module__ for module in model.modules())


def small(architecture: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.1}
    if architecture == "opt":
        shape |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    if architecture == "granite":
        shape |= {"embedding_multiplier": 3.0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape, tie_word_embeddings=False))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FSDP2(), "pipeline_parallel needs parameters to be ordinary tensors on the run's device, and fsdp_2"),
        (OptimizerInBackward(), "pipeline_parallel needs all gradients of the step"),
        (RetryOnOOM(), "retry_on_oom needs a pass to be this process's own affair, and pipeline_parallel"),
        (GradientCheckpointing(offload="cpu"), "gradient_checkpointing needs one process to compute all layers"),
        (GradientCheckpointing(budget="1GiB"), "gradient_checkpointing needs one process to compute all layers"),
        (GradientCheckpointing(layers_per_checkpoint=2), "gradient_checkpointing needs one process to compute all"),
        (StreamedWeights(), "streamed_weights needs one process to compute all layers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_strategies_that_are_refused_by_declaration(other, words):
    partners = [GradientCheckpointing()] if isinstance(other, StreamedWeights) else []
    with pytest.raises(UserError, match=words):
        resolve([PipelineParallel(), other, *partners])


def test_one_process_does_as_without():
    run = run_training([PipelineParallel()])
    assert run.losses == run_training().losses
    assert any("pipeline_parallel: one process, so nothing is shared" in text for text in run.result["notices"])
