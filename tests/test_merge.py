"""Merging an adapter: the same model without peft, one layer at a time, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.helpers import here, llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import VOCABULARY, byte_tokenizer, difference, logits, plain, save_base
from torch import nn
from transformers import AutoTokenizer

from lowmem import UserError
from lowmem.durable import seal
from lowmem.merge import merge
from lowmem.run_folder import RunFolder
from lowmem.shards import ShardWriter, whole_or_nothing

IDS = [5, 17, 60, 99, 3, 41, 77, 120, 8, 64]


def base_model(**changes: Any) -> nn.Module:
    return llama(vocab_size=VOCABULARY, initializer_range=0.1, **changes)


def randomised(model: nn.Module, seed: int = 1) -> nn.Module:
    """Adapters start as nothing; here every trained number is moved."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def make_run(
    folder: Path, base: nn.Module, strategies: str = "{lora: {}}", dtype: str = "float32", **lora: Any
) -> Path:
    """A finished run, as training leaves it: an untouched base on disk, and an adapter whose weights are not zero."""
    save_base(folder / "base", base, byte_tokenizer())
    run = folder / "run"
    run.mkdir()
    recipe = f"model: {{name_or_path: {folder / 'base'}, dtype: {dtype}}}\nstrategies: {strategies}\n"
    (run / "recipe.yaml").write_text(recipe)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "v_proj", "down_proj"], **lora})
    randomised(get_peft_model(base, config)).save_pretrained(run / "model", save_embedding_layers=False)
    byte_tokenizer().save_pretrained(run / "model")
    return run


def as_checkpoint(run: Path) -> Path:
    """The run as it is after a kill: what was its result is a checkpoint."""
    place = run / "checkpoint-000003"
    (run / "model").rename(place)
    (place / "trainer.json").write_text("{}")
    seal(place)
    return run


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=4))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, **sizes))


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 8},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.self_attn.v_proj": 64}},
    "norm trained in full": {"modules_to_save": ["norm"]},
    "both ends trained in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding adapted": {"target_modules": ["embed_tokens", "q_proj"]},
    "head adapted": {"target_modules": ["lm_head", "q_proj"]},
    "rows of the embedding": {"trainable_token_indices": [3, 17, 120]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_merged_as_peft_merges_it(tmp_path, variant):
    run = make_run(tmp_path, base_model(), **VARIANTS[variant])
    report = merge(run, tmp_path / "out", probe=False)
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base"), run / "model")
    expected = logits(adapted, IDS)
    assert difference(logits(plain(tmp_path / "base"), IDS), expected) > 0.01  # the adapter does something
    merged = plain(tmp_path / "out")
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert not report["tied_embeddings"]
    assert difference(logits(merged, IDS), expected) <= 1e-5
    assert difference(logits(adapted.merge_and_unload(), IDS), logits(merged, IDS)) <= 1e-5


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True, "bias": "all"}),
        (qwen2, {"target_modules": ["q_proj", "gate_proj"], "bias": "lora_only"}),
        (mixtral, {"target_modules": ["q_proj", "o_proj"]}),
    ],
    ids=["transposed layers", "biases, transposed", "biases", "fused experts"],
)
def test_other_architectures(tmp_path, make, lora):
    run = make_run(tmp_path, make(), **lora)
    merge(run, tmp_path / "out", probe=False)
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base"), run / "model")
    assert difference(logits(plain(tmp_path / "base"), IDS), logits(adapted, IDS)) > 1e-3
    assert difference(logits(plain(tmp_path / "out"), IDS), logits(adapted, IDS)) <= 1e-5


@pytest.mark.parametrize(
    ("lora", "stays_tied"),
    [
        ({}, True),
        ({"trainable_token_indices": [3, 17]}, True),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["embed_tokens"]}, False),
    ],
    ids=["untouched", "rows of both", "embedding trained", "embedding adapted"],
)
def test_tied_embeddings_stay_tied_only_while_they_are_equal(tmp_path, lora, stays_tied):
    run = make_run(tmp_path, base_model(tie_word_embeddings=True), **lora)
    report = merge(run, tmp_path / "out", probe=False)
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base"), run / "model")
    merged = plain(tmp_path / "out")
    assert difference(logits(merged, IDS), logits(adapted, IDS)) <= 1e-5
    assert report["tied_embeddings"] == merged.config.tie_word_embeddings == stays_tied
    assert (merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()) == stays_tied
    assert any("tie_word_embeddings: false" in notice for notice in report["notices"]) != stays_tied


