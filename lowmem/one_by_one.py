"""Loading a model one tensor at a time: transformers' own loading, fed from files that are read and not mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lowmem.config import LoadConfig, ModelConfig
from lowmem.loading import load_model_config, model_without_data, place_of_model
from lowmem.stored_quantization import prepare
from lowmem.tensor_files import StoredTensor, stored_tensors

# (full name, parameter) -> the parameter to be kept in its place
Place = Callable[[str, nn.Parameter], nn.Parameter]


_FILES = ("model.safetensors", "model.safetensors.index.json")  # in transformers' order
_NO_SAFETENSORS = f"it has no {_FILES[0]}"


class NotOneByOneError(Exception):
    """A model whose weights cannot be read one by one; the message says why."""


def load_one_by_one(load: LoadConfig, place: Place | None = None) -> Any:
    """The model that `from_pretrained` makes, bit for bit, of weights that are read from safetensors one by one.

    It is `from_pretrained`: classes, skipped layers, conversions, ties, buffers and configurations are its own; only
    the weights come from here, in its order (by name: layer after layer). In host memory lie, beside the parts of the
    model that belong there, one weight as it is stored, and one more where it is cast; where transformers fuses
    several weights into one, all of these. On the device lie the weights so far, and one on its way to be quantised.

    Args:
        load: which model, how.
        place: is shown every parameter as soon as it is on its device, quantised where it is to be, in the order of
            their names; what it returns is kept in the model.

    Raises:
        NotOneByOneError: the weights are in no safetensors files, or the model brings code of its own.
        UserError: a file is damaged; or the stored weights are quantised, and not as `load` asks for.
    """
    assert load.model is not None
    weights = tensors_of(load)
    config = load_model_config(load.model)
    options = dict(load.from_pretrained)
    if load.attn_implementation:
        config._attn_implementation = options["attn_implementation"] = load.attn_implementation
    source = model_without_data(config)
    wanted = prepare(source.config, options.pop("quantization_config", None), load.model.name_or_path)
    if wanted is not None:
        options["quantization_config"] = wanted
    name = place_of_model(load.model)[0]
    with in_turn(), placing(type(source), place):
        found = type(source).from_pretrained(
            None, config=source.config, state_dict=weights, dtype=load.dtype, device_map={"": load.device}, **options
        )
    model = found[0] if isinstance(found, tuple) else found
    model.config.name_or_path = name
    if model.can_generate():
        model.adjust_generation_fn(
            *(None, True, None, name),
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=False,
            token=None,
            revision=load.model.revision or "main",
            subfolder="",
            trust_remote_code=False,
        )
    return found


def tensors_of(load: LoadConfig) -> dict[str, StoredTensor]:
    """The weights behind a name, by their keys; those on the hub are fetched.

    Raises:
        NotOneByOneError: as `load_one_by_one`.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    assert load.model is not None
    if (reason := obstacle(load.model)) is not None:
        raise NotOneByOneError(reason)
    name = place_of_model(load.model)[0]
    options: dict[str, Any] = {"revision": load.model.revision or "main"}
    files: list[str] = []
    for file in _FILES:
        found = cached_file(
            name,
            file,
            **options,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            files = get_checkpoint_shard_files(name, found, **options)[0] if file.endswith(".json") else [found]
            break
    if not files:
        raise NotOneByOneError(_NO_SAFETENSORS)
    try:
        return {key: tensor for file in files for key, tensor in stored_tensors(Path(file)).items()}
    except KeyError as error:
        raise NotOneByOneError(f"it holds weights of dtype {error.args[0]}") from error


def obstacle(model: ModelConfig) -> str | None:
    """Why a model's weights cannot be read one by one, as far as that shows without a network; None: nothing is known.

    Args:
        model: what is loaded.
    """
    if model.trust_remote_code:
        return "model.trust_remote_code: code that comes with a model loads it itself"
    name, gguf = place_of_model(model)
    folder = Path(name)
    if gguf:
        return "it is a GGUF file"
    if (folder / "adapter_config.json").is_file():
        return "an adapter lies beside it"
    if any(folder.glob("*.bin")) and not any((folder / file).is_file() for file in _FILES):
        return _NO_SAFETENSORS
    return None


@contextmanager
def in_turn() -> Iterator[None]:
    """Inside, transformers reads a weight when it needs it; else it would let four threads read ahead without bound."""
    with patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
        yield


@contextmanager
def placing(model_class: type[nn.Module], place: Place | None) -> Iterator[None]:
    """Inside, the parameters that a new model of this class is given come by `place`."""
    if place is None:
        yield
        return
    models: list[nn.Module] = []
    names: dict[int, str] = {}

    def grows(module: nn.Module, name: str, part: nn.Module | None) -> None:
        if not models and type(module) is model_class:
            models.append(module)

    def filled(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:  # no weight yet
            return None
        if not names:
            names.update({id(m): f"{path}." if path else "" for path, m in models[0].named_modules()})
        return place(names[id(module)] + name, parameter)

    hooks = [register_module_module_registration_hook(grows), register_module_parameter_registration_hook(filled)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
