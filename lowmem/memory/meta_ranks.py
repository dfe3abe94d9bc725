"""One rank of many on the meta device: torch's engines run as they are, and what they send goes nowhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lowmem.memory.meta_fsdp import meta_fsdp
from lowmem.world import ranks_foreseen


@contextmanager
def meta_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """Inside, a run on the meta device is that of one rank of `number`.

    Collective operations of torch's `fake` process group return at once, whatever the device of their tensors.
    """
    if number == 1:
        with ranks_foreseen(1):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(ranks_foreseen(number, rank))
        stack.enter_context(_fake_group(number, rank))
        stack.enter_context(meta_fsdp())
        stack.enter_context(_nothing_to_wait_for())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "DTensor random operators")  # torch means a mesh of CPUs; none is drawn here
        warnings.filterwarnings("ignore", ".*_tensor. is deprecated", FutureWarning)  # names of older versions of torch
        yield


@contextmanager
def _nothing_to_wait_for() -> Iterator[None]:
    """Inside, what DTensor sends has come at once: on the meta device torch's wrapper around it would be a copy."""
    from torch.distributed import _functional_collectives

    with patch.object(_functional_collectives, "_maybe_wrap_tensor", lambda tensor: tensor):
        yield


_groups: dict[tuple[int, int], Any] = {}  # number of ranks, and which one -> the group of all of them


@contextmanager
def _fake_group(number: int, rank: int) -> Iterator[None]:
    """Inside, the world's process group is one of torch's that sends nothing; a real one stays what it is.

    Groups are kept: what torch remembers of operations on spread tensors leads back to the first mesh of its shape.
    """
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (importing it registers the backend)

    c10d: Any = distributed_c10d
    before = c10d._world.default_pg
    c10d._update_default_pg(_groups.get((number, rank)))
    try:
        if (number, rank) not in _groups:
            c10d.init_process_group("fake", rank=rank, world_size=number, store=vars(dist)["HashStore"]())
            _groups[number, rank] = c10d._world.default_pg
        yield
    finally:
        c10d._update_default_pg(before)
