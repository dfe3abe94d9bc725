"""Loading a model one tensor at a time gives what transformers gives, bit for bit, and holds less meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from small_models import byte_tokenizer, save_base
from test_architectures import SHAPES
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from lowmem import Quantization, TrainingConfig, UserError
from lowmem.config import LoadConfig, ModelConfig
from lowmem.loading import load_model
from lowmem.one_by_one import NotOneByOneError, load_one_by_one, tensors_of
from lowmem.run import Run

CPU = torch.device("cpu")


def asked(folder: Path, strategy: Quantization | None = None, **model: Any) -> tuple[LoadConfig, list[str]]:
    """How a run would load a folder, and where it is told of notices."""
    told: list[str] = []
    load = LoadConfig.of(ModelConfig(str(folder), **model), CPU)
    run = Run(TrainingConfig(), CPU, frozenset())
    if strategy is not None:
        load = strategy.configure(load, run)
    return replace(load, one_by_one=told.append), told


def by_transformers(load: LoadConfig) -> nn.Module:
    """The route of transformers alone."""
    return load_model(replace(load, one_by_one=None))


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, and what bitsandbytes keeps beside its weights, by name."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = parameter.detach()
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            found |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
            if state.nested:
                found[f"{name}.offset"] = state.offset
        for key in ("CB", "SCB"):
            if getattr(parameter, key, None) is not None:
                found[f"{name}.{key}"] = getattr(parameter, key)
    return found | dict(model.named_buffers(remove_duplicate=False))


def assert_same(found: Any, wanted: Any) -> None:
    one, other = everything(found), everything(wanted)
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert (one[name].dtype, one[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(one[name], tensor), name
    assert {n: type(m) for n, m in found.named_modules()} == {n: type(m) for n, m in wanted.named_modules()}
    assert {n: (p.requires_grad, type(p)) for n, p in found.named_parameters()} == {
        n: (p.requires_grad, type(p)) for n, p in wanted.named_parameters()
    }
    assert found.config.to_dict() == wanted.config.to_dict()
    assert found.config._attn_implementation == wanted.config._attn_implementation
    assert found.config.name_or_path == wanted.config.name_or_path
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert found.training is wanted.training is False
    for flag in ("is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        assert getattr(found, flag, None) == getattr(wanted, flag, None), flag


def tied(model: nn.Module) -> bool:
    inner: Any = model
    return inner.get_input_embeddings().weight is inner.get_output_embeddings().weight


@pytest.mark.parametrize("name", SHAPES)
def test_every_architecture_is_what_transformers_makes(name: str, tmp_path: Path) -> None:
    save_base(tmp_path, SHAPES[name].build(torch.bfloat16), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for strategy in (Quantization(), Quantization("int8"), None):
        load, told = asked(tmp_path, strategy)
        found, wanted = load_model(load), by_transformers(load)
        assert_same(found, wanted)
        assert tied(found) is tied(wanted)
        assert told == []