@pytest.mark.parametrize("make", [base_model, gpt2, mixtral], ids=["llama", "gpt2", "mixtral"])
def test_a_quantised_base_is_rounded_as_in_training(tmp_path, make):
    names = {gpt2: {"target_modules": ["c_attn"]}, mixtral: {"target_modules": ["q_proj"]}}.get(
        make, {"use_dora": True}
    )
    strategies = "{lora: {}, quantization: {compute_dtype: float32}}"
    run = make_run(tmp_path, make(), strategies, **names)
    report = merge(run, tmp_path / "out")
    trained, _ = RunFolder.open(run).load()
    assert report["base"] == "dequantised"
    assert report["probe"]["largest_logit_difference"] <= 1e-3
    assert difference(logits(plain(tmp_path / "out"), IDS), logits(trained, IDS)) <= 1e-3
    original = merge(run, tmp_path / "original", base="original")
    assert original["probe"]["largest_logit_difference"] > 10 * report["probe"]["largest_logit_difference"]
    assert any("original weights" in notice for notice in original["notices"])


def test_the_probe_sees_a_wrong_merge(tmp_path, monkeypatch):
    run = make_run(tmp_path, base_model())
    assert merge(run, tmp_path / "right")["probe"]["largest_logit_difference"] <= 1e-5
    monkeypatch.setattr("lowmem.adapter_layers.AdapterLayers.merged", lambda self, name, base: base(name).float())
    wrong = merge(run, tmp_path / "wrong")["probe"]
    assert wrong["largest_logit_difference"] > 0.01


def test_dtypes(tmp_path):
    run = make_run(tmp_path, base_model(), dtype="bfloat16")
    assert merge(run, tmp_path / "auto", probe=False)["dtype"] == "bfloat16"  # as loaded in training
    merge(run, tmp_path / "half", dtype="float16", probe=False)
    for name, dtype in (("auto", torch.bfloat16), ("half", torch.float16)):
        stored = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {dtype}
        assert plain(tmp_path / name, dtype="auto").dtype == dtype


