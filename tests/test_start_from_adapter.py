"""A run that goes on with an adapter that is there already (case C-402), and adapters in places where none belongs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cases.helpers import SGD, llama, numbers, rows, train, weights
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from lowmem import (
    EMA,
    GradientCheckpointing,
    LoRA,
    ModelConfig,
    OptimizerInBackward,
    PureBF16,
    Quantization,
    Trainer,
    UserError,
)
from lowmem.recipe import load_recipe

DATA = rows(14, high=16)


def adapter(folder: Path, *, seed: int = 3, **settings) -> Path:
    """An adapter of the model T in peft's format, made by peft alone, whose every tensor is random."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(llama(), LoraConfig(**settings))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


def start(place: Path, *partners, model=None, **changes) -> Trainer:
    return Trainer(
        llama() if model is None else model, DATA, training=numbers(**changes),
        strategies=[LoRA(adapter_name_or_path=str(place)), *partners],
    )  # fmt: skip


VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "head-in-full": {"modules_to_save": ["lm_head"]},
    "ranks-of-its-own": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}},
}


def test_c402_an_adapter_is_trained_further(tmp_path):
    """1,024 trainable parameters, which begin as the adapter and change."""
    place = adapter(tmp_path / "first")
    trainer = start(place, output_dir=str(tmp_path / "run"))
    stored = load_file(place / "adapter_model.safetensors")
    before = weights(trainer.model)
    assert sum(p.numel() for p in trainer.run.trainable.values()) == 1024
    assert {n.replace(".default", "") for n in trainer.run.trainable} == set(stored)
    assert all(torch.equal(before[n], stored[n.replace(".default", "")]) for n in trainer.run.trainable)
    trainer.train()
    now = weights(trainer.model)
    assert all(not torch.equal(before[n], now[n]) for n in trainer.run.trainable)
    assert all(torch.equal(before[n], w) for n, w in now.items() if n not in trainer.run.trainable)
    result = PeftModel.from_pretrained(llama(), tmp_path / "run" / "model")
    assert torch.equal(logits(result), logits(trainer.model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_c402_it_begins_as_what_peft_loads(tmp_path, variant):
    place = adapter(tmp_path / "first", **VARIANTS[variant])
    expected = PeftModel.from_pretrained(llama(), place, is_trainable=True)
    trainer = start(place, learning_rate=0.1)
    assert torch.equal(logits(trainer.model), logits(expected))
    theirs = {n: p.requires_grad for n, p in expected.named_parameters()}
    assert {n: p.requires_grad for n, p in trainer.model.named_parameters()} == theirs
    before = weights(trainer.model)
    trainer.train()
    assert not [n for n in trainer.run.trainable if torch.equal(before[n], trainer.run.trainable[n])]


def test_c402_two_runs_in_a_row_are_one_long_one(tmp_path):
    """Plain gradient descent has no state: 3 steps, and 3 more from the adapter, are 6 steps. Run folders will do."""
    same = {"lr_scheduler_type": "constant", "learning_rate": 0.5, "shuffle": False, "batch_size": 2}
    data = rows(12, high=16)
    whole = train(llama(), data, LoRA(r=4), SGD(), max_steps=6, **same)
    train(llama(), data[:6], LoRA(r=4), SGD(), max_steps=3, output_dir=str(tmp_path / "run"), **same)
    second = train(llama(), data[6:], LoRA(adapter_name_or_path=str(tmp_path / "run")), SGD(), max_steps=3, **same)
    assert all(torch.equal(w, weights(second.model)[n]) for n, w in weights(whole.model).items())


@pytest.mark.parametrize("kind", ["run", "checkpoint", "model"])
def test_a_run_a_checkpoint_or_its_result_is_a_start(tmp_path, kind):
    first = train(llama(), DATA, LoRA(r=4, use_dora=True), save_steps=3, output_dir=str(tmp_path / "run"))
    place = {"run": ".", "checkpoint": "checkpoint-000003", "model": "model"}[kind]
    trainer = start(tmp_path / "run" / place, GradientCheckpointing())
    assert all(torch.equal(p, first.run.trainable[n]) for n, p in trainer.run.trainable.items())
    trainer.train()


@pytest.mark.parametrize(
    "partners", [[Quantization()], [PureBF16()], [OptimizerInBackward()], [EMA(decay=0.5)]], ids=lambda p: p[0].name
)
def test_it_goes_with_other_strategies(tmp_path, partners):
    trainer = start(adapter(tmp_path / "first"), *partners, learning_rate=0.1)
    before = weights(trainer.model)
    assert sum(p.numel() for p in trainer.run.trainable.values()) == 1024
    trainer.train()
    assert any(not torch.equal(before[n], p) for n, p in trainer.run.trainable.items())


def test_settings_are_those_of_the_adapter(tmp_path):
    place = adapter(tmp_path / "first", use_dora=True, lora_dropout=0.25, modules_to_save=["lm_head"])
    trainer = start(place, output_dir=str(tmp_path / "run"), save_steps=3)
    told = {
        "r": 4, "lora_alpha": 8, "lora_dropout": 0.25, "target_modules": ["q_proj"], "use_rslora": False,
        "use_dora": True, "modules_to_save": ["lm_head"], "adapter_name_or_path": str(place),
    }  # fmt: skip
    assert trainer.given[0].settings() == told
    trainer.train()
    assert YAML(typ="safe").load(tmp_path / "run" / "recipe.yaml")["strategies"]["lora"] == told
    again = start(place, output_dir=str(tmp_path / "run"), save_steps=3, max_steps=6)
    again.train(resume_from=True)  # the checkpoint's weights, not the adapter's
    assert again.run.global_step == 6
    assert not [n for n in again.result["notices"] if "lora" in n]
    LoRA(**told)  # what was written can be read


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 16}, "lora.r: 16 is given, and the adapter .* has 4"),  # 16 is the default, but it was said
        ({"lora_alpha": 16}, "lora.lora_alpha: 16 is given, and the adapter .* has 8"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"lora.target_modules: .* has \['q_proj'\]"),
        ({"target_modules": "all-linear"}, r"lora.target_modules: all-linear is given, .* has \['q_proj'\]"),
        ({"use_dora": True}, "lora.use_dora: True is given, and the adapter .* has False"),
        ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save: .* has None"),
        ({"lora_dropout": 0.1}, "lora.lora_dropout: 0.1 is given"),
    ],
)
def test_a_setting_that_is_not_the_adapter_s_is_refused(tmp_path, given, words):
    place = adapter(tmp_path / "first")
    with pytest.raises(UserError, match=words) as caught:
        Trainer(llama(), DATA, training=numbers(), strategies=[LoRA(adapter_name_or_path=str(place), **given)])
    assert "leave it out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_setting_may_be_given(tmp_path):
    place = adapter(tmp_path / "first", target_modules=["v_proj", "q_proj"])
    same = LoRA(4, 8.0, target_modules=["q_proj", "v_proj"], use_dora=False, adapter_name_or_path=str(place))
    Trainer(llama(), DATA, training=numbers(), strategies=[same])
    every = adapter(tmp_path / "every", target_modules="all-linear")
    wanted = LoRA(target_modules="all-linear", adapter_name_or_path=str(every))
    Trainer(llama(), DATA, training=numbers(), strategies=[wanted])


