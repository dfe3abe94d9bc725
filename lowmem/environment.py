"""What a run computes with: versions, device, threads, and the memory it took."""

from __future__ import annotations

import platform
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {name: version_of(name) for name in ("lowmem", "torch", "transformers", "peft", "bitsandbytes", "datasets")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {**found, "python": platform.python_version(), "device": device, "threads": str(torch.get_num_threads())}


def version_of(name: str) -> str:
    """A package's version, or `not installed`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def peak_bytes() -> dict[str, int]:
    """The most memory this process has used: resident bytes, and on CUDA what its allocator held."""
    peak = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        peak["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return peak


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What happens inside draws random numbers of its own: afterwards all generators are where they were before."""
    started = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state(device) if started else None
    cpu, python, arrays = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(arrays)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def seed_everything(seed: int) -> None:
    """Seed torch, Python's `random` and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
