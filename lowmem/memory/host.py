"""The host's side of a run that is followed without data: pinned batches, and what threads would do meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lowmem.memory.moments import moments
from lowmem.memory.trace import Trace
from lowmem.ops.without_data import keeping, remember_place

MIB = 2**20
# Resident pages of a process that has trained a tiny QLoRA for two steps (measured with psutil: Linux x86-64, Python
# 3.11, torch 2.13 for CPUs, transformers 5.24, peft 0.21, bitsandbytes 0.50; without quantisation it is 400 MiB).
PROCESS_BYTES = 466 * MIB
# What CUDA's libraries and the driver add to that. An allowance, not a measurement.
CUDA_LIBRARIES_BYTES = 1536 * MIB


class AtOnce:
    """Stands for a pool of threads: what it is given runs at once, where the trace sees it, in one order for ever.

    It is also the worst case: nothing that a thread would make is made later.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        pass

    def __enter__(self) -> AtOnce:
        """Nothing is opened."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing is left to do."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """The result, as a future that is done."""
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is left to do."""


@contextmanager
def pinned_batches() -> Iterator[None]:
    """Inside, `Tensor.pin_memory` works without a card, and the trace sees what it takes."""
    from lowmem import batches

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pinned))
        stack.enter_context(patch.object(batches, "ThreadPoolExecutor", AtOnce))
        yield


def _pinned(tensor: Tensor, device: Any = None) -> Tensor:
    """A copy in a block of the size that torch's allocator of pinned memory would take."""
    with keeping("pinned"):
        room = torch.empty(pinned_size(tensor.nbytes), dtype=torch.uint8)
    copy = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def pinned_size(size: int) -> int:
    """Bytes of the block for a pinned tensor: the next power of two (`c10/core/CachingHostAllocator.h`, torch 2.13)."""
    return 1 << max(0, size - 1).bit_length()


def on_host(size: int, dtype: torch.dtype, pins: bool) -> Tensor:
    """A flat tensor without data that lies on the host; a pinned one is the copy of one that is not (`pin_memory`)."""
    with keeping("host"):
        plain = torch.zeros(size, dtype=dtype, device="meta")
    if not pins:
        remember_place(plain, "host")
        return plain
    with keeping("pinned"):
        room = torch.empty(pinned_size(plain.nbytes), dtype=torch.uint8, device="meta")
    pinned = room[: plain.nbytes].view(dtype)
    remember_place(pinned, "pinned")
    return pinned


def pinned_bytes(trace: Trace) -> int:
    """What the allocator of pinned memory ends up with."""
    blocks = _Blocks()
    for number, size in trace.host_events:
        if trace.storages[number].kept_on == "pinned":
            blocks.see(size)
    return blocks.kept


class _Blocks:
    """The allocator of pinned memory: it keeps every block, and gives it to tensors of its size.

    Attributes:
        kept: bytes, in use or not.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._live: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def see(self, size: int) -> None:
        """A block is taken, or (negative) given back."""
        block = abs(size)
        self._live[block] += 1 if size > 0 else -1
        if self._live[block] > self._most[block]:
            self._most[block] += 1
            self.kept += block


def managed_bytes(trace: Trace) -> tuple[int, int]:
    """Memory that moves between host and card: all of it at its most, and what one update touches (two moments)."""
    sizes = sorted(s.size for s in trace.storages if s.kept_on == "managed")
    return highest(trace, "managed")[1], sum(sizes[-2:])


def host_ledgers(trace: Trace, device: str, data_bytes: int, merging: Trace | None = None) -> dict[str, dict[str, int]]:
    """What a process needs of the host's memory, and for what: phase -> category -> bytes.

    On a CPU all tensors are part of it. Files of weights that are mapped while they are read are none of it: their
    pages can be dropped at any time.

    Args:
        trace: of a run.
        device: `cuda` or `cpu`.
        data_bytes: tokenised rows in memory.
        merging: of a merge, which is a process of its own (`merging.merge_trace`).
    """
    base = {"process": PROCESS_BYTES}
    if device == "cuda":
        base["CUDA's libraries"] = CUDA_LIBRARIES_BYTES
        peaks = _with_pinned(trace) or {"at rest": {}}
    else:
        peaks = {phase: {"tensors": moment.bytes} for phase, moment in moments(trace).items()}
    found = {phase: {**base, "data": data_bytes, **sizes} for phase, sizes in peaks.items()}
    if merging is not None:
        found["merge"] = {**base, "tensors": merging.peak()[0]}
    return {phase: {name: size for name, size in ledger.items() if size} for phase, ledger in found.items()}


def highest(trace: Trace, *places: str) -> tuple[str, int]:
    """The phase in which most bytes lived at once in memory of these kinds, and the bytes."""
    return max(_peaks(trace, *places).items(), key=lambda item: item[1], default=("", 0))


def _peaks(trace: Trace, *places: str) -> dict[str, int]:
    """Phase -> the most bytes in memory of these kinds, for the phases in which some was taken."""
    live, most = 0, dict[str, int]()
    for number, size in trace.host_events:
        storage = trace.storages[number]
        if storage.kept_on in places:
            live += size
            if size > 0:
                most[storage.phase] = max(most.get(storage.phase, 0), live)
    return most


def _with_pinned(trace: Trace) -> dict[str, dict[str, int]]:
    """Phase -> ordinary and pinned bytes when their sum is highest, for the phases in which some was taken."""
    ordinary, blocks, most = 0, _Blocks(), dict[str, dict[str, int]]()
    for number, size in trace.host_events:
        storage = trace.storages[number]
        if storage.kept_on == "pinned":
            blocks.see(size)
        elif storage.kept_on == "host":
            ordinary += size
        else:
            continue
        if size > 0 and ordinary + blocks.kept >= sum(most.get(storage.phase, {}).values()):
            most[storage.phase] = {"pinned": blocks.kept, "tensors": ordinary}
    return most


def rows_bytes(dataset: Any) -> int:
    """Bytes of tokenised rows that are held in memory, and not in mapped files."""
    arrays = (dataset.input_ids, dataset.labels, dataset.offsets, dataset.loss_weights, dataset.weight_offsets)
    return sum(array.nbytes for array in arrays if not _mapped(array))


def _mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None
