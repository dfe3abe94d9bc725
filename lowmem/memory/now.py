"""How much memory is used at this moment. Cheap enough for every log line."""

from __future__ import annotations

import sys


def memory_now() -> tuple[str, int]:
    """What the memory figure is, and its bytes: on CUDA the peak of the allocator, else the resident set."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return "peak GPU", int(torch.cuda.max_memory_reserved())
    return "RSS", resident_bytes()


def memory_metrics() -> dict[str, int]:
    """Bytes for a log line.

    Returns:
        `rss_bytes` (resident set of this process), and on CUDA `gpu_allocated_bytes` (live tensors, between two steps)
        and `gpu_peak_bytes` (the most they ever were).
    """
    found = {"rss_bytes": resident_bytes()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_allocated_bytes"] = int(torch.cuda.memory_allocated())
        found["gpu_peak_bytes"] = int(torch.cuda.max_memory_allocated())
    return found


def resident_bytes() -> int:
    """The resident set of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)
