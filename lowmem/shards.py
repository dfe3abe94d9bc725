"""Folders that appear whole or not at all, and safetensors files that are written tensor by tensor."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lowmem.durable import sync
from lowmem.errors import UserError

# what the user can put right
_TOLD = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ENTRY_BYTES = 160  # of a header: dtype, shape and offsets of one tensor, without its name


@contextmanager
def whole_or_nothing(place: Path) -> Iterator[Path]:
    """A path beside `place` to fill with a file or folder; it becomes `place` when the block ends well.

    Raises:
        UserError: `place` exists already (it is not touched), or the disk is full.
    """
    if place.exists() or place.is_symlink():
        raise UserError(f"{place.absolute()} exists already and is not overwritten; give another place")
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for file in [*partial.rglob("*"), partial] if partial.is_dir() else [partial]:
            sync(file)
        if place.exists():
            raise UserError(f"{place.absolute()} has come up meanwhile and is not overwritten; give another place")
        partial.rename(place)
        sync(place.parent)
    except OSError as error:
        if error.errno not in _TOLD:
            raise
        raise UserError(f"{place.absolute()}: cannot be written: {error.strerror}; nothing was left there") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif partial.exists():
            partial.unlink()


def require_space(place: Path, num_bytes: int) -> None:
    """Raise UserError where the disk of `place` has less than `num_bytes` left."""
    parent = next(folder for folder in place.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserError(
            f"{place.absolute()}: needs {num_bytes / 1e9:.2f} GB, and {parent} has {free / 1e9:.2f} GB free; give "
            "another place, or make room"
        )


class ShardWriter:
    """Writes a model as safetensors, each tensor as soon as it is there; nothing is kept in memory.

    The header of a safetensors file stands in front of the tensors and may be padded with spaces, so room for it is
    left free and filled when the file is full (https://github.com/huggingface/safetensors#format).

    Args:
        folder: where the files go.
        names: names of all tensors that may come; they bound the size of a header.
        shard_bytes: a file that holds more is closed.
    """

    def __init__(self, folder: Path, names: list[str], shard_bytes: int = 5_000_000_000) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        room = 64 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self.header_bytes = room + -room % 8
        self.weight_map: dict[str, int] = {}  # name -> number of its file
        self.total_bytes = 0
        self._file: IO[bytes] | None = None
        self._entries: dict[str, Any] = {}
        self._offset = self._number = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        # readers want every tensor to start at a multiple of its item size, and no gaps
        if self._file and (self._offset + size > self.shard_bytes or self._offset % tensor.element_size()):
            self._close_file()
        if self._file is None:
            self._number += 1
            self._file = self._path(self._number).open("wb")
            self._file.write(bytes(8 + self.header_bytes))
        if name in self.weight_map:
            raise AssertionError(f"{name} was written twice")
        end = self._offset + size
        self._entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.weight_map[name], self._offset = self._number, end
        self.total_bytes += size

    def close(self) -> None:
        """Finish the last file, and give all files their names."""
        self._close_file()
        if self._number == 1:
            self._path(1).rename(self.folder / "model.safetensors")
            return
        names = {n: f"model-{n:05d}-of-{self._number:05d}.safetensors" for n in range(1, self._number + 1)}
        for number, name in names.items():
            self._path(number).rename(self.folder / name)
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {tensor: names[number] for tensor, number in sorted(self.weight_map.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _close_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        assert len(header) <= self.header_bytes
        self._file.seek(0)
        self._file.write(self.header_bytes.to_bytes(8, "little") + header.ljust(self.header_bytes))
        self._file.close()
        self._file, self._entries, self._offset = None, {}, 0

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.partial"