def test_everything_beside_the_weights_goes_along(tmp_path):
    base = base_model()
    base.generation_config.temperature, base.generation_config.do_sample = 0.3, True
    run = make_run(tmp_path, base)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "another {{ messages[0]['content'] }}"
    tokenizer.save_pretrained(run / "model")
    merge(run, tmp_path / "out", probe=False)
    from transformers import AutoTokenizer, GenerationConfig

    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.3
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_shards(tmp_path):
    run = make_run(tmp_path, base_model())
    merge(run, tmp_path / "one", probe=False)
    merge(run, tmp_path / "many", probe=False, shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert all((tmp_path / "many" / name).stat().st_size < 120_000 for name in files)
    assert torch.equal(logits(plain(tmp_path / "one"), IDS), logits(plain(tmp_path / "many"), IDS))
    resharded = tmp_path / "resharded"
    resharded.mkdir()
    save_base(tmp_path / "base", plain(tmp_path / "base"), max_shard_size="100KB")  # a base in several files
    (tmp_path / "base" / "model.safetensors").unlink(missing_ok=True)
    merge(run, tmp_path / "again", probe=False)
    assert torch.equal(logits(plain(tmp_path / "one"), IDS), logits(plain(tmp_path / "again"), IDS))


def test_odd_tensors_in_a_shard(tmp_path):
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "numbers": torch.arange(5),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flag": torch.tensor([True]),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    writer = ShardWriter(tmp_path, list(tensors))
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    found = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_in_place_of_the_result(tmp_path):
    run = as_checkpoint(make_run(tmp_path, base_model(), "{lora: {}, ema: {}}"))
    for checkpoint in (None, 3, "3", "checkpoint-000003", run / "checkpoint-000003"):
        report = merge(run, tmp_path / "out", checkpoint=checkpoint)
        assert any("the run has not ended" in text for text in report["notices"]) == (checkpoint is None)
        assert any("without ema" in text for text in report["notices"])
        if checkpoint is not None:
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
        (tmp_path / "out").rename(tmp_path / ("first" if checkpoint is None else "again"))
    (tmp_path / "first").rename(tmp_path / "out")
    with pytest.raises(UserError, match="no checkpoint of step 4; it has 3"):
        merge(run, tmp_path / "other", checkpoint="4")
    adapted = PeftModel.from_pretrained(plain(tmp_path / "base"), run / "checkpoint-000003")
    assert difference(logits(plain(tmp_path / "out"), IDS), logits(adapted, IDS)) <= 1e-5
    # a checkpoint has no tokenizer beside it, and a run that was cut off no result: the base model's goes along
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == byte_tokenizer().chat_template


def test_an_adapter_that_training_began_with_may_be_gone(tmp_path):
    run = make_run(tmp_path, base_model(), f"{{lora: {{adapter_name_or_path: {tmp_path / 'gone'}}}}}")
    assert merge(run, tmp_path / "out")["probe"]["largest_logit_difference"] <= 1e-4


def test_a_base_that_has_moved(tmp_path):
    run = make_run(tmp_path, base_model())
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"write its place into model.name_or_path of .*run/recipe.yaml"):
        merge(run, tmp_path / "out")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(tmp_path / "base"), str(tmp_path / "moved")))
    merge(run, tmp_path / "out")


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path):
    run = make_run(tmp_path, base_model())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        merge(run, tmp_path / "out", probe=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path, base_model())
    write, calls = ShardWriter.add, []

    def fails(self, name, tensor):
        calls.append(name)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "add", fails)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match="No space left"):
        merge(run, tmp_path / "out", probe=False)
    assert len(calls) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_too_small_a_disk_is_told_beforehand(tmp_path, monkeypatch):
    run = make_run(tmp_path, base_model())
    monkeypatch.setattr("lowmem.shards.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="GB free"):
        merge(run, tmp_path / "out", probe=False)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_block_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with whole_or_nothing(tmp_path / "new" / "out") as partial:
            partial.mkdir()
            (partial / "half").write_text("written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "new").iterdir()) == []


def other_spelling(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "base" / "model.safetensors"
    save_file(change({k: v.clone() for k, v in load_file(file).items()}), file, metadata={"format": "pt"})


def test_a_base_saved_without_its_prefix(tmp_path):
    run = make_run(tmp_path, gpt2(), target_modules=["c_attn"], fan_in_fan_out=True)
    other_spelling(tmp_path, lambda t: {k.removeprefix("transformer."): v for k, v in t.items()})
    report = merge(run, tmp_path / "out")
    assert report["probe"]["largest_logit_difference"] <= 1e-5
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_tied_base_that_holds_another_head(tmp_path):
    run = make_run(tmp_path, base_model(tie_word_embeddings=True))
    other_spelling(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] * 1.1})
    report = merge(run, tmp_path / "out")
    assert report["probe"]["largest_logit_difference"] <= 1e-5
    assert not report["tied_embeddings"]


def test_a_tied_base_that_holds_only_its_head(tmp_path):
    run = make_run(tmp_path, base_model(tie_word_embeddings=True), modules_to_save=["lm_head"])
    other_spelling(tmp_path, lambda t: {"lm_head.weight": t.pop("model.embed_tokens.weight"), **t})
    assert merge(run, tmp_path / "out")["probe"]["largest_logit_difference"] <= 1e-5


def test_a_base_that_is_loaded_whole(tmp_path):
    run = make_run(tmp_path, base_model())
    file = tmp_path / "base" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "base" / "pytorch_model.bin")
    file.unlink()
    report = merge(run, tmp_path / "out")
    assert "loaded whole" in report["notices"][0]
    assert report["probe"]["largest_logit_difference"] <= 1e-5


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_an_adapter_of_another_model(tmp_path):
    run = make_run(tmp_path, base_model())
    save_base(tmp_path / "base", base_model(num_hidden_layers=1))
    with pytest.raises(UserError, match=r"unexpected.*layers\.1"):
        merge(run, tmp_path / "out", probe=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["run/model/adapter_model.safetensors", "base/model.safetensors"])
