"""Stopping and going on: checkpoints, and runs that end as if they had never stopped."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.helpers import SGD, Log, llama, numbers, rows, weights
from peft import PeftModel
from registry import ROWS
from resuming import DATA, Losses, Stopped, assert_equal_runs, interrupted, run, stop_after, with_losses
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    AdamW8bit,
    Adapter,
    ChunkedCrossEntropy,
    ChunkedLayers,
    Compile,
    DeepSpeedZeRO,
    FusedKernels,
    GradientAccumulation,
    GradientCheckpointing,
    GradientClipping,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PipelineParallel,
    PureBF16,
    Quantization,
    RetryOnOOM,
    StreamedWeights,
    TensorParallel,
    TiledMLP,
    Trainer,
    UserError,
    durable,
)
from lowmem import checkpoint as checkpoint_files
from lowmem.checkpoint import checkpoints
from lowmem.durable import MANIFEST, DamagedError, seal

SETS = {
    "adamw": [AdamW()],
    "adamw_unfused": [AdamW(fused=False)],
    "adamw_8bit": [AdamW8bit()],
    "sgd": [SGD()],
    "in_backward": [OptimizerInBackward()],
    "in_backward_8bit": [OptimizerInBackward(), AdamW8bit()],
    "pure_bf16": [PureBF16()],
    "pure_bf16_8bit_in_backward": [PureBF16(), AdamW8bit(), OptimizerInBackward()],
    "float16": [MixedPrecision(dtype="float16")],
    "ema": [EMA(decay=0.9)],
    "ema_bf16": [EMA(decay=0.9), PureBF16()],
    "lora_dropout": [LoRA(r=4, lora_dropout=0.3)],
    "dora": [LoRA(r=4, use_dora=True)],
    "lora_and_a_head": [LoRA(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])],
    "ia3": [Adapter("IA3")],
    "adalora": [Adapter("ADALORA", target_modules=["q_proj"], init_r=4, target_r=2, tinit=1, tfinal=2)],
    "p_tuning": [Adapter("P_TUNING", num_virtual_tokens=4, encoder_hidden_size=16)],
    "quantization": [Quantization(), LoRA(r=4, lora_dropout=0.1)],
    "quantization_int8": [Quantization(format="int8"), LoRA(r=4)],
    "packing": [Packing(), GradientAccumulation(), ChunkedCrossEntropy(chunk_size=8), GradientCheckpointing()],
    "autocast": [MixedPrecision(), GradientClipping(max_norm=0.5)],
    "paged": [AdamW8bit(paged=True)],
    "retry_on_oom": [RetryOnOOM(), GradientAccumulation(steps=2)],
    "compile": [Compile(backend="aot_eager")],
    # in one process; several: tests/distributed
    "ddp": [DDP()], "pipeline": [PipelineParallel()], "tensor": [TensorParallel()], "fsdp": [FSDP2()],
    "deepspeed": [DeepSpeedZeRO()],
    "long": [
        GradientCheckpointing(offload="cpu", layers_per_checkpoint=2), ChunkedLayers(chunk_size=8),
        LoRA(r=4, lora_dropout=0.1), ChunkedCrossEntropy(chunk_size=8),
    ],
    "streamed": [StreamedWeights(), GradientCheckpointing(offload="disk"), TiledMLP(tile_size=8), LoRA(r=4)],
    "kept": [GradientCheckpointing(keep=["attention"]), LoRA(r=4, lora_dropout=0.1), FusedKernels()],
    "budget": [GradientCheckpointing(budget="1MiB"), LoRA(r=4, lora_dropout=0.1)],
    "quickstart": [
        Quantization(), LoRA(r=4, lora_dropout=0.1), GradientCheckpointing(), GradientAccumulation(), MixedPrecision(),
        ChunkedCrossEntropy(), AdamW8bit(), EMA(decay=0.9),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_interrupted_equals_uninterrupted(tmp_path, name):
    strategies = SETS[name]
    straight = run(None, *strategies)
    interrupted(tmp_path / "run", *strategies)
    torch.manual_seed(12345)  # nothing may depend on where the process's own generator stands
    torch.rand(7)
    resumed = run(tmp_path / "run", *strategies, resume=True)
    assert resumed.run.global_step == 6
    assert_equal_runs(straight, resumed)
    assert resumed.result["notices"] == straight.result["notices"]


def test_every_strategy_is_among_them():
    assert {row.key for row in ROWS} <= {strategy.name for members in SETS.values() for strategy in members}


@pytest.mark.parametrize("dropout", ["attention", "none"])
def test_dropout_and_a_tied_model(tmp_path, dropout):
    def model():
        return llama(tie_word_embeddings=True, attention_dropout=0.2 if dropout == "attention" else 0.0)

    straight = run(None, model=model())
    run(tmp_path / "run", stop=3, model=model())
    resumed = run(tmp_path / "run", resume=True, model=model())
    assert_equal_runs(straight, resumed)
    assert resumed.model.lm_head.weight is resumed.model.model.embed_tokens.weight
    stored = load_file(tmp_path / "run" / "checkpoint-000006" / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == 82_240  # tied weights once


def test_evaluation_between_changes_nothing(tmp_path):
    """Evaluating takes no random numbers, moves no weights and does not shift the data."""
    strategies = [LoRA(r=4, lora_dropout=0.3), EMA(decay=0.9)]
    straight = run(None, *strategies)
    run(tmp_path / "run", *strategies, stop=3, eval_data=rows(5, seed=1), eval_steps=1)
    resumed = run(tmp_path / "run", *strategies, resume=True, eval_data=rows(5, seed=1), eval_steps=1)
    assert_equal_runs(straight, resumed)


def test_stopping_at_the_end_of_an_epoch(tmp_path):
    straight = run(None, max_steps=8)
    run(tmp_path / "run", stop=4, save_steps=4, max_steps=8)
    assert_equal_runs(straight, run(tmp_path / "run", save_steps=4, max_steps=8, resume=True))


# -- another recipe ---------------------------------------------------------------------------------------------------

EXACT = [
    [GradientAccumulation()], [GradientCheckpointing()], [ChunkedCrossEntropy(chunk_size=8)], [Packing()],
    [OptimizerInBackward()], [Compile(backend="aot_eager")],
    [GradientAccumulation(steps=2), GradientCheckpointing(every_n_layers=2), Packing()],
]  # fmt: skip


@pytest.mark.parametrize("added", EXACT, ids=lambda added: "+".join(s.name for s in added))
def test_exact_strategies_may_come_with_a_notice(tmp_path, added):
    straight = run(None, dtype=torch.float64)
    interrupted(tmp_path / "run", dtype=torch.float64)
    resumed = run(tmp_path / "run", *added, resume=True, dtype=torch.float64)
    for name, one in weights(straight.model).items():
        assert (one - dict(resumed.model.named_parameters())[name]).abs().max() < 1e-9, name
    for strategy in added:
        assert [t for t in resumed.result["notices"] if t.startswith(f"resume: {strategy.name} was added")]


def test_exact_strategies_may_go_or_change_with_a_notice(tmp_path):
    straight = run(None)
    interrupted(tmp_path / "run", GradientAccumulation(), GradientCheckpointing())
    resumed = run(tmp_path / "run", GradientAccumulation(steps=2), resume=True)
    assert (
        max((a - b).abs().max() for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True))
        < 1e-6
    )
    gone, changed = sorted(resumed.result["notices"], key=lambda text: "changed" in text)
    assert gone.startswith("resume: gradient_checkpointing was dropped since the checkpoint; it is exact")
    assert changed.startswith("resume: gradient_accumulation changed (micro_batch_size 1 -> None, steps None -> 2)")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([AdamW()], [AdamW8bit()], r"adamw_8bit was added"),
        ([AdamW8bit()], [AdamW()], r"adamw_8bit was dropped"),
        ([], [PureBF16()], r"pure_bf16 was added"),
        ([], [MixedPrecision()], r"mixed_precision was added"),
        ([MixedPrecision()], [], r"mixed_precision was dropped"),
        ([MixedPrecision()], [MixedPrecision(dtype="float16")], r"mixed_precision changed \(dtype 'bfloat16' -> 'fl"),
        ([LoRA(r=4)], [LoRA(r=4, lora_alpha=8)], r"lora changed \(lora_alpha 32 -> 8\)"),
        ([Quantization(), LoRA()], [Quantization(format="fp4"), LoRA()], r"quantization changed \(format 'nf4' -> 'f"),
        ([Quantization(), LoRA(r=4)], [LoRA(r=4)], r"quantization was dropped"),
    ],
)  # fmt: skip
def test_approximate_strategies_may_not_change(tmp_path, before, after, message):
    interrupted(tmp_path / "run", *before)
    with pytest.raises(UserError, match=rf"resume: {message}.*restore it, or start anew"):
        run(tmp_path / "run", *after, resume=True)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([EMA(decay=0.9)], [EMA(decay=0.5)], "ema changed (decay 0.9 -> 0.5)"),
        ([], [EMA(decay=0.9)], "ema was added"),
        ([EMA(decay=0.9)], [], "ema was dropped"),
        ([AdamW()], [AdamW(betas=(0.8, 0.99))], "adamw changed (betas [0.9, 0.999] -> [0.8, 0.99])"),
    ],
)
def test_another_rule_holds_from_the_resume_on(tmp_path, before, after, text):
    """Another decay or other betas change the weights, like another rate: the notice must not call that rounding."""
    interrupted(tmp_path / "run", *before)
    resumed = run(tmp_path / "run", *after, resume=True)
    assert resumed.result["notices"] == [f"resume: {text} since the checkpoint; that holds from here on"]


def test_another_bound_on_the_norm_is_told_in_both_words(tmp_path):
    interrupted(tmp_path / "run", max_grad_norm=1.0)
    resumed = run(tmp_path / "run", max_grad_norm=0.5, resume=True)
    assert sorted(resumed.result["notices"]) == [
        "resume: gradient_clipping changed (max_norm 1.0 -> 0.5) since the checkpoint; that holds from here on",
        "resume: training.max_grad_norm was 1.0 and is 0.5 from here on",
    ]


# -- what is in a checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["missing", "renamed", "shape"])
def test_c403_a_wrong_key_in_an_adapter_is_named(tmp_path, key):
    place = interrupted(tmp_path / "run", LoRA(r=4)) / "adapter_model.safetensors"
    stored = load_file(place)
    victim = next(name for name in stored if "layers.1.self_attn.q_proj.lora_B" in name)
    value = stored.pop(victim)
    if key == "renamed":
        stored[victim.replace("q_proj", "queer_proj")] = value
    if key == "shape":
        stored[victim] = value[:, :2].clone()
    save_file(stored, place)
    seal(place.parent)  # the file is whole, its contents are wrong
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", LoRA(r=4), resume=True)
    assert victim in str(caught.value)
    if key == "renamed":
        assert "queer_proj" in str(caught.value)
    if key == "shape":
        assert "(64, 2)" in str(caught.value)


@pytest.mark.parametrize("key", ["missing", "renamed"])
def test_a_wrong_key_in_a_whole_model_is_named(tmp_path, key):
    place = interrupted(tmp_path / "run") / "model.safetensors"
    stored = load_file(place)
    value = stored.pop("model.norm.weight")
    if key == "renamed":
        stored["model.final_norm.weight"] = value
    save_file(stored, place)
    seal(place.parent)  # the file is whole, its contents are wrong
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        run(tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["quickstart", "pure_bf16_8bit_in_backward", "float16", "ema"])
def test_checkpoints_need_no_unpickling(tmp_path, name):
    folder = interrupted(tmp_path / "run", *SETS[name])
    files = {p.name for p in folder.rglob("*") if p.is_file()}
    loose = {n for n in files if Path(n).suffix in (".pt", ".bin", ".pth", ".pkl")}
    assert loose == {"optimizer.pt", "strategies.pt", "rng.pt"}
    for file in loose:
        torch.load(folder / file, weights_only=True)  # refuses everything but tensors and plain values
    json.loads((folder / "trainer.json").read_text())


def test_an_adapter_in_a_checkpoint_is_peft_s(tmp_path):
    folder = interrupted(tmp_path / "run", LoRA(r=4), learning_rate=1e-2)
    loaded = PeftModel.from_pretrained(llama(), folder)
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored
    state = {n.replace(".default", ""): p for n, p in loaded.named_parameters() if "lora_" in n}
    assert state.keys() == stored.keys()
    assert all(torch.equal(p, stored[n]) for n, p in state.items())


def test_a_whole_model_in_the_result_is_transformers(tmp_path):
    trainer = run(tmp_path / "run", max_steps=3)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True))


# -- folders ----------------------------------------------------------------------------------------------------------


def test_without_a_best_the_newest_survive(tmp_path):
    with_losses(tmp_path / "run", 3, 1, 2, 4, 5, save_total_limit=2)
    assert [checkpoint_files.step_of(p) for p in checkpoints(tmp_path / "run")] == [4, 5]


@pytest.mark.parametrize(
    "strategies", [[], [LoRA(r=4)], [EMA(decay=0.5)], [PureBF16(), EMA(decay=0.5)]],
    ids=lambda s: "+".join(x.name for x in s) or "plain",
)  # fmt: skip
def test_the_best_weights_are_the_result(tmp_path, strategies):
    """What is saved at the end is what the best evaluation saw: with EMA, the average of that step."""
    seen = {}

    def at_best(event) -> None:
        if event.kind == "save" and event.metrics["step"] == 2:
            event.trainer.save_model(tmp_path / "expected")

    trainer = Trainer(
        llama(), train_dataset=DATA, eval_dataset=rows(2), observers=[at_best],
        training=numbers(
            max_steps=5, eval_steps=1, save_steps=1, output_dir=str(tmp_path / "run"), load_best_model_at_end=True,
            save_total_limit=1, learning_rate=1e-2,
        ),
        strategies=strategies,
    )  # fmt: skip
    Losses(3, 1, 2, 4, 5).install(trainer).train()
    name = "adapter_model.safetensors" if strategies and strategies[0].name == "lora" else "model.safetensors"
    seen = {kind: load_file(tmp_path / kind / name) for kind in ("expected", "run/model")}
    assert seen["expected"].keys() == seen["run/model"].keys()
    assert all(torch.equal(w, seen["run/model"][n]) for n, w in seen["expected"].items())
    last = load_file(tmp_path / "run" / "checkpoint-000005" / name)
    assert any(not torch.equal(w, seen["run/model"][n]) for n, w in last.items())


def test_the_best_is_one_of_the_checkpoints(tmp_path):
    """The best loss may fall on a step without a checkpoint; then the best of the saved ones counts."""
    trainer = Trainer(
        llama(), train_dataset=DATA, eval_dataset=rows(2),
        training=numbers(max_steps=6, eval_steps=1, save_steps=2, output_dir=str(tmp_path / "run"),
                         load_best_model_at_end=True, save_total_limit=1),
    )  # fmt: skip
    Losses(1, 5, 2, 4, 5, 6).install(trainer).train()
    assert trainer.books.best == (4, 4)
    assert [checkpoint_files.step_of(p) for p in checkpoints(tmp_path / "run")] == [4, 6]
    stored = load_file(tmp_path / "run" / "checkpoint-000004" / "model.safetensors")
    assert all(torch.equal(w, trainer.model.state_dict()[n]) for n, w in stored.items())


def test_the_speed_after_a_resume_counts_new_tokens_only(tmp_path):
    interrupted(tmp_path / "run")
    log = Log()
    run(tmp_path / "run", resume=True, log=log)
    first = next(event.metrics for event in log.events if event.kind == "log")
    tokens = first["tokens_per_second"] * first["seconds"]
    assert tokens < first["tokens"] / 2


def test_the_best_is_remembered_over_a_resume(tmp_path):
    first = Trainer(
        llama(), train_dataset=DATA, eval_dataset=rows(2), observers=[stop_after(3)],
        training=numbers(max_steps=5, eval_steps=1, save_steps=1, output_dir=str(tmp_path / "run"),
                         load_best_model_at_end=True, save_total_limit=1),
    )  # fmt: skip
    with pytest.raises(Stopped):
        Losses(3, 1, 2).install(first).train()
    second = Trainer(
        llama(), train_dataset=DATA, eval_dataset=rows(2),
        training=numbers(max_steps=5, eval_steps=1, save_steps=1, output_dir=str(tmp_path / "run"),
                         load_best_model_at_end=True, save_total_limit=1),
    )  # fmt: skip
    Losses(4, 5).install(second).train(resume_from=True)
    assert second.books.best == (1, 2)
    assert [checkpoint_files.step_of(p) for p in checkpoints(tmp_path / "run")] == [2, 5]


def test_an_interrupted_save_does_not_count(tmp_path):
    straight = run(None)
    whole = interrupted(tmp_path / "run")
    for name in ("checkpoint-000004.partial-99999999", "checkpoint-000005"):  # named as partial; without a manifest
        broken = tmp_path / "run" / name
        shutil.copytree(whole, broken)
        if "partial" not in name:
            (broken / MANIFEST).unlink()
    assert [p.name for p in checkpoints(tmp_path / "run")] == [whole.name]
    assert_equal_runs(straight, run(tmp_path / "run", resume=True))
    found = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert found == ["checkpoint-000003", "checkpoint-000005.aside", "checkpoint-000006"]


def test_a_broken_folder_by_name_is_refused(tmp_path):
    whole = interrupted(tmp_path / "run")
    (whole / "trainer.json").unlink()
    with pytest.raises(DamagedError, match=r"checkpoint-000003 is damaged: trainer\.json is missing"):
        run(tmp_path / "run", resume=whole)
    with pytest.raises(
        UserError, match=r"no checkpoint in .*run is whole: .*checkpoint-000003.*trainer\.json is missing"
    ):
        run(tmp_path / "run", resume=True)


@pytest.mark.parametrize("victim", ["lowmem.checkpoint.save_weights", "lowmem.durable.sync", "torch.save"])
def test_a_save_that_fails_leaves_nothing_that_counts(tmp_path, victim, monkeypatch):
    """A full disk in the middle of the second checkpoint: the first one stays whole, and the run stops."""
    module, name = victim.rsplit(".", 1)
    owner = {"torch": torch, "lowmem.durable": durable, "lowmem.checkpoint": checkpoint_files}[module]
    original, calls = getattr(owner, name), []

    def full(*arguments):
        calls.append(arguments)
        if "checkpoint-000006" in str(arguments):
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(UserError, match=r"checkpoint-000006 could not be written: No space left.*needs \d[\d,]+ bytes"):
        run(tmp_path / "run")
    assert calls
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000003"]
    monkeypatch.undo()
    resumed = run(tmp_path / "run", resume=True)
    assert_equal_runs(run(None), resumed)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000003", "checkpoint-000006"]


def test_resume_true_takes_the_newest_run(tmp_path):
    run(tmp_path / "run", stop=3)
    run(tmp_path / "run", stop=3, seed=7)  # a second run beside the first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run-2"]
    resumed = run(tmp_path / "run", resume=True, seed=7)
    assert resumed.books.folder == tmp_path / "run-2"
    assert resumed.result["output_dir"] == str(tmp_path / "run-2")
    assert [checkpoint_files.step_of(p) for p in checkpoints(tmp_path / "run-2")] == [3, 6]
    assert [checkpoint_files.step_of(p) for p in checkpoints(tmp_path / "run")] == [3]


def test_a_second_run_overwrites_nothing(tmp_path):
    run(tmp_path / "run", max_steps=3)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    second = run(tmp_path / "run", max_steps=3, seed=7)
    assert second.result["output_dir"] == str(tmp_path / "run-2")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    third = run(tmp_path / "run", max_steps=3)
    assert third.result["output_dir"] == str(tmp_path / "run-3")


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(UserError, match="output_dir is not set"):
        run(None, resume=True)
    with pytest.raises(UserError, match="no checkpoint"):
        run(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_tells_what_was_run(tmp_path):
    trainer = run(tmp_path / "run", LoRA(r=4), eval_data=rows(3), max_steps=3)
    folder = tmp_path / "run"
    files = {p.name for p in folder.iterdir()}
    assert {"versions.json", "metrics.jsonl", "result.json", "model", "checkpoint-000003"} <= files
    settings = YAML(typ="safe").load(folder / "recipe.yaml")
    assert settings["training"]["seed"] == 42
    assert settings["strategies"]["lora"]["r"] == 4
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"] == version("torch")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["log", "log", "log", "evaluate", "save"]
    result = json.loads((folder / "result.json").read_text())
    assert result["eval_loss"] == lines[3]["eval_loss"] == trainer.result["eval_loss"]
    assert np.isfinite(result["train_loss"])


def test_other_rows_of_the_same_number_are_noticed(tmp_path):
    def train(data, steps, resume=None):
        training = numbers(max_steps=steps, save_steps=2, output_dir=str(tmp_path / "run"))
        trainer = Trainer(llama(), data, training=training)
        return trainer.train(resume_from=resume)["notices"]

    changed = rows(8)
    changed[3] = {**changed[3], "input_ids": list(reversed(changed[3]["input_ids"]))}
    train(rows(8), 2)
    assert not any("training rows" in notice for notice in train(rows(8), 4, resume=True))
    assert any("the training rows are others" in notice for notice in train(changed, 6, resume=True))