def test_another_base_is_refused_where_shapes_tell(tmp_path):
    place = adapter(tmp_path / "first")
    with pytest.raises(UserError, match=r"lora.adapter_name_or_path: .*q_proj.*shape \(4, 64\).*wants \(4, 32\)"):
        start(place, model=llama(hidden_size=32))
    with pytest.raises(UserError, match=r"lora.adapter_name_or_path: .*missing .*layers\.2"):
        start(place, model=llama(num_hidden_layers=3))
    with pytest.raises(UserError, match=r"lora.adapter_name_or_path: .*unexpected .*layers\.1"):
        start(place, model=llama(num_hidden_layers=1))


def test_another_name_of_the_base_is_told(tmp_path):
    place = adapter(tmp_path / "first")
    change(place, base_model_name_or_path="someone/another-model")
    llama().save_pretrained(tmp_path / "base")
    trainer = start(place, model=str(tmp_path / "base"))
    assert [n for n in trainer.run.all_notices if "someone/another-model" in n and str(tmp_path / "base") in n]
    change(place, base_model_name_or_path=str(tmp_path / "base"))
    assert not start(place, model=str(tmp_path / "base")).run.all_notices


def change(place: Path, **values) -> None:
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_places_where_there_is_no_adapter(tmp_path):
    def refused(place: Path, words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            start(place)
        assert str(caught.value).startswith("lora.adapter_name_or_path: ")
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "nowhere is no adapter: there is no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "there is no adapter_config.json in it")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "recipe.yaml").write_text("model: {name_or_path: x}")
    refused(tmp_path / "unfinished", "the run has no result yet; name one of its checkpoints")
    place = adapter(tmp_path / "first")
    shutil.copytree(place, tmp_path / "pickle")
    (tmp_path / "pickle" / "adapter_model.safetensors").unlink()
    refused(tmp_path / "pickle", "incomplete")
    torch.save(load_file(place / "adapter_model.safetensors"), tmp_path / "pickle" / "adapter_model.bin")
    refused(tmp_path / "pickle", "is a pickle, which is never read")
    shutil.copytree(place, tmp_path / "bent")
    (tmp_path / "bent" / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config.json: cannot be read"):
        start(tmp_path / "bent")
    shutil.copytree(place, tmp_path / "pissa")
    change(tmp_path / "pissa", init_lora_weights="pissa_niter_4")
    refused(tmp_path / "pissa", "made with init_lora_weights: pissa_niter_4")
    other = get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    other.save_pretrained(tmp_path / "ia3")
    refused(tmp_path / "ia3", "an adapter of kind IA3; only LORA")


def test_a_tensor_that_is_missing_is_named(tmp_path):
    place = adapter(tmp_path / "first")
    stored = load_file(place / "adapter_model.safetensors")
    gone = next(iter(stored))
    del stored[gone]
    save_file(stored, place / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"lora.adapter_name_or_path: .*missing .*{gone}"):
        start(place)


def test_an_adapter_is_no_model(tmp_path):
    """One line that says which two settings are meant; also for a run folder, and before the rows are read."""
    place = adapter(tmp_path / "run" / "model")
    change(place, base_model_name_or_path="the/base")
    for name in (place, place.parent):
        for model in (str(name), ModelConfig(str(name))):
            with pytest.raises(UserError) as caught:
                Trainer(model, [{"text": "no tokenizer lies there"}], training=numbers())
            text = str(caught.value)
            assert text.startswith(f"model.name_or_path: {place} is an adapter, not a model; name the/base there")
            assert f"strategies.lora.adapter_name_or_path: {name}" in text


def test_a_recipe_s_path_starts_from_its_folder(tmp_path, monkeypatch):
    adapter(tmp_path / "recipes" / "first")
    (tmp_path / "recipes" / "model").mkdir()
    recipe = tmp_path / "recipes" / "x.yaml"
    recipe.write_text("model: {name_or_path: ./model}\nstrategies:\n  lora: {adapter_name_or_path: first}\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("recipes/x.yaml")
    assert loaded.strategies[0].adapter_name_or_path == str(tmp_path / "recipes" / "first")
    loaded.dump(tmp_path / "again.yaml")  # what is left to the adapter stays so
    assert load_recipe(tmp_path / "again.yaml").strategies[0].settings() == loaded.strategies[0].settings()
    typed = load_recipe("recipes/x.yaml", ["strategies.lora.adapter_name_or_path=recipes/first"])
    assert typed.strategies[0].adapter_name_or_path == str(tmp_path / "recipes" / "first")
    recipe.write_text("model: {name_or_path: ./model}\nstrategies:\n  lora: {adapter_name_or_path: ./third}\n")
    with pytest.raises(UserError, match=r"x.yaml:3: .*adapter_name_or_path: no such file: .*recipes/third"):
        load_recipe("recipes/x.yaml")
    assert load_recipe("recipes/x.yaml", check_files=False).strategies


def test_tokens_that_the_base_does_not_have_are_asked_for(tmp_path):
    place = adapter(tmp_path / "first", trainable_token_indices=[1, 2])
    config = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
    config["trainable_token_indices"] = {"embed_tokens": [1, 10_000]}
    (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"lora.adapter_name_or_path: .* has trained 1 tokens .*model.add_tokens"):
        start(place)
