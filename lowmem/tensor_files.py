"""Safetensors files that are read tensor by tensor, and never mapped: what is read is all the memory that it takes."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import UserError
from lowmem.weights import open_safetensors

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. It has the parts of `safetensors`' slices that transformers asks for while it loads.

    Attributes:
        path: the file.
        name: its key there.
        kind: its dtype as safetensors writes it (`BF16`).
        shape: its shape.
        offset: where in the file it begins.
    """

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return _DTYPES[self.kind]

    def is_floating_point(self) -> bool:
        """As `Tensor` says it."""
        return self.dtype.is_floating_point

    def get_dtype(self) -> str:
        """As `safetensors` says it."""
        return self.kind

    def get_shape(self) -> list[int]:
        """As `safetensors` says it."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read it, and take a part (`...`: all of it)."""
        whole = self.read()
        return whole if index is ... else whole[index]

    def read(self) -> Tensor:
        """The tensor, in memory of its own.

        Raises:
            UserError: the file ends before it.
        """
        _give_back()
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if not tensor.numel():
            return tensor
        into = tensor.reshape(-1).view(torch.uint8).numpy().data
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(into) != len(into):  # type: ignore[attr-defined]
                raise UserError(f"{self.path}: the file is damaged (it ends within {self.name}); take another copy")
        return tensor


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; null with another allocator."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _give_back() -> None:
    """Return freed memory to the system.

    glibc keeps it in the holes between what stays, and weights that are read, quantised and let go leave many: of 1.1
    billion weights, 600 MiB beside a model of 727.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, by key. Only its header is read.

    Raises:
        UserError: the file is damaged.
        KeyError: it holds a dtype that is unknown here.
    """
    with open_safetensors(path):  # checks the header
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        kind, start = str(entry["dtype"]), int(entry["data_offsets"][0])
        _ = _DTYPES[kind]
        found[name] = StoredTensor(path, name, kind, tuple(entry["shape"]), 8 + length + start)
    return found
