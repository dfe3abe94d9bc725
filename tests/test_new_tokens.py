"""Tokens that are added to a model: trained, saved, found again; on the way of a recipe and on that of Python."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from cases.helpers import here, llama, weights
from peft import LoraConfig, get_peft_model
from small_models import byte_tokenizer, difference, logits, plain, save_base

from lowmem import ChunkedCrossEntropy, LoRA, ModelConfig, Quantization, Trainer, TrainingConfig, UserError
from lowmem.loading import load_model_config, load_tokenizer
from lowmem.merge import merge
from lowmem.recipe import load_recipe
from lowmem.run_folder import RunFolder

NEW = ["<x1>", "<x2>", "<x3>"]
SIZE = len(byte_tokenizer())
IDS = [5, *range(SIZE, SIZE + 3), 7]
ROWS = [
    {"messages": [{"role": "user", "content": f"say <x1> {n}"}, {"role": "assistant", "content": "<x2> ok <x3>"}]}
    for n in range(8)
]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def base(tmp_path: Path, *, tied: bool = False, **changes) -> Path:
    model = llama(vocab_size=SIZE, tie_word_embeddings=tied, initializer_range=0.1, **changes)
    return save_base(tmp_path / "base", model, byte_tokenizer())


def training(tmp_path: Path, **changes) -> TrainingConfig:
    numbers = {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "output_dir": str(tmp_path / "run")}
    return TrainingConfig(**{**numbers, **changes})


def make_trainer(tmp_path: Path, *strategies, **changes) -> Trainer:
    config = ModelConfig(str(tmp_path / "base"), dtype="float32", add_tokens=NEW)
    return Trainer(config, ROWS, training=training(tmp_path, **changes), strategies=list(strategies))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
def test_new_rows_are_trained_alone_and_survive(tmp_path, tied, chunked):
    base(tmp_path, tied=tied)
    trainer = make_trainer(tmp_path, LoRA(r=4), *([ChunkedCrossEntropy()] if chunked else []))
    before = weights(trainer.model)
    result = trainer.train()
    moved = {n: p for n, p in trainer.run.trainable.items() if "trainable_tokens" in n}
    assert len(moved) == (1 if tied else 2)
    for name, parameter in moved.items():
        assert parameter.shape == (3, 64)
        assert (parameter != before[name]).any(dim=1).all()  # every new token
    assert any("3 new tokens" in notice for notice in result["notices"])
    expected = logits(trainer.model, IDS)
    again, tokenizer = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, IDS), expected) <= 1e-6
    assert tokenizer.convert_tokens_to_ids(NEW) == IDS[1:4]
    report = merge(tmp_path / "run", tmp_path / "out", probe=False)
    merged = plain(tmp_path / "out")
    assert report["tied_embeddings"] == tied
    assert difference(logits(merged, IDS), expected) <= 1e-5
    untouched = plain(tmp_path / "base").get_input_embeddings().weight
    assert torch.equal(merged.get_input_embeddings().weight[:SIZE], untouched)


def test_the_chunked_loss_gives_new_rows_the_same_gradient(tmp_path):
    base(tmp_path, tied=True)
    ends = [make_trainer(tmp_path, LoRA(r=4), *extra, output_dir=None) for extra in ([], [ChunkedCrossEntropy()])]
    for trainer in ends:
        trainer.train()
    one, other = (weights(trainer.model) for trainer in ends)
    assert max(difference(one[name], other[name]) for name in one) <= 1e-5


def test_a_quantised_base(tmp_path):
    base(tmp_path, tied=True)
    trainer = make_trainer(tmp_path, LoRA(r=4), Quantization(compute_dtype="float32"))
    trainer.train()
    expected = logits(trainer.model, IDS)
    again, _ = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, IDS), expected) <= 1e-6
    merge(tmp_path / "run", tmp_path / "out", probe=False)
    assert difference(logits(plain(tmp_path / "out"), IDS), expected) <= 1e-3


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]], ids=["rows", "modules_to_save"])
def test_resume(tmp_path, saved):
    base(tmp_path)
    whole = make_trainer(tmp_path, LoRA(r=4, modules_to_save=saved), save_steps=2)
    whole.train()
    again = make_trainer(tmp_path, LoRA(r=4, modules_to_save=saved), save_steps=2)
    again.train(resume_from=tmp_path / "run" / "checkpoint-000002")
    one, other = weights(whole.model), weights(again.model)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_whole_model(tmp_path):
    base(tmp_path, tied=True)
    trainer = make_trainer(tmp_path)
    trainer.train()
    again, tokenizer = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, IDS), logits(trainer.model, IDS)) <= 1e-6
    assert len(tokenizer) == SIZE + 3
    assert plain(tmp_path / "run" / "model").config.vocab_size == SIZE + 3


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]], ids=["rows", "modules_to_save"])
def test_a_model_resized_in_python(tmp_path, saved):
    """The user has loaded the model, added tokens and resized it; the run folder still leads back to the base."""
    model, tokenizer = plain(base(tmp_path)), byte_tokenizer()
    tokenizer.add_tokens(NEW, special_tokens=True)
    model.resize_token_embeddings(SIZE + 11)  # some rows more than tokens
    trainer = Trainer(
        model, ROWS, tokenizer=tokenizer, training=training(tmp_path), strategies=[LoRA(r=4, modules_to_save=saved)]
    )
    trainer.train()
    ids = [*IDS, SIZE + 10]
    expected = logits(trainer.model, ids)
    again, tokenizer = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, ids), expected) <= 1e-6
    assert tokenizer.convert_tokens_to_ids(NEW) == IDS[1:4]
    merge(tmp_path / "run", tmp_path / "out", probe=False)
    assert difference(logits(plain(tmp_path / "out"), ids), expected) <= 1e-5


def test_frozen_new_rows_are_saved_where_the_adapter_is_the_users_own(tmp_path):
    model = plain(base(tmp_path))
    model.resize_token_embeddings(SIZE + 3)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(NEW, special_tokens=True)
    trainer = Trainer(adapted, ROWS, tokenizer=tokenizer, training=training(tmp_path))
    trainer.train()
    expected = logits(trainer.model, IDS)
    again, _ = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, IDS), expected) <= 1e-6
    merge(tmp_path / "run", tmp_path / "out", probe=False)
    assert difference(logits(plain(tmp_path / "out"), IDS), expected) <= 1e-5


def test_rows_that_are_there_already_are_used(tmp_path):
    save_base(tmp_path / "base", llama(vocab_size=300), byte_tokenizer())  # more rows than tokens
    trainer = make_trainer(tmp_path, LoRA(r=4))
    assert len(trainer.model.get_input_embeddings().weight) == 300
    trainer.train()
    again, _ = RunFolder.open(tmp_path / "run").load()
    assert difference(logits(again, IDS), logits(trainer.model, IDS)) <= 1e-6


def test_new_rows_start_as_the_mean(tmp_path):
    base(tmp_path)
    trainer = make_trainer(tmp_path, output_dir=None)
    for end in (trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()):
        assert difference(end.weight[SIZE:], end.weight[:SIZE].mean(0).expand(3, -1)) <= 1e-6


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_half_of_the_ends_saved(tmp_path):
    base(tmp_path)
    with pytest.raises(UserError, match=r"embed_tokens and not lm_head"):
        make_trainer(tmp_path, LoRA(r=4, modules_to_save=["embed_tokens"]))


def test_tokens_that_are_there(tmp_path):
    base(tmp_path)
    with pytest.raises(UserError, match="<u>: in the tokenizer already"):
        load_tokenizer(ModelConfig(str(tmp_path / "base"), add_tokens=["<u>", "<x1>"]))


@pytest.mark.parametrize("tokens", [[], ["<a1>", "<a1>"], [""]])
def test_lists_that_mean_nothing(tokens):
    with pytest.raises(UserError, match=r"model\.add_tokens"):
        ModelConfig("x", add_tokens=tokens)


def test_a_folder_without_tokenizer(tmp_path):
    save_base(tmp_path / "base", llama(vocab_size=SIZE))
    for key, value in (("add_tokens", NEW), ("chat_template", "{{ 1 }}")):
        with pytest.raises(UserError, match=f"model.{key}: .*no tokenizer"):
            load_tokenizer(ModelConfig(str(tmp_path / "base"), **{key: value}))
    assert load_model_config(ModelConfig(str(tmp_path / "base"))).vocab_size == SIZE


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_template_in_a_recipe(tmp_path, monkeypatch):
    base(tmp_path)
    recipe = tmp_path / "r.yaml"
    (tmp_path / "chat.jinja").write_text("{{ bos_token }} file")
    recipe.write_text("model:\n  name_or_path: base\n  chat_template: chat.jinja\n  add_tokens: [<x1>, <x2>]\n")
    model = load_recipe(recipe).model
    assert model.chat_template == str(tmp_path / "chat.jinja")
    tokenizer = load_tokenizer(model)
    assert (tokenizer.chat_template, len(tokenizer)) == ("{{ bos_token }} file", SIZE + 2)
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert load_tokenizer(load_recipe(recipe, [f"model.chat_template='{text}'"]).model).chat_template == text
    (tmp_path / "chat.jinja").unlink()
    done = here("explain", str(recipe))
    assert done.returncode == 0, done.stderr  # looks at no file
    done = here("train", str(recipe))
    assert done.returncode == 2
    assert f"{recipe}:3: model.chat_template: no such file: {tmp_path / 'chat.jinja'}" in done.stderr


def test_resolved_recipe_holds_both(tmp_path):
    base(tmp_path)
    trainer = make_trainer(tmp_path, LoRA(r=4), max_steps=1)
    trainer.train()
    assert RunFolder.open(tmp_path / "run").recipe.model.add_tokens == NEW
    assert (
        json.loads((tmp_path / "run" / "model" / "tokenizer.json").read_text())["added_tokens"][-1]["content"]
        == NEW[-1]
    )
