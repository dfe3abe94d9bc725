"""Kind 4 of the cases: adapters, saving, merging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from small_models import CHAT, byte_tokenizer, difference, logits, plain, save_base
from transformers import AutoTokenizer

from cases.helpers import llama, rows, train, weights
from lowmem import LoRA, ModelConfig, Quantization, Trainer, TrainingConfig, UserError
from lowmem.data import tokenize
from lowmem.merge import merge
from lowmem.run_folder import RunFolder

NEW = ["<x1>", "<x2>", "<x3>", "<x4>"]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"say <x1> {n}"}, {"role": "assistant", "content": "<x2><x3> ok <x4>"}]}
    for n in range(8)
]
RELOAD = """
import sys, torch
from safetensors.torch import save_file
from lowmem.run_folder import RunFolder
model, tokenizer = RunFolder.open(sys.argv[1]).load()
ids = torch.tensor([eval(sys.argv[2])])
with torch.no_grad():
    save_file({"logits": model(input_ids=ids).logits.contiguous()}, sys.argv[3])
print(len(tokenizer), tokenizer.convert_tokens_to_ids(["<x1>", "<x2>", "<x3>", "<x4>"]))
"""


def test_c401_a_typo_in_target_modules():
    with pytest.raises(UserError, match=r"v_porj.*v_proj"):
        train(llama(), rows(), LoRA(r=8, target_modules=["q_proj", "v_porj"]))


def test_c404_added_tokens_survive_the_round_trip(tmp_path):
    """Rows for new tokens are trained, saved, and found again by another process on the untouched base."""
    size = len(byte_tokenizer())
    base = save_base(tmp_path / "base", llama(vocab_size=size), byte_tokenizer())
    untouched = (base / "model.safetensors").read_bytes()
    trainer = Trainer(
        ModelConfig(str(base), dtype="float32", add_tokens=NEW),
        CONVERSATIONS,
        training=TrainingConfig(batch_size=4, max_steps=5, learning_rate=1e-2, output_dir=str(tmp_path / "run")),
        strategies=[LoRA(r=4, modules_to_save=["embed_tokens", "lm_head"])],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft would ask the hub for the base model's vocabulary
        trainer.train()
    ids = [5, *range(size, size + 4), 7]
    expected = logits(trainer.model, ids)
    assert expected.shape[-1] == size + 4
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(tmp_path / "run"), str(ids), str(tmp_path / "found")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{size + 4} {list(range(size, size + 4))}"
    with safe_open(tmp_path / "found", framework="pt") as file:
        assert difference(file.get_tensor("logits"), expected) <= 1e-6
    assert (base / "model.safetensors").read_bytes() == untouched
    merge(tmp_path / "run", tmp_path / "out", probe=False)
    assert difference(logits(plain(tmp_path / "out"), ids), expected) <= 1e-5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == size + 4


def test_c405_tied_model_both_ends_trained(tmp_path):
    """Embedding and head have come apart: the merged model's configuration must say so."""
    save_base(tmp_path / "base", llama(tie_word_embeddings=True))
    model = plain(tmp_path / "base")
    ends = ["embed_tokens", "lm_head"]
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=ends, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.add_(0.5)
    (tmp_path / "run").mkdir()
    adapted.save_pretrained(tmp_path / "run" / "model", save_embedding_layers=False)
    recipe = f"model: {{name_or_path: {tmp_path / 'base'}, dtype: float32}}\nstrategies: {{lora: {{}}}}\n"
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    before = logits(adapted)
    merge(tmp_path / "run", tmp_path / "out", probe=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert difference(logits(plain(tmp_path / "out")), before) <= 1e-5
    assert difference(logits(plain(tmp_path / "base")), before) > 0.1


def test_c406_merging_a_qlora_adapter(tmp_path):
    """The base that training saw, rounded to NF4, is the one the adapter is added to."""
    base = save_base(tmp_path / "base", llama(initializer_range=0.1))
    trainer = Trainer(
        ModelConfig(str(base), dtype="float32"),
        rows(),
        training=TrainingConfig(batch_size=4, max_steps=2, learning_rate=1e-2, output_dir=str(tmp_path / "run")),
        strategies=[LoRA(r=4), Quantization(compute_dtype="float32")],
    )
    trainer.train()
    trained = logits(trainer.model)
    report = merge(tmp_path / "run", tmp_path / "out", dtype="float32")
    merged = plain(tmp_path / "out", dtype="auto")
    assert merged.dtype == torch.float32
    assert difference(logits(merged), trained) <= 1e-3
    assert report["probe"]["largest_logit_difference"] <= 1e-3
    original = merge(tmp_path / "run", tmp_path / "original", base="original", dtype="bfloat16")
    assert (original["base"], original["dtype"]) == ("original", "bfloat16")
    assert original["probe"]["largest_logit_difference"] > 1e-2
    assert "original weights" in original["notices"][0]


def test_c407_saving_a_tied_full_model(tmp_path):
    training = {"save_steps": 2, "output_dir": str(tmp_path / "run"), "max_steps": 3}
    trainer = train(llama(tie_word_embeddings=True), rows(), **training)
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(key).numel() for key in file.keys()) == 82_240  # noqa: SIM118
    again = plain(tmp_path / "run" / "model")  # refuses missing and unexpected keys
    assert difference(logits(again), logits(trainer.model)) == 0
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    data = Trainer(
        llama(tie_word_embeddings=True, seed=1),
        rows(),
        training=TrainingConfig(**vars(trainer.training)),
    )
    data.train(resume_from=tmp_path / "run" / "checkpoint-000002")
    assert all(torch.equal(value, weights(data.model)[name]) for name, value in weights(trainer.model).items())
    inner = data.model
    assert inner.lm_head.weight.data_ptr() == inner.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("strategies", [[], [LoRA(r=4)]], ids=["whole", "adapter"])
def test_c408_the_template_of_training_is_saved(tmp_path, strategies):
    """A template given in a recipe, as a file beside it, is the one in the result."""
    other = byte_tokenizer()
    other.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    save_base(tmp_path / "base", llama(vocab_size=300), other)
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    (tmp_path / "r.yaml").write_text(
        f"model: {{name_or_path: base, chat_template: chat.jinja}}\ndata: {{train: data.jsonl}}\n"
        f"training: {{batch_size: 2, max_steps: 1, output_dir: {tmp_path / 'run'}}}\n"
        f"strategies: {{{'lora: {r: 4}' if strategies else ''}}}\n"
    )
    trainer = Trainer.from_recipe(tmp_path / "r.yaml")
    trainer.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.chat_template == CHAT
    conversation = CONVERSATIONS[0]["messages"]
    used = trainer.train_dataset[0]["input_ids"].tolist()
    assert saved.apply_chat_template(conversation, return_dict=False) == used
    assert other.apply_chat_template(conversation, return_dict=False) != used
    (tmp_path / "chat.jinja").unlink()  # the run stands on its own
    _, tokenizer = RunFolder.open(tmp_path / "run").load()
    assert tokenize(CONVERSATIONS, tokenizer, trainer.data, 64)[0]["input_ids"].tolist() == used
