"""The built-in list of shapes is right, and is found by the names people use, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama

from lowmem import ModelConfig, UserError
from lowmem.loading import load_model, model_without_data
from lowmem.memory import shapes
from lowmem.memory.shapes import find_config, known_parameters, known_shapes, shape_config

TABLE = shapes._table()


@pytest.mark.parametrize("name", TABLE)
def test_a_shape_has_as_many_weights_as_the_hub_says(name: str) -> None:
    config = shape_config(name)
    model = model_without_data(config)
    assert sum(p.numel() for p in model.parameters()) == known_parameters(name)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, TABLE[name]["config"]["dtype"])}
    assert config.name_or_path == name


def test_a_sibling_differs_in_nothing_that_makes_weights() -> None:
    harmless = {"eos_token_id", "bos_token_id", "pad_token_id", "dtype", "max_position_embeddings", "rope_theta"}
    for entry in TABLE.values():
        for changes in entry.get("also", {}).values():
            assert set(changes) <= harmless | {"sliding_window"}
    assert known_parameters("Qwen/Qwen3-8B-Base") == known_parameters("Qwen/Qwen3-8B")


def test_solar_by_hand() -> None:
    """48 layers of width 4096: attention with 8 of 32 heads for keys and values, three matrices of 14336, two norms."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert known_parameters("upstage/SOLAR-10.7B-v1.0") == 48 * layer + 2 * 32000 * 4096 + 4096 == 10_731_524_096


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("upstage/SOLAR-10.7B-v1.0", "upstage/SOLAR-10.7B-v1.0"),
        ("SOLAR-10.7B-v1.0", "upstage/SOLAR-10.7B-v1.0"),
        ("solar-10.7b", "upstage/SOLAR-10.7B-v1.0"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_names_are_found_as_people_write_them(given: str, found: str) -> None:
    assert shape_config(given).name_or_path == found


def test_an_instruct_model_keeps_what_is_its_own() -> None:
    base, tuned = shape_config("qwen2.5-7b"), shape_config("qwen2.5-7b-instruct")
    assert (base.max_position_embeddings, tuned.max_position_embeddings) == (131072, 32768)
    assert shape_config("gemma-2-2b-it").dtype == torch.bfloat16
    assert shape_config("gemma-2-2b").dtype == torch.float32


def test_what_is_not_known_is_none() -> None:
    assert shape_config("nobody/Llama-3.1-8B") is None  # another's model of that name may have another shape
    assert shape_config("llama-3.1") is None
    assert shape_config("") is None
    assert len(known_shapes()) == len(set(known_shapes())) > len(TABLE)


def test_a_known_shape_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: ModelConfig) -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(shapes, "load_model_config", refuse)
    monkeypatch.setattr(shapes, "cached", lambda name: None)
    assert find_config(ModelConfig("solar-10.7b")).dtype == torch.float16
    assert find_config(ModelConfig("solar-10.7b", dtype="bfloat16")).dtype == torch.bfloat16
    assert find_config(ModelConfig("smollm2")).num_hidden_layers == 30  # the alias of `lowmem fetch`


def test_what_lies_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose name is also a known shape's, and its config.json alone."""
    monkeypatch.chdir(tmp_path)
    make_llama(torch.bfloat16).save_pretrained("solar-10.7b")
    assert find_config(ModelConfig("solar-10.7b")).hidden_size == 32
    assert find_config(ModelConfig("solar-10.7b/config.json")).hidden_size == 32


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("told", [True, False])
def test_the_dtype_is_that_of_the_loaded_weights(tmp_path: Path, dtype: Any, told: bool) -> None:
    """Also where the config does not tell it."""
    from lowmem.config import LoadConfig

    make_llama(torch.bfloat16).save_pretrained(tmp_path)
    if not told:
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = ModelConfig(str(tmp_path), dtype=dtype)
    loaded = load_model(LoadConfig.of(asked, torch.device("cpu")))
    assert find_config(asked).dtype == next(loaded.parameters()).dtype
    assert {p.dtype for p in model_without_data(find_config(asked)).parameters()} == {find_config(asked).dtype}


def test_what_cannot_be_found_says_what_would_do() -> None:
    with pytest.raises(UserError, match=r"did you mean meta-llama/Llama-3\.1-8B\?$"):
        find_config(ModelConfig("meta-llama/Llama-3.1-8"))
    with pytest.raises(
        UserError, match=r"config\.json will do, or the name of a known shape: known are SOLAR-10.7B-v1"
    ) as found:
        find_config(ModelConfig("nobody/nothing-at-all-of-the-kind"))
    assert "\n" not in str(found.value)
    with pytest.raises(UserError, match="there is no file"):
        find_config(ModelConfig("nowhere.gguf"))
