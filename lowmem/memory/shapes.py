"""Shapes of well-known models, so that an estimate needs neither weights nor a network."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from lowmem.config import ModelConfig
from lowmem.errors import UserError
from lowmem.fetch import WEIGHTS, cached
from lowmem.loading import load_model_config
from lowmem.schema import nearest

# what people leave out of a name
_ENDINGS = ("-hf", "-v1.0")


def known_shapes() -> list[str]:
    """The hub ids whose shapes are built in."""
    return sorted(_configs())


def known_parameters(name: str) -> int:
    """How many weights the hub says a built-in shape has (tied ones once)."""
    return int(_table()[_base_of(name)]["parameters"])


def shape_config(name: str) -> Any:
    """The configuration (transformers) of a built-in shape, in the dtype of its checkpoint; null where there is none.

    Args:
        name: a hub id, or its last part, in any case (`llama-3.1-8b`); `-hf` and `-v1.0` may be left out.
    """
    found = _id_of(name)
    if found is None:
        return None
    from transformers import CONFIG_MAPPING

    fields = {**_configs()[found], "_name_or_path": found}
    return CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)


def find_config(model: ModelConfig) -> Any:
    """The configuration of a model, with the dtype its weights would be loaded in. No weights are read.

    A folder, a `config.json` or a GGUF file on this machine is taken first, then the built-in shapes, then the hub and
    its cache. An alias (`smollm2`) that was never fetched is a built-in shape, too.

    Args:
        model: as in a recipe; `dtype: auto` is the checkpoint's.

    Raises:
        UserError: there is no such model.
    """
    name = model.name_or_path
    alias = WEIGHTS.get(name)
    if Path(name).exists():
        found = load_model_config(model)
    else:
        found = shape_config(alias.hub_id if alias else name) or _from_hub(model)
    if alias and str(cached(name)).endswith(".gguf"):  # unpacked, as any GGUF file; to read it would take seconds
        found.dtype = None
    found.dtype = _dtype(model, found)
    return found


def _from_hub(model: ModelConfig) -> Any:
    name = model.name_or_path
    try:
        return load_model_config(model)
    except UserError as error:
        if Path(name).suffix in (".gguf", ".json"):  # a file that is not there
            raise
        near = nearest(name, [*known_shapes(), *_short_names()])
        hint = (
            f"did you mean {near}?" if near else f"known are {', '.join(base.rpartition('/')[2] for base in _table())}"
        )
        raise UserError(
            f"{error}. Without weights a config.json will do, or the name of a known shape: {hint}"
        ) from error


def _dtype(model: ModelConfig, found: Any) -> torch.dtype:
    if model.dtype != "auto":
        return getattr(torch, model.dtype)  # type: ignore[no-any-return]
    if isinstance(found.dtype, torch.dtype):
        return found.dtype
    return _stored_dtype(Path(model.name_or_path)) or torch.float32  # as transformers: what has no dtype is float32


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """The first floating-point dtype in a folder's safetensors, from the header alone."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - not a dict
                tensor = weights.get_slice(key)
                name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}.get(
                    tensor.get_dtype()
                )
                if name:
                    return getattr(torch, name)  # type: ignore[no-any-return]
    return None


# -- the list ---------------------------------------------------------------------------------------------------------


@cache
def _table() -> dict[str, Any]:
    text = files("lowmem.memory").joinpath("shapes.json").read_text(encoding="utf-8")
    return json.loads(text)["shapes"]  # type: ignore[no-any-return]


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """Hub id -> the fields of its config.json; ids of the same shape under their own names."""
    found = {}
    for name, entry in _table().items():
        for other, changes in {name: {}, **entry.get("also", {})}.items():
            found[other] = {**entry["config"], **changes}
    return found


def _base_of(name: str) -> str:
    return next(base for base, entry in _table().items() if name == base or name in entry.get("also", {}))


@cache
def _short_names() -> dict[str, str]:
    """Short name -> hub id."""
    found: dict[str, str] = {}
    for name in sorted(_configs()):
        last = name.rpartition("/")[2].lower()
        for short in (last, *(last.removesuffix(ending) for ending in _ENDINGS)):
            found.setdefault(short, name)
    return found


def _id_of(name: str) -> str | None:
    wanted = name.lower()
    if "/" in wanted:
        return next((known for known in _configs() if known.lower() == wanted), None)
    return _short_names().get(wanted)
