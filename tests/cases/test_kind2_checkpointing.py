"""Kind 2: gradient checkpointing."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cases.helpers import SGD, KeepGradients, largest_difference, llama, rows, train
from lowmem import GradientCheckpointing, LoRA, OptimizerInBackward


def gradients(model, *strategies, **changes):
    kept = KeepGradients()
    train(model, rows(8), kept, *strategies, max_steps=1, **changes)
    return kept.steps[0]


def recomputing(model) -> list[bool]:
    """Whether the forward of each layer runs again in backward."""
    calls = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    return calls


# -- C-201 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_c201_adapters_beside_frozen_weights_get_their_gradients(every):
    """The embedding is frozen, so nothing that enters the first checkpointed layer requires a gradient."""
    adapter = {"r": 4, "target_modules": ["q_proj"]}
    plain = gradients(llama(torch.float64), LoRA(**adapter))
    saved = gradients(llama(torch.float64), LoRA(**adapter), GradientCheckpointing(every_n_layers=every))
    assert [name for name in saved if "lora_B" in name]
    assert all(saved[name].abs().max() > 0 for name in saved if "lora_B" in name)
    assert largest_difference(plain, saved) < 1e-10


@pytest.mark.parametrize(("every", "expected"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])])
def test_c201_every_nth_layer_runs_twice(every, expected):
    model = llama(num_hidden_layers=4)
    calls = recomputing(model)
    train(model, rows(4), GradientCheckpointing(every_n_layers=every), max_steps=1)
    assert calls == expected


def test_c201_evaluation_recomputes_nothing():
    model = llama()
    trainer = train(model, rows(4), GradientCheckpointing(), max_steps=1)
    calls = recomputing(model)
    trainer.evaluate(rows(2))
    assert calls == [1, 1]


# -- C-202 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["adapter", "attention"])
def test_c202_dropout_is_the_same_in_both_passes(place):
    model = {"attention_dropout": 0.3 if place == "attention" else 0.0}
    lora = {"r": 4, "lora_dropout": 0.3 if place == "adapter" else 0.0}
    plain = gradients(llama(torch.float64, **model), LoRA(**lora))
    saved = gradients(llama(torch.float64, **model), LoRA(**lora), GradientCheckpointing())
    assert largest_difference(plain, saved) < 1e-10
    undropped = gradients(llama(torch.float64), LoRA(r=4))
    assert largest_difference(plain, undropped) > 1e-6  # dropout was on


# -- C-203 ------------------------------------------------------------------------------------------------------------


def test_c203_the_cache_stays_on_in_a_whole_model(tmp_path):
    model = llama()
    assert model.config.use_cache
    trainer = train(model, rows(8), GradientCheckpointing(), max_steps=2, output_dir=str(tmp_path / "run"))
    assert model.config.use_cache
    assert model.generation_config.use_cache is not False
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["use_cache"] is True
    assert trainer.model is model


def test_c203_the_cache_stays_on_in_a_merged_adapter(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = train(loaded, rows(8), LoRA(r=4), GradientCheckpointing(), max_steps=2, output_dir=str(tmp_path / "run"))
    merged = PeftModel.from_pretrained(llama(), tmp_path / "run" / "model").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["use_cache"] is True
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged2")
    assert json.loads((tmp_path / "merged2" / "config.json").read_text())["use_cache"] is True


# -- C-204 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_adapter", [False, True])
def test_c204_the_live_model_answers_like_the_saved_one(tmp_path, with_adapter):
    extra = [LoRA(r=4, lora_dropout=0.2)] if with_adapter else []
    trainer = train(
        llama(attention_dropout=0.2), rows(12), GradientCheckpointing(), *extra,
        learning_rate=1e-2, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    live = trainer.model
    assert not any(module.training for module in live.modules())
    folder = tmp_path / "run" / "model"
    load = AutoModelForCausalLM.from_pretrained
    saved = PeftModel.from_pretrained(llama(), folder) if with_adapter else load(folder)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    answers = [
        m.eval().generate(**prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0).tolist()
        for m in (live, saved)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 11


def test_recomputation_with_the_optimizer_in_backward_equals_plain_descent():
    """A layer that runs again must see the weights of its first run, although its later layers have been updated."""
    plain = train(llama(torch.float64), rows(12), SGD(), learning_rate=0.1)
    fused = train(
        llama(torch.float64), rows(12), SGD(), OptimizerInBackward(), GradientCheckpointing(), learning_rate=0.1
    )
    for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
