"""Hidden states that leave the card between a layer's forward and its backward.

The copy out starts when a layer begins and runs beside it; the tensor is let go when the next one is kept, by which
time the copy must have ended. In backward a layer's state is asked for one layer ahead. All copies go through one side
stream, so a buffer that is used again is never read and written at the same time:

    out    the side stream waits for the layer's input to be computed; the main stream waits for the copy before the
           memory of the input may be used for something else
    back   memory is allocated on the main stream, and the side stream waits for it before it writes; the main stream
           waits for the copy before it reads

So the allocator never hands memory to one stream that the other still works on, and `record_stream`, which delays
frees by an unknown time, is not needed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lowmem.ops.host_memory import HostPool

_WAITING = 2  # tensors on their way to the disk


class Shelf(Protocol):
    """Where bytes are put, and got back from."""

    def put(self, tensor: Tensor) -> Any:
        """Start to copy a tensor out; returns a ticket. The tensor must live until `settle`."""

    def settle(self, ticket: Any) -> None:
        """Afterwards the tensor's memory may be used for something else."""

    def begin(self, ticket: Any, like: Tensor) -> Any:
        """Start to copy back into new memory; returns what `end` wants."""

    def end(self, started: Any) -> Tensor:
        """The tensor, ready for use."""


class Kept:
    """A tensor that is away, or on its way.

    Args:
        keeper: who keeps it.
        tensor: detached from no graph; the original is used while the layer runs forward.
        before: the one kept before it in the same pass, which backward wants next.
    """

    def __init__(self, keeper: Keeper, tensor: Tensor, before: Kept | None) -> None:
        self.keeper = keeper
        self.shape, self.dtype, self.wants_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self.before = weakref.ref(before) if before is not None else None
        self.marker = tensor.new_empty(0)  # of its device and dtype, without its memory
        self._here: Tensor | None = tensor
        self._ran = False
        self._ticket = keeper.shelf.put(tensor.detach())
        self._coming: Any = None

    def leave(self) -> None:
        """Let go of the original."""
        if self._here is not None:
            self.keeper.shelf.settle(self._ticket)
            self._here = None

    def start_back(self) -> None:
        """Ask for it, to be there when `get` is called."""
        if self._here is None and self._coming is None:
            self._coming = self.keeper.shelf.begin(self._ticket, self.marker.new_empty(self.shape))

    def get(self) -> Tensor:
        """First, in forward, the original; then, in backward, a copy, while the one before it is asked for."""
        if not self._ran and self._here is not None:
            self._ran = True
            return self._here
        before = self.before() if self.before is not None else None
        tensor = self._here
        self.leave()  # who asks holds it now; asked again, it would come from the shelf
        if tensor is None:
            self.start_back()
            coming, self._coming = self._coming, None
            tensor = self.keeper.shelf.end(coming).requires_grad_(self.wants_grad)
        if before is not None:
            before.start_back()
        return tensor


class Keeper:
    """Keeps the inputs of layers on a shelf, in the order in which they come."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._last: weakref.ref[Kept] | None = None

    def keep(self, tensor: Tensor, first: bool) -> Kept:
        """Start to put a tensor away, and let go of the one before.

        Args:
            tensor: input of a layer.
            first: the layer is the first of the pass.
        """
        last = self.leave_last()
        kept = Kept(self, tensor, None if first else last)
        self._last = weakref.ref(kept)
        return kept

    def leave_last(self) -> Kept | None:
        """Let go of the tensor that was kept last; returns what stands for it."""
        last = self._last() if self._last is not None else None
        if last is not None:
            last.leave()
        return last


class HostShelf:
    """Bytes in the host's memory. Works on a card, on a CPU (a plain copy), and without data."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        cuda: Any = torch.cuda
        self._side = cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def put(self, tensor: Tensor) -> _Ticket:
        """Copy out, beside the computation."""
        ticket = _Ticket(self.pool, tensor)
        if self._side is None:
            ticket.buffer.copy_(tensor)
            return ticket
        self._side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._side):
            ticket.buffer.copy_(tensor, non_blocking=True)
            ticket.done = self._side.record_event()
        return ticket

    def settle(self, ticket: _Ticket) -> None:
        """The main stream goes on only when the copy has ended."""
        if ticket.done is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(ticket.done)

    def begin(self, ticket: _Ticket, like: Tensor) -> tuple[Tensor, Any]:
        """Copy back, beside the computation."""
        if self._side is None:
            return like.copy_(ticket.buffer), None
        self._side.wait_stream(torch.cuda.current_stream(like.device))
        with torch.cuda.stream(self._side):
            like.copy_(ticket.buffer, non_blocking=True)
            return like, self._side.record_event()

    def end(self, started: tuple[Tensor, Any]) -> Tensor:
        """The main stream waits for the copy."""
        tensor, done = started
        if done is not None:
            torch.cuda.current_stream(tensor.device).wait_event(done)
        return tensor


