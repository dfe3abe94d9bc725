"""Quantised weights on disk: the same bits as quantising on the fly, whole or not at all, and refused where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import byte_tokenizer, plain, save_base
from test_architectures import SHAPES
from test_one_by_one import asked, assert_same, by_transformers

from lowmem import Quantization, UserError
from lowmem.config import ModelConfig
from lowmem.loading import load_model
from lowmem.quantize import quantize

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