def test_a_damaged_file(tmp_path, file):
    run = make_run(tmp_path, base_model())
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{file}: the file is damaged"):
        merge(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_none(tmp_path):
    run = make_run(tmp_path, base_model())
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match="cannot be written"):
        merge(run, tmp_path / "file" / "out")


def test_a_base_that_was_not_quantised(tmp_path):
    run = make_run(tmp_path, base_model())
    with pytest.raises(UserError, match="not quantised"):
        merge(run, tmp_path / "out", base="dequantised")


def test_an_initialisation_that_changes_the_base(tmp_path):
    run = make_run(tmp_path, base_model())
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": "pissa"}))
    with pytest.raises(UserError, match="pissa"):
        merge(run, tmp_path / "out", probe=False)


def test_command(tmp_path):
    run = make_run(tmp_path, base_model())
    done = here("merge", str(run), str(tmp_path / "out"), "--json", "--dtype", "bfloat16")
    report = json.loads(done.stdout)
    assert (done.returncode, report["dtype"], report["base"]) == (0, "bfloat16", "original")
    assert 0 < report["probe"]["largest_logit_difference"] < 0.2
    again = here("merge", str(run), str(tmp_path / "out"))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    save_base(tmp_path / "full" / "model", base_model())
    (tmp_path / "full" / "recipe.yaml").write_text(f"model: {{name_or_path: {tmp_path / 'base'}}}\n")
    full = here("merge", str(tmp_path / "full"), str(tmp_path / "out2"))
    assert full.returncode == 2
    assert "lowmem export" in full.stderr
    assert here("merge", str(tmp_path), str(tmp_path / "out2")).returncode == 2


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, resource, torch, pathlib
from lowmem.merge import merge
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
merge(sys.argv[1], sys.argv[3], probe=False)  # a small one: everything is imported
before = peak()
merge(sys.argv[2], sys.argv[4], probe=False)
print(peak() - before)
"""


def test_memory_stays_at_about_a_layer(tmp_path):
    """A model of 108 MB in 12 layers, quantised in training: the process grows by a few layers, not by the model."""
    make_run(tmp_path / "small", base_model(), "{lora: {}, quantization: {}}")
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape))
    run, base = tmp_path / "large" / "run", tmp_path / "large" / "base"
    base.mkdir(parents=True)
    model.config.dtype = torch.float32
    model.config.save_pretrained(base)
    random = torch.randn(768 * 512) * 0.02
    writer = ShardWriter(base, list(model.state_dict()), shard_bytes=10**9)
    for name, tensor in model.state_dict().items():
        writer.add(name, random[: tensor.numel()].reshape(tensor.shape))
    writer.close()
    assert writer.total_bytes > 105e6
    run.mkdir()
    (run / "recipe.yaml").write_text(
        f"model: {{name_or_path: {base}, dtype: float32}}\nstrategies: {{lora: {{}}, quantization: {{}}}}\n"
    )
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    weights = {k: torch.ones(v.shape) * 0.01 for k, v in adapted.state_dict().items() if "lora_" in k}
    (run / "model").mkdir()
    config.save_pretrained(run / "model")
    save_file({k.replace(".default", ""): v for k, v in weights.items()}, run / "model" / "adapter_model.safetensors")
    places = [tmp_path / "small" / "run", run, tmp_path / "small" / "out", tmp_path / "large" / "out"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, places)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    layer, mapped = 4 * (4 * 512 * 512 + 3 * 512 * 768), 1 << 25
    grown = int(done.stdout)
    assert grown < 4 * layer + mapped, grown  # a layer as loaded and rounded, a weight while it is merged
    assert sum(path.stat().st_size for path in places[3].glob("*.safetensors")) > 105e6
