"""A run folder opens again: its records, its checkpoints, and its model as training saw it, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cases.helpers import numbers, rows
from conftest import make_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lowmem import (
    EMA,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    PureBF16,
    Quantization,
    Trainer,
    UserError,
    load_run,
)
from lowmem.durable import seal
from lowmem.merge import merge
from lowmem.resume import fresh_folder
from lowmem.run_folder import RunFolder

IDS = torch.arange(24).view(2, 12)


def trained(folder: Path, *strategies, dtype=torch.float32, name: str = "out", **training) -> Trainer:
    """A run of three steps whose base model has a name."""
    make_llama(dtype).save_pretrained(folder / "base")
    settings = {"learning_rate": 1e-2, "output_dir": str(folder / name), "save_steps": 2, **training}
    trainer = Trainer(
        str(folder / "base"), rows(), rows(3, seed=1), training=numbers(**settings), strategies=strategies
    )
    trainer.train()
    return trainer


def seen(trainer: Trainer) -> torch.Tensor:
    """What evaluation saw at the end of training."""
    with trainer.inference() as model:
        return model(IDS).logits


def loaded_logits(*arguments, **options) -> torch.Tensor:
    loaded = load_run(*arguments, **options)
    with loaded.inference() as model:
        return model(IDS).logits


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    trainer = trained(folder, LoRA(r=2), eval_steps=2)
    record = folder / "out/checkpoint-000003/trainer.json"
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["best"][1] in (2, 3)
    record.write_text(json.dumps({**written, "best": [written["best"][0], 2]}), encoding="utf-8")
    seal(record.parent)
    return folder / "out", seen(trainer)


SETS = {
    "full": ([], torch.float32),
    "full, from bfloat16": ([], torch.bfloat16),
    "pure bfloat16": ([PureBF16()], torch.float32),
    "ema": ([EMA(decay=0.5)], torch.float32),
    "lora in pure bfloat16": ([LoRA(r=2), PureBF16()], torch.float32),
    "lora on nf4, autocast": ([LoRA(r=2), Quantization(), MixedPrecision()], torch.bfloat16),
    "lora and a head of its own, autocast": (
        [LoRA(r=2, modules_to_save=["lm_head"]), MixedPrecision(), GradientCheckpointing()],
        torch.bfloat16,
    ),
    "ema of lora": ([LoRA(r=2), EMA(decay=0.5)], torch.float32),
}


@pytest.mark.parametrize("name", SETS)
def test_the_result_and_its_last_checkpoint_are_what_evaluation_saw(tmp_path, name):
    strategies, dtype = SETS[name]
    expected = seen(trained(tmp_path, *strategies, dtype=dtype))
    model, tokenizer = RunFolder.open(tmp_path / "out").load()
    assert tokenizer is None
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(loaded_logits(tmp_path / "out"), expected)
    assert torch.equal(loaded_logits(tmp_path / "out", 3), expected)
    assert not torch.equal(loaded_logits(tmp_path / "out", 2), expected)


def test_a_full_model_keeps_the_dtype_of_every_weight(tmp_path):
    trained(tmp_path, dtype=torch.bfloat16)  # raised to float32, while config.json of the checkpoint says bfloat16
    for checkpoint in (None, 3):
        model, _ = RunFolder.open(tmp_path / "out").load(checkpoint)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    file = tmp_path / "out/model/model.safetensors"
    state = load_file(file)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].bfloat16()
    save_file(state, file, metadata={"format": "pt"})
    model, _ = RunFolder.open(tmp_path / "out").load()
    assert {n for n, p in model.named_parameters() if p.dtype is torch.bfloat16} == {"model.embed_tokens.weight"}
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def test_every_way_to_name_it(lora_run):
    run, expected = lora_run
    for name in (run, run / "model", run / "checkpoint-000003"):
        assert torch.equal(loaded_logits(name), expected), name
    for which in ("3", 3, "best", run / "checkpoint-000003"):
        step = RunFolder.open(run).weights(which)[0]
        assert step.name == ("checkpoint-000003" if which != "best" else "checkpoint-000002"), which
    alone = run.parent / "alone"  # an adapter without its run: peft wrote the base's name into it
    shutil.copytree(run / "model", alone)
    assert torch.equal(loaded_logits(alone), expected)
    assert torch.equal(loaded_logits(alone, base=run.parent / "base"), expected)
    base = loaded_logits(run.parent / "base")
    assert torch.equal(base, make_llama().eval()(IDS).logits)
    assert not torch.equal(base, expected)


def test_records(lora_run, tmp_path):
    run = RunFolder.open(lora_run[0])
    assert run.recipe.strategies[0].name == "lora"
    assert run.result["steps"] == 3
    assert [line["event"] for line in run.metrics()].count("save") == 2
    assert [p.name for p in run.checkpoints()] == ["checkpoint-000002", "checkpoint-000003"]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write('{"event": "log", "text": "안'.encode()[:-1])  # cut inside a character
    assert [line["event"] for line in run.metrics()].count("save") == 2


def test_an_interrupted_run_gives_its_newest_checkpoint_and_says_so(lora_run, tmp_path):
    run = tmp_path / "cut"
    shutil.copytree(lora_run[0], run)
    (run / "result.json").unlink()  # model/ may be half written
    loaded = load_run(run)
    assert Path(loaded.weights).name == "checkpoint-000003"
    assert loaded.notices == [f"{run}: the run has not ended; these are the weights of checkpoint-000003"]
    shutil.rmtree(run / "model")
    with (run / "checkpoint-000003/adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    loaded = load_run(run)
    assert Path(loaded.weights).name == "checkpoint-000002"
    assert "adapter_model.safetensors" in loaded.notices[0]
    with pytest.raises(UserError, match="is damaged"):
        load_run(run, 3)
    shutil.rmtree(run / "checkpoint-000003")
    assert Path(load_run(run).weights).name == "checkpoint-000002"
    shutil.rmtree(run / "checkpoint-000002")
    with pytest.raises(UserError, match=r"no result .*, and no whole checkpoint"):
        load_run(run)


def test_a_run_that_went_on_after_its_end_and_was_interrupted(lora_run, tmp_path):
    """`model/` is of the earlier end; the newest checkpoint is what evaluation should see."""
    run = tmp_path / "gone-on"
    shutil.copytree(lora_run[0], run)
    assert Path(load_run(run).weights).name == "model"
    written = json.loads((run / "result.json").read_text(encoding="utf-8"))
    shutil.copytree(run / "checkpoint-000003", run / "checkpoint-000004")  # a kill -9 leaves the earlier result.json
    for result in (written, {**written, "steps": 4, "stopped": "interrupted by SIGINT"}):
        (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
        loaded = load_run(run)
        assert Path(loaded.weights).name == "checkpoint-000004"
        assert "has not ended" in loaded.notices[0]
        assert loaded.notices[0] in merge(run, tmp_path / "out", probe=False)["notices"]
        shutil.rmtree(tmp_path / "out")
    early = {**written, "steps": 4, "stopped": "no lower eval_loss"}  # early stopping writes a result
    (run / "result.json").write_text(json.dumps(early), encoding="utf-8")
    assert Path(load_run(run).weights).name == "model"


def test_the_adapter_that_training_began_with_may_be_gone(lora_run, tmp_path):
    shutil.copytree(lora_run[0], tmp_path / "first")
    second = trained(tmp_path, LoRA(adapter_name_or_path=str(tmp_path / "first")))
    expected = seen(second)
    shutil.rmtree(tmp_path / "first")
    assert torch.equal(loaded_logits(tmp_path / "out"), expected)


def test_what_is_not_there(lora_run, tmp_path):
    run = lora_run[0]
    with pytest.raises(UserError, match="is no run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(UserError, match=r"no run \(recipe.yaml\), no checkpoint and no model"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="there is no such run, checkpoint or model"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"out/nothing: there is no run folder .*, and no model"):
        load_run("out/nothing")
    with pytest.raises(UserError, match="no checkpoint of step 7; it has 2, 3"):
        load_run(run, "7")
    with pytest.raises(UserError, match="is no checkpoint; name a step"):
        load_run(run, "newest")
    with pytest.raises(UserError, match="is no run folder, so there is no checkpoint 3"):
        load_run(run.parent / "base", 3)
    trained(tmp_path, LoRA(r=2), save_steps=None)
    with pytest.raises(UserError, match="no checkpoint is known as the best"):
        load_run(tmp_path / "out", "best")


def test_a_base_without_a_name_or_elsewhere(tmp_path, lora_run):
    base = make_llama()
    base.save_pretrained(tmp_path / "base")
    training = numbers(output_dir=str(tmp_path / "out"))
    expected = seen(trainer := Trainer(base, rows(), training=training, strategies=[LoRA(r=2)]))
    trainer.train()
    expected = seen(trainer)
    with pytest.raises(UserError, match=r"given in memory \(LlamaForCausalLM\).* give --base PATH"):
        load_run(tmp_path / "out")
    assert torch.equal(loaded_logits(tmp_path / "out", base=tmp_path / "base"), expected)
    moved = tmp_path / "moved"
    shutil.copytree(lora_run[0], moved)
    recipe = (moved / "recipe.yaml").read_text().replace(str(lora_run[0].parent / "base"), str(tmp_path / "gone/base"))
    (moved / "recipe.yaml").write_text(recipe)
    with pytest.raises(UserError, match=r"give --base PATH|no such file"):
        load_run(moved)
    full = Trainer(make_llama(), rows(), training=numbers(output_dir=str(tmp_path / "full")))
    full.train()
    assert torch.equal(loaded_logits(tmp_path / "full"), seen(full))  # the result is whole and needs no base
    with pytest.raises(UserError, match="a base model has no effect"):
        load_run(tmp_path / "full", base=tmp_path / "base")


def test_a_run_does_not_need_the_adapter_it_started_from(lora_run, tmp_path):
    shutil.copytree(lora_run[0] / "model", tmp_path / "start")
    expected = seen(trained(tmp_path, LoRA(adapter_name_or_path=str(tmp_path / "start"))))
    shutil.rmtree(tmp_path / "start")
    assert torch.equal(loaded_logits(tmp_path / "out"), expected)


def test_damaged_or_foreign_files(tmp_path, lora_run):
    run = tmp_path / "out"
    shutil.copytree(lora_run[0], run)
    file = run / "model/adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="the file is damaged"):
        load_run(run)
    file.write_bytes(whole)
    state = load_file(file)
    lost = sorted(state)[0]
    save_file({name: tensor for name, tensor in state.items() if name != lost}, file)
    with pytest.raises(UserError, match="lacks base_model"):
        load_run(run)
    save_file({name: tensor[:1].contiguous() for name, tensor in state.items()}, file)
    with pytest.raises(UserError, match="does not fit its base model"):
        load_run(run)
    file.unlink()
    (run / "model/model.safetensors").write_bytes(whole)
    with pytest.raises(UserError, match=r"has no adapter_model.safetensors"):
        load_run(run)


def test_a_whole_model_with_a_weight_missing_is_refused(tmp_path):
    trained(tmp_path, save_steps=None)
    file = tmp_path / "out/model/model.safetensors"
    with safe_open(file, framework="pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys() if "layers.1.mlp" not in name}  # noqa: SIM118
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights and config.json do not fit"):
        load_run(tmp_path / "out")


def test_overrides_without_effect_are_refused(lora_run):
    run = lora_run[0]
    assert load_run(run, overrides=["training.eval_batch_size=2"]).recipe.training.eval_batch_size == 2
    for text in (
        "training.learning_rate=1",
        "data.train=x",
        "strategies.gradient_checkpointing={}",
        "model.name_or_path=x",
        "strategies.lora=null",
        "strategies.lora.r=4",
    ):
        with pytest.raises(UserError, match="has no effect on a model that has been trained"):
            load_run(run, overrides=[text])
    quantised = load_run(run, overrides=["strategies.quantization={}"])
    assert "Linear4bit" in str(quantised.model)


def test_the_best_checkpoint_names_a_deleted_one(tmp_path, lora_run):
    run = tmp_path / "out"
    shutil.copytree(lora_run[0], run)
    shutil.rmtree(run / "checkpoint-000002")
    with pytest.raises(UserError, match="no checkpoint of step 2; it has 3"):
        load_run(run, "best")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("kept")
    with pytest.raises(UserError, match=r"training\.output_dir: .*out is a file, not a folder"):
        fresh_folder(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "kept"


def test_a_file_with_the_next_number_is_passed_over(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    (tmp_path / "out-2").touch()
    folder, lock = fresh_folder(tmp_path / "out")
    lock.release()
    assert folder.name == "out-3"
