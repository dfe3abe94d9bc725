"""A base model's weights, read one tensor at a time."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lowmem.config import LoadConfig
from lowmem.gguf_layout import GGUFFile, UnsupportedLayoutError
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import load_model, weights_place
from lowmem.stored_quantization import stored_settings
from lowmem.weights import open_safetensors

_REOPEN_BYTES = 1 << 25  # what was read of a mapped file counts as this process's memory until the file is closed


@dataclass
class Weights(ABC):
    """Tensors by their keys on disk.

    Attributes:
        keys: name in the model -> key.
        extra: keys of tensors that the model knows by no single name (experts that it fuses while loading).
        dtype: the dtype that `auto` means.
        spellings: name in the model -> key in the output, where they differ.
        as_trained: quantised weights are stored so, and `read` gives what training computes with.
    """

    keys: dict[str, str]
    extra: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    spellings: dict[str, str] = field(default_factory=dict)
    as_trained: ClassVar[bool] = False

    @abstractmethod
    def read(self, key: str) -> Tensor:
        """The tensor, on the CPU."""

    def output_key(self, name: str) -> str:
        """The key under which the tensor is written: its own on disk, where it has one."""
        return self.spellings.get(name, name)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""


class SafetensorsWeights(Weights):
    """A folder in transformers' format."""

    def __init__(self, folder: Path, names: list[str], prefix: str, dtype: torch.dtype | None) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        else:
            with open_safetensors(folder / "model.safetensors") as file:
                files = dict.fromkeys(file.keys(), "model.safetensors")
        self.files: dict[str, Path] = {key: folder / file for key, file in files.items()}
        known = set(names)
        keys: dict[str, str] = {}
        for key in self.files:
            # transformers puts the prefix of the base class on, or takes it off, where the other spelling is known
            spellings = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
            if name := next((name for name in spellings if name in known and name not in keys), None):
                keys[name] = key
        self._open_path: Path | None = None
        self._handle: Any = None
        self._bytes_read = 0
        super().__init__(keys, sorted(self.files.keys() - set(keys.values())), spellings=dict(keys))
        self.dtype = dtype or next(
            (t for t in map(self._dtype_of, keys.values()) if t.is_floating_point), torch.float32
        )

    def read(self, key: str) -> Tensor:
        """See `Weights`."""
        path = self.files[key]
        if path != self._open_path or self._bytes_read > _REOPEN_BYTES:
            self._handle, self._open_path, self._bytes_read = open_safetensors(path), path, 0
        tensor: Tensor = self._handle.get_tensor(key)
        self._bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    @property
    def num_bytes(self) -> int:
        """See `Weights`."""
        return sum(path.stat().st_size for path in set(self.files.values()))

    def _dtype_of(self, key: str) -> torch.dtype:
        with open_safetensors(self.files[key]) as file:
            return file.get_slice(key)[:0].dtype  # type: ignore[no-any-return]


