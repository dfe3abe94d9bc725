"""Buffers in the host's memory, pinned to the byte, for tensors that leave the card for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem.ops.without_data import keeping, remember_place


class HostPool:
    """Byte buffers that are used again and again; none is ever larger than what was asked for.

    torch's own pinned allocator rounds every buffer up to a power of two, so that 33 GiB could become 64; here a buffer
    is ordinary memory that is registered with CUDA.

    Args:
        device: whose tensors are kept; `cuda`: buffers are pinned; `meta`: they have no data.
        pinned_limit: bytes that may be pinned; beyond, and where the system refuses, buffers are pageable.
        tell: is told once, in words, when that happens.

    Attributes:
        pinned_bytes, pageable_bytes: what is held now, in use or not.
    """

    def __init__(self, device: torch.device, pinned_limit: int | None, tell: Callable[[str], None]) -> None:
        self.device, self.pinned_limit, self.tell = device, pinned_limit, tell
        self.pinned_bytes = self.pageable_bytes = 0
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes (uint8); give it back with `give_back`."""
        fitting = [buffer for buffer in self._free if buffer.numel() >= size]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not found]
            return found
        if self._free:  # one that is too small makes room, so that longer rows do not add to shorter ones
            smallest = min(self._free, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not smallest]
            del smallest
        return self._new(size)

    def give_back(self, buffer: Tensor) -> None:
        """The buffer is free again."""
        self._free.append(buffer)

    def _new(self, size: int) -> Tensor:
        pins = self.device.type != "cpu" and (
            self.pinned_limit is None or self.pinned_bytes + size <= self.pinned_limit
        )
        if self.device.type == "meta":
            with keeping("pinned" if pins else "host"):
                buffer = torch.empty(size, dtype=torch.uint8, device="meta")
            remember_place(buffer, "pinned" if pins else "host")
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
            if pins and (reason := _register(buffer)):
                pins = False
                self.tell(f"{reason}; pageable memory is used, which is slower")
        if self.device.type != "cpu" and not pins and self.pinned_limit is not None:
            self.tell(f"more than {self.pinned_limit:,} bytes would be pinned; the rest is pageable, which is slower")
        self._count(pins, size)
        weakref.finalize(buffer, self._count, pins, -size)
        return buffer

    def _count(self, pinned: bool, size: int) -> None:
        if pinned:
            self.pinned_bytes += size
        else:
            self.pageable_bytes += size


def _register(buffer: Tensor) -> str | None:
    """Pin a buffer for as long as it lives; the reason why it could not be."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    address = buffer.data_ptr()
    error = runtime.cudaHostRegister(address, buffer.numel(), 0)
    if int(error) != 0:
        return f"the system refuses to pin {buffer.numel():,} bytes ({error})"
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return None
