"""How a model lies in a GGUF file: names and the order of rows, in both directions (Llama and Qwen2 families)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from lowmem.errors import UserError

# transformers' model type -> the architecture that llama.cpp knows it by
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
_PERMUTED = ("llama",)  # architectures whose rotary pairs lie side by side instead of half a head apart


class UnsupportedLayoutError(UserError):
    """A family of models whose layout in GGUF is not known here."""


class Layout:
    """Names and row order of one model.

    Args:
        config: transformers' configuration.

    Raises:
        UnsupportedLayoutError: a family that is not known here.
    """

    def __init__(self, config: Any) -> None:
        import gguf

        kind = str(config.model_type)
        if kind not in ARCHITECTURES:
            raise UnsupportedLayoutError(
                f"gguf: models of type {kind} are not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[kind]
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def gguf_name(self, name: str) -> str | None:
        """The name in a GGUF file of a tensor of transformers' model; None where there is none."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return None if found is None else str(found)

    def to_gguf(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a query or key projection in the order of GGUF; everything else as it is."""
        heads = self._permuted_heads(name)
        if heads is None:
            return rows
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    def from_gguf(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """The way back."""
        heads = self._permuted_heads(name)
        if heads is None:
            return rows
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _permuted_heads(self, name: str) -> int | None:
        if self.architecture not in _PERMUTED:
            return None
        return next((heads for part, heads in self._heads.items() if part in name.split(".")), None)


class GGUFFile:
    """The tensors of a GGUF file under transformers' names; blocks are unpacked when a tensor is read.

    Raises:
        UnsupportedLayoutError: a family that is not known here.
    """

    def __init__(self, path: Path, config: Any) -> None:
        import gguf

        self.layout = Layout(config)
        reader = gguf.GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        if architecture != self.layout.architecture:
            raise UnsupportedLayoutError(f"gguf: the architecture {architecture} is not supported")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return self.layout.gguf_name(name) in self._tensors

    def read(self, name: str) -> NDArray[Any]:
        """The tensor in float32, in transformers' shape and order."""
        import gguf

        tensor = self._tensors[str(self.layout.gguf_name(name))]
        return self.layout.from_gguf(name, gguf.dequantize(tensor.data, tensor.tensor_type))

    @property
    def num_weights(self) -> int:
        """Of all tensors."""
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())