class QuantisedWeights(SafetensorsWeights):
    """A folder in transformers' format whose linear layers bitsandbytes has quantised; they are unpacked one by one.

    Args:
        folder, names, prefix, dtype: as for `SafetensorsWeights`.
        turned: names of weights that the model keeps transposed (GPT-2's Conv1D); on disk they are not.
        device: where weights are unpacked; rounding may differ a little between devices.
    """

    as_trained = True

    def __init__(
        self, folder: Path, names: list[str], prefix: str, dtype: torch.dtype | None, turned: set[str], device: Any
    ) -> None:
        super().__init__(folder, names, prefix, dtype)
        self.turned, self.device = turned, device
        self.beside: dict[str, list[str]] = {}  # key of a weight -> keys of what is stored beside it
        named = {key: name for name, key in self.keys.items()}
        left = []
        for key in self.extra:
            weight = next((w for w in (*_heads(key), _sibling(key)) if w in named), None)
            if weight is None:
                left.append(key)
            else:
                self.beside.setdefault(weight, []).append(key)
        self.extra, self._names = left, named

    def read(self, key: str) -> Tensor:
        """See `Weights`."""
        tensor = super().read(key)
        if key not in self.beside:
            return tensor
        bnb = import_bitsandbytes()
        parts = {name: super(QuantisedWeights, self).read(name) for name in self.beside[key]}
        if tensor.dtype == torch.int8:
            scales = next(part for name, part in parts.items() if name.endswith("SCB"))
            whole = bnb.functional.int8_vectorwise_dequant(tensor.to(self.device), scales.to(self.device))
        else:
            given = {name.removeprefix(f"{key}."): part for name, part in parts.items()}
            packed = bnb.nn.Params4bit.from_prequantized(tensor, given, device=self.device)
            whole = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
        result: Tensor = whole.T if self._names[key] in self.turned else whole
        return result.cpu()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors once they are unpacked, at most."""
        return 4 * super().num_bytes


def _heads(key: str) -> Iterator[str]:
    """`a.weight.b.c` -> `a.weight.b`, `a.weight`, ..."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _sibling(key: str) -> str:
    """`a.SCB` -> `a.weight`."""
    return f"{key.rpartition('.')[0]}.weight"


class GGUFWeights(Weights):
    """A GGUF file whose blocks are unpacked tensor by tensor."""

    def __init__(self, path: Path, names: list[str], config: Any) -> None:
        self.file = GGUFFile(path, config)
        super().__init__({name: name for name in names if self.file.has(name)})

    def read(self, key: str) -> Tensor:
        """See `Weights`."""
        return torch.from_numpy(np.array(self.file.read(key), np.float32))

    @property
    def num_bytes(self) -> int:
        """See `Weights`."""
        return self.file.num_weights * 4


class LoadedWeights(Weights):
    """A model that transformers has loaded whole."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, Tensor] = model.state_dict()
        dtype = next((t.dtype for t in self.state.values() if t.is_floating_point()), torch.float32)
        super().__init__({name: name for name in self.state}, dtype=dtype)

    def read(self, key: str) -> Tensor:
        """See `Weights`."""
        return self.state[key]

    @property
    def num_bytes(self) -> int:
        """See `Weights`."""
        return sum(t.numel() * t.element_size() for t in self.state.values())


def open_weights(load: LoadConfig, model: Any, needed: set[str], tied: Mapping[str, str]) -> tuple[Weights, str | None]:
    """The weights behind a name, tensor by tensor where that is possible.

    Args:
        load: which model; quantisation is left out.
        model: the same without data (meta device).
        needed: names that must be found one by one.
        tied: name -> the name it shares its tensor with; either may stand on disk.

    Returns:
        The weights, and a notice where the whole model had to be loaded.
    """
    assert load.model is not None
    place = weights_place(load.model)
    names = list(model.state_dict())
    stored = getattr(model.config, "dtype", None)
    try:
        if place.suffix == ".gguf":
            found: Weights = GGUFWeights(place, names, model.config)
        else:
            given = (place, names, model.base_model_prefix, stored)
            turned = {f"{name}.weight" for name, m in model.named_modules() if type(m).__name__ == "Conv1D"}
            quantised = stored_settings(model.config) is not None
            found = QuantisedWeights(*given, turned, load.device) if quantised else SafetensorsWeights(*given)
        for name, other in tied.items():
            if other not in found.keys and name in found.keys:
                found.keys[other] = found.keys.pop(name)
        missing = sorted(needed - found.keys.keys())
        reason = f"no tensor is called {missing[0]}" if missing else None
    except FileNotFoundError as error:
        reason = f"no {Path(str(error.filename or 'safetensors')).name}"
    except UnsupportedLayoutError as error:
        reason = str(error)
    if reason is None:
        return found, None
    plain = replace(load, device=torch.device("cpu"), from_pretrained={})
    notice = f"the base model was loaded whole, on the CPU: {place.name} cannot be read tensor by tensor ({reason})"
    return LoadedWeights(load_model(plain)), notice