class _Ticket:
    """A buffer in use; it is free again when nobody can ask for the tensor any more."""

    def __init__(self, pool: HostPool, tensor: Tensor) -> None:
        memory = pool.take(tensor.numel() * tensor.element_size())
        self.buffer = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        self.done: Any = None
        weakref.finalize(self, pool.give_back, memory)


class DiskShelf:
    """Bytes in a file, written and read by a thread; the operating system is told not to keep them in memory.

    Args:
        folder: where the file is made (null: the system's folder for temporary files); it has no name, so nothing is
            left when the process ends.
        device: whose tensors are kept.
    """

    def __init__(self, folder: str | Path | None, device: torch.device) -> None:
        self.device = device
        self.written_bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: deque[Future[None]] = deque()
        self._file: Any = None
        if device.type != "meta":
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as the run
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def put(self, tensor: Tensor) -> _Place:
        """Copy to the host at once (on a CPU it is there), and to the disk beside the computation."""
        size = tensor.numel() * tensor.element_size()
        place = _Place(self, size)
        if self._file is not None:
            while len(self._writing) >= _WAITING:  # a slow disk slows the run down; it does not fill the memory
                self._writing.popleft().result()
            data = [tensor.cpu().contiguous()]  # a list, so that the thread can let go before it says that it is done
            place.writing = self._thread.submit(self._write, place.offset, data)
            self._writing.append(place.writing)
        self.written_bytes += size
        return place

    def settle(self, ticket: _Place) -> None:
        """The copy on the host is complete already; on a CPU it is the tensor itself."""
        if self.device.type == "cpu" and ticket.writing is not None:
            ticket.writing.result()

    def begin(self, ticket: _Place, like: Tensor) -> tuple[Tensor, Future[Tensor] | None]:
        """Read beside the computation; the thread does one thing after the other, so what is read has been written."""
        if self._file is None:
            return like, None
        return like, self._thread.submit(self._read, ticket, torch.empty(like.shape, dtype=like.dtype))

    def end(self, started: tuple[Tensor, Future[Tensor] | None]) -> Tensor:
        """Wait for the disk, then copy to the device."""
        tensor, reading = started
        return tensor if reading is None else tensor.copy_(reading.result())

    def _write(self, offset: int, data: list[Tensor]) -> None:
        view = _bytes(data.pop())
        written = 0
        while written < len(view):
            written += os.pwrite(self._file.fileno(), view[written : written + 2**30], offset + written)
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)

    def _read(self, place: _Place, data: Tensor) -> Tensor:
        if place.writing is not None:
            place.writing.result()  # an error of the disk is raised here
        view = _bytes(data)
        read = 0
        while read < len(view):
            got = os.preadv(self._file.fileno(), [view[read : read + 2**30]], place.offset + read)
            if got == 0:
                raise OSError("the offload file ends too early")
            read += got
        os.posix_fadvise(self._file.fileno(), place.offset, len(view), os.POSIX_FADV_DONTNEED)
        return data


def _bytes(data: Tensor) -> memoryview:
    array: Any = data.view(torch.uint8).numpy()
    return memoryview(array.reshape(-1))


class _Place:
    """A stretch of the file in use."""

    def __init__(self, shelf: DiskShelf, size: int) -> None:
        free = shelf._free.setdefault(size, [])
        if free:
            self.offset = free.pop()
        else:
            self.offset, shelf._end = shelf._end, shelf._end + size
        self.writing: Future[None] | None = None
        weakref.finalize(self, free.append, self.offset)
