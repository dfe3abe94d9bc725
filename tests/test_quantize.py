"""Quantised weights on disk: the bits of quantising on the fly, whole or not at all, refused where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from safetensors.torch import load_file, save_file
from small_models import VOCABULARY, byte_tokenizer, logits, plain, save_base
from test_architectures import SHAPES
from test_one_by_one import asked, assert_same, by_transformers
from torch import Tensor
from transformers import AutoTokenizer

from lowmem import LoRA, Quantization, Trainer, TrainingConfig, UserError, load_run
from lowmem.cli import main
from lowmem.config import ModelConfig
from lowmem.loading import load_model
from lowmem.memory.estimate import estimate
from lowmem.memory.subject import Subject, model_config
from lowmem.merge import merge
from lowmem.quantize import quantize
from lowmem.shards import ShardWriter

FORMATS = {
    "nf4": Quantization(),
    "fp4": Quantization("fp4", double_quant=False),
    "int8": Quantization("int8"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_what_quantising_gives(name: str, tmp_path: Path) -> None:
    """By plain `from_pretrained`, and by lowmem, which does not quantise then."""
    save_base(tmp_path / "base", SHAPES[name].build(torch.bfloat16), byte_tokenizer(), max_shard_size="60KB")
    for format, strategy in FORMATS.items():
        out = tmp_path / format
        report = quantize(ModelConfig(str(tmp_path / "base")), out, strategy, shard_bytes=60_000)
        wanted: Any = by_transformers(asked(tmp_path / "base", strategy)[0])
        found: Any = plain(out, dtype="auto", device_map={"": "cpu"})
        wanted.config.name_or_path = str(out)
        assert report["bytes"] == sum(t["bytes"] for t in tensors(out))
        assert len(list(out.glob("*.safetensors"))) > 1
        ours = load_model(asked(out, strategy)[0])
        assert_same(ours, found)
        found.config.quantization_config = wanted.config.quantization_config
        assert_same(found, wanted)


def tensors(folder: Path) -> list[dict[str, Any]]:
    from lowmem.tensor_files import stored_tensors

    return [
        {"name": name, "bytes": tensor.read().nbytes}
        for file in folder.glob("*.safetensors")
        for name, tensor in stored_tensors(file).items()
    ]


# -- runs from quantised weights --------------------------------------------------------------------------------------

ROWS = [{"input_ids": [(7 * i + j) % 100 for j in range(20)]} for i in range(4)]


def stored(folder: Path, format: str = "nf4", **shape: Any) -> Path:
    """A base model, and beside it the same quantised."""
    model = make_llama(torch.bfloat16, **{"vocab_size": VOCABULARY, "hidden_size": 64, **shape})
    save_base(folder / "base", model, byte_tokenizer())
    quantize(ModelConfig(str(folder / "base")), folder / "quantised", FORMATS[format])
    return folder / "quantised"


def trained(base: Path, out: Path, format: str = "nf4", steps: int = 4, resume: bool = False) -> dict[str, Tensor]:
    """Adapter weights after some steps."""
    numbers = {
        "batch_size": 2,
        "max_steps": steps,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    training = TrainingConfig(output_dir=str(out), **numbers)
    strategies = [FORMATS_MADE[format](), LoRA(r=4, target_modules="all-linear")]
    trainer = Trainer(str(base), ROWS, training=training, strategies=strategies)
    trainer.train(resume_from=out if resume else None)
    return {name: p.detach().clone() for name, p in trainer.run.trainable.items()}


FORMATS_MADE = {
    "nf4": Quantization,
    "fp4": lambda: Quantization("fp4", double_quant=False),
    "int8": lambda: Quantization("int8"),
}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("format", FORMATS)
def test_training_merging_and_use_are_the_same_to_the_bit(format: str, tmp_path: Path) -> None:
    quantised = stored(tmp_path, format)
    assert_equal(trained(tmp_path / "base", tmp_path / "one", format), trained(quantised, tmp_path / "other", format))
    files = []
    for run in ("one", "other"):
        report = merge(tmp_path / run, tmp_path / f"{run}-merged", probe=True)
        assert report["base"] == "dequantised"
        assert report["probe"]["largest_logit_difference"] < 0.1 * report["probe"]["largest_logit"]
        files.append(load_file(tmp_path / f"{run}-merged" / "model.safetensors"))
    assert_equal(*files)
    assert not hasattr(plain(tmp_path / "other-merged").config, "quantization_config")
    one, other = (load_run(tmp_path / run).model for run in ("one", "other"))
    assert torch.equal(logits(one), logits(other))
    with pytest.raises(UserError, match="--base original: the base model was quantised before the run"):
        merge(tmp_path / "other", tmp_path / "third", base="original")


def test_gpt2_keeps_its_weights_transposed(tmp_path: Path) -> None:
    save_base(tmp_path / "base", SHAPES["gpt2"].build(torch.bfloat16))
    quantize(ModelConfig(str(tmp_path / "base")), tmp_path / "quantised", Quantization())
    files = []
    for name in ("base", "quantised"):
        trained(tmp_path / name, tmp_path / f"run-{name}")
        merge(tmp_path / f"run-{name}", tmp_path / f"merged-{name}", probe=False)
        files.append(load_file(tmp_path / f"merged-{name}" / "model.safetensors"))
    assert {k: v.shape for k, v in files[0].items()} == {k: v.shape for k, v in files[1].items()}
    assert_equal(*files)


def test_a_run_from_quantised_weights_goes_on(tmp_path: Path) -> None:
    quantised = stored(tmp_path)
    whole = trained(quantised, tmp_path / "whole")
    trained(quantised, tmp_path / "parts", steps=2)
    assert_equal(trained(quantised, tmp_path / "parts", resume=True), whole)


def test_the_dtype_of_products_is_the_recipes(tmp_path: Path) -> None:
    quantised = stored(tmp_path)
    model = load_model(asked(quantised, Quantization(compute_dtype="float32"))[0])
    found = {m.compute_dtype for m in model.modules() if hasattr(m, "compute_dtype")}
    assert found == {torch.float32}


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        (
            [Quantization("fp4")],
            "{format: fp4, double_quant: true}: the weights of .* {format: nf4, double_quant: true}",
        ),
        ([Quantization(double_quant=False)], "double_quant: false}: .* as {format: nf4, double_quant: true}"),
        ([Quantization("int8")], "{format: int8}: the weights .* {format: nf4, double_quant: true}"),
        ([], "its weights are quantised .*add `quantization: {format: nf4, double_quant: true}` to strategies"),
    ],
)
def test_other_settings_are_refused(strategies: list[Any], message: str, tmp_path: Path) -> None:
    quantised = stored(tmp_path)
    with pytest.raises(UserError, match=message) as refusal:
        Trainer(str(quantised), ROWS, strategies=[*strategies, LoRA()])
    assert "\n" not in str(refusal.value)
    config = ModelConfig(str(quantised))
    subject = Subject.of_config(model_config(config), config, TrainingConfig(max_steps=1), [*strategies, LoRA()])
    with pytest.raises(UserError, match=message):
        estimate(subject, lengths=(8,))


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    quantised = stored(tmp_path)
    with pytest.raises(UserError, match="quantised already"):
        quantize(ModelConfig(str(quantised)), tmp_path / "out", Quantization())
    with pytest.raises(UserError, match="exists already"):
        quantize(ModelConfig(str(tmp_path / "base")), quantised, Quantization())
    lacking = tmp_path / "lacking"
    save_base(lacking, make_llama())
    weights = load_file(lacking / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no fitting weights for model\.layers.1\.mlp\.up_proj\.weight"):
        quantize(ModelConfig(str(lacking)), tmp_path / "out", Quantization())
    save_base(tmp_path / "pickled", make_llama())
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it has no model.safetensors; it takes a model in safetensors"):
        quantize(ModelConfig(str(tmp_path / "pickled")), tmp_path / "out", Quantization())
    assert not (tmp_path / "out").exists()


def test_an_interrupted_one_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "base", make_llama())
    add, written = ShardWriter.add, []

    def stop(self: ShardWriter, name: str, tensor: Tensor) -> None:
        written.append(name)
        if len(written) == 9:
            raise KeyboardInterrupt
        add(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(ModelConfig(str(tmp_path / "base")), tmp_path / "out", Quantization())
    assert len(written) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "base", make_llama(torch.bfloat16), byte_tokenizer())
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["lowmem", "quantize", str(tmp_path / "base"), str(out), "--no-double-quant"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "nf4, the rest bfloat16" in capsys.readouterr().out
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (stated["bnb_4bit_quant_type"], stated["bnb_4bit_use_double_quant"]) == ("nf4", False)
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"]
    for arguments, message in (
        ([str(tmp_path / "base"), str(out)], "exists already"),
        ([str(tmp_path / "base"), "x", "--format", "int8", "--double-quant"], "no effect with --format int8"),
    ):
        monkeypatch.setattr("sys.argv", ["lowmem", "quantize", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert message in capsys.readouterr().err
