"""How much memory a run may still take on a device."""

from __future__ import annotations

from pathlib import Path

import torch

# where a container's limit stands (version 2 of Linux control groups), seen from inside
_CONTAINER = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, container: Path = _CONTAINER) -> int:
    """Bytes that are free: on a card by the driver and by this process's own limit, else in the host's memory.

    Args:
        device: where the model computes.
        container: the folder with the limits of a container.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        return int(min(free, share * total - torch.cuda.memory_reserved(device)) + idle)
    import psutil

    return min(int(psutil.virtual_memory().available), _left_to(container))


def _left_to(container: Path) -> int:
    """What a container may still take; what it keeps of files is given up when it is needed."""
    try:
        limit = (container / "memory.max").read_text().strip()
        used = int((container / "memory.current").read_text())
        counted = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or limits of another kind
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - used + int(counted.get("inactive_file", 0)))
