"""Loading a model one tensor at a time gives what transformers gives, bit for bit, and holds less meanwhile."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from safetensors.torch import save_file
from small_models import byte_tokenizer, save_base
from test_architectures import SHAPES
from test_phases import Measured
from torch import Tensor, nn
from transformers import GenerationConfig

from lowmem import Quantization, TrainingConfig, UserError
from lowmem.config import LoadConfig, ModelConfig
from lowmem.loading import load_model
from lowmem.one_by_one import load_one_by_one, tensors_of
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


# -- memory -----------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return make_llama(torch.bfloat16, hidden_size=128, intermediate_size=512, num_hidden_layers=6, vocab_size=256)


@pytest.mark.parametrize("strategy", [Quantization(), Quantization("int8")], ids=["nf4", "int8"])
def test_beside_the_quantised_model_lies_one_layer_at_most(strategy: Quantization, tmp_path: Path) -> None:
    """Every byte that is live, counted at every operation: no 16-bit layer is ever whole."""
    model = wide()
    save_base(tmp_path, model, max_shard_size="500KB")
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())  # type: ignore[union-attr]
    whole = sum(p.nbytes for p in model.parameters())
    load, _ = asked(tmp_path, strategy)
    with Measured() as trace:
        found = load_model(load)
    rest = sum(t.untyped_storage().nbytes() for t in unique(everything(found)))
    peak = trace.peak()[0]
    assert rest < 0.62 * whole
    assert rest <= peak <= rest + layer


def unique(tensors: dict[str, Tensor]) -> list[Tensor]:
    return list({t.untyped_storage()._cdata: t for t in tensors.values()}.values())


def test_no_weight_hangs_on_its_file(tmp_path: Path) -> None:
    """A parameter has memory of its own, no more than it needs: files may change or go."""
    save_base(tmp_path, wide())
    load, _ = asked(tmp_path, Quantization())
    model = load_model(load)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_between_what_stays_is_given_back(tmp_path: Path) -> None:
    """In a process of its own, whose memory nobody else has cut up: large tensors go, small ones between them stay."""
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    script = """
import sys, torch
from pathlib import Path
from lowmem.tensor_files import stored_tensors

def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

(weight,) = stored_tensors(Path(sys.argv[1])).values()
del [torch.ones(30 * 2**20, dtype=torch.uint8)][:]  # from here on, such sizes come from the heap
start, large, small = resident(), [], []
for _ in range(30):
    large.append(torch.ones(8 * 2**20, dtype=torch.uint8))
    small.append(torch.ones(2**20, dtype=torch.uint8))
large.clear()
held = resident() - start
weight.read()
print(held, resident() - start)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "model.safetensors"], capture_output=True, text=True, check=True
    )
    held, left = map(int, done.stdout.split())
    assert held > 200 * 2**20, done.stdout
    assert left < 0.25 * held, done.stdout  # 30 MiB stay


def test_place_is_shown_each_weight_once_layer_after_layer(tmp_path: Path) -> None:
    """Quantised where it is to be; what it returns is what the model keeps."""
    save_base(tmp_path, make_llama(torch.bfloat16, tied=True, num_hidden_layers=12))
    shown: list[tuple[str, str]] = []
    kept: dict[str, nn.Parameter] = {}

    def place(name: str, parameter: nn.Parameter) -> nn.Parameter:
        shown.append((name, type(parameter).__name__))
        if name == "model.norm.weight":
            kept[name] = nn.Parameter(torch.zeros_like(parameter))
            return kept[name]
        return parameter

    model = load_one_by_one(asked(tmp_path, Quantization())[0], place)
    names = [name for name, _ in shown]
    assert len(names) == len(set(names))
    assert set(names) - {"lm_head.weight"} == {name for name, _ in model.named_parameters()}
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert set(layers) == set(range(12))
    assert {kind for name, kind in shown if "proj" in name} == {"Params4bit"}
    assert model.model.norm.weight is kept["model.norm.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


# -- other ways in ----------------------------------------------------------------------------------------------------


def test_files_without_safetensors_go_the_other_way_with_a_notice(tmp_path: Path) -> None:
    model = make_llama(torch.bfloat16)
    save_base(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load, told = asked(tmp_path, Quantization())
    assert_same(load_model(load), by_transformers(load))
    assert told == [f"{tmp_path}: loaded by transformers alone, from mapped files (it has no model.safetensors)"]


def test_code_that_comes_with_a_model_loads_it_itself(tmp_path: Path) -> None:
    save_base(tmp_path, make_llama(torch.bfloat16))
    load, told = asked(tmp_path, Quantization(), trust_remote_code=True)
    load_model(load)
    assert len(told) == 1
    assert "model.trust_remote_code: code that comes with a model loads it itself" in told[0]


def test_a_run_without_quantization_loads_as_before(tmp_path: Path) -> None:
    run = Run(TrainingConfig(), CPU, frozenset())
    load = LoadConfig.of(ModelConfig(str(tmp_path)), CPU)
    assert load.one_by_one is None
    assert Quantization().configure(load, run).one_by_one == run.notice


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    save_base(tmp_path, make_llama(torch.bfloat16))
    file = tmp_path / "model.safetensors"
    load, _ = asked(tmp_path, Quantization())
    weights = tensors_of(load)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="the file is damaged"):
        load_model(load)
    last = max(weights.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(UserError, match=f"it ends within {last.name}"):
        last.read()


def test_dtypes_and_generation_settings(tmp_path: Path) -> None:
    model: Any = make_llama(torch.bfloat16)
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3)
    save_base(tmp_path, model)
    for dtype in ("float32", "float16"):
        load, _ = asked(tmp_path, Quantization(), dtype=dtype, attn_implementation="eager")
        found: Any = load_model(load)
        assert_same(found, by_transformers(load))
        assert found.generation_config.max_new_tokens == 7
        assert found.config._attn_implementation == "eager"


def test_added_tokens(tmp_path: Path) -> None:
    save_base(tmp_path, make_llama(torch.bfloat16, vocab_size=281), byte_tokenizer())
    load, _ = asked(tmp_path, Quantization(), add_tokens=["<x>", "<y>"])
    found: Any = load_model(load)
    assert_same(found, by_transformers(load))
    assert len(found.get_input_embeddings().weight) == 283
