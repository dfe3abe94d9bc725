"""One rank of many on the meta device: torch's engines run as they are, and what they send goes nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from lowmem.memory.meta_fsdp import meta_fsdp
from lowmem.world import ranks_foreseen


@contextmanager
def meta_ranks(number: int) -> Iterator[None]:
    """Inside, a run on the meta device is that of rank 0 of `number`.

    Collective operations of torch's `fake` process group return at once, whatever the device of their tensors.
    """
    if number == 1:
        with ranks_foreseen(1):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(ranks_foreseen(number))
        stack.enter_context(_fake_group(number))
        stack.enter_context(meta_fsdp())
        yield


@contextmanager
def _fake_group(number: int) -> Iterator[None]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (importing it registers the backend)

    store: Any = dist.HashStore  # type: ignore[attr-defined]

    dist.init_process_group("fake", rank=0, world_size=number, store=store())
    try:
        yield
    finally:
        dist.destroy_process_group()
