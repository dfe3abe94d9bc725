"""An adapter in peft's format, put on a model without data and merged one module at a time, by peft itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.peft_methods import MERGED_BY_LAYER
from lowmem.weights import open_safetensors

_PREFIX = "base_model.model."  # of peft's names, before the model's own
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal")  # they leave the base weights as they are


class AdapterLayers:
    """What an adapter does to a model, module by module.

    The model is on the meta device. To merge a module, its weights and those of the adapter are put in, peft merges
    them (`merge` of its layers: LoRA, rsLoRA, DoRA, trained tokens), the result is taken out, and the data dropped.

    Args:
        model: transformers' model on the meta device; it is wrapped in place.
        folder: the adapter.

    Raises:
        UserError: a kind of adapter that cannot be merged, or one that belongs to another model.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        import_bitsandbytes()  # before peft does
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict

        config: Any = PeftConfig.from_pretrained(str(folder))
        start = getattr(config, "init_lora_weights", True)
        method = config.peft_type.value
        if method not in MERGED_BY_LAYER or start not in _PLAIN_INITIALISATIONS:
            what = method if method not in MERGED_BY_LAYER else f"init_lora_weights={start}"
            raise UserError(
                f"merge: an adapter of {what} cannot be added to the base weights layer by layer; use it through peft "
                "(`lowmem export RUN OUT --format peft`)"
            )
        config.inference_mode = True
        names = set(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied weights, which are taken care of, and about Conv1D
            wrapped: Any = PeftModel(model, config)  # type: ignore[arg-type]
        live = wrapped.state_dict(keep_vars=True)
        keys = get_peft_model_state_dict(wrapped, state_dict=live, save_embedding_layers=False)
        self.path = folder / "adapter_model.safetensors"
        with open_safetensors(self.path) as file:
            stored = set(file.keys())
        by_tensor = {id(tensor): key for key, tensor in keys.items() if key in stored}
        full = {name: by_tensor[id(tensor)] for name, tensor in live.items() if id(tensor) in by_tensor}
        left = stored - set(full.values())
        full |= {key: key for key in left if _own_name(key) in names}  # the embedding, saved along
        self.keys = {name.removeprefix(_PREFIX): key for name, key in full.items()}  # place in the model -> in the file
        missing = sorted({key for key in keys if key not in stored and id(keys[key]) not in by_tensor})
        unexpected = sorted(stored - set(self.keys.values()))
        if missing or unexpected:
            raise UserError(
                f"{self.path}: missing {missing[:3]}, unexpected {unexpected[:3]}; it belongs to another model"
            )
        self.units = _units(wrapped.get_base_model())
        unit_paths = tuple(f"{path}." for path in self.units)
        self.direct = {_own_name(n): k for n, k in self.keys.items() if not n.startswith(unit_paths)}
        self.changed = {*self.direct, *(n for path, unit in self.units.items() for n in _base_names(path, unit))}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def merged(self, name: str, base: Callable[[str], Tensor]) -> Tensor:
        """A changed weight in float32.

        Args:
            name: of `changed`.
            base: gives weights of the base model by name.
        """
        if name in self.direct:
            return self._read(self.direct[name])
        path = next(path for path in self.units if name.startswith(f"{path}."))
        if self._last[0] != path or name not in self._last[1]:
            self._last = (path, self._merge(path, base))
        return self._last[1].pop(name)

    def _merge(self, path: str, base: Callable[[str], Tensor]) -> dict[str, Tensor]:
        unit = self.units[path]
        bases = {id(tensor): name for name, tensor in _base_names(path, unit).items()}
        for suffix, parameter in list(unit.named_parameters(remove_duplicate=False)):
            key = self.keys.get(f"{path}.{suffix}")
            if key is not None:
                _put(unit, suffix, self._read(key))
            elif id(parameter) in bases and not hasattr(unit, "modules_to_save"):
                # a copy: peft adds in place, and the tensor may be a view of the mapped file
                _put(unit, suffix, base(bases[id(parameter)]).to(torch.float32, copy=True))
        for module in reversed(list(unit.modules())):  # the innermost first
            if hasattr(module, "merge") and not getattr(module, "merged", False):
                module.merge()
        result = {name: tensor.data for name, tensor in _base_names(path, unit).items()}
        for module in unit.modules():
            if hasattr(module, "merged_adapters"):
                module.merged_adapters.clear()
        unit.to_empty(device="meta")
        return result

    def _read(self, key: str) -> Tensor:
        with open_safetensors(self.path) as file:
            tensor: Tensor = file.get_tensor(key).float()
        return tensor


def _units(model: nn.Module) -> dict[str, Any]:
    """Outermost modules that peft has put in place of the model's own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found[path] = module
    return found


def _base_names(path: str, unit: Any) -> dict[str, Tensor]:
    """The model's own parameters inside a unit, by the names they have in the plain model."""
    if hasattr(unit, "modules_to_save"):
        module = unit.modules_to_save[unit.active_adapters[0]]
    else:
        module = unit.token_adapter if hasattr(unit, "token_adapter") else unit
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return {f"{path}.{name}": tensor for name, tensor in module.named_parameters()}


def _own_name(key: str) -> str:
    return key.removeprefix(_PREFIX).replace(".base_layer.", ".")


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module.get_submodule(parent)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
