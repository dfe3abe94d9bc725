"""torch's `fully_shard` on the meta device: the engine itself, which would otherwise refuse a model without data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from lowmem.ops.without_data import called

META = torch.device("meta")
TOGETHER = "layers put together"
BUFFERS = "communication"


@contextmanager
def meta_fsdp() -> Iterator[None]:
    """Inside, parts of parameters without data are put together and taken apart, as those with data would be."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_init,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
        _fully_shard,
    )

    modules = (_fsdp_collectives, _fsdp_param_group, _fsdp_state)
    with ExitStack() as stack:
        for module in modules:  # streams and events, of which a run without data needs none that are real
            stack.enter_context(patch.object(module, "_get_device_handle", lambda *_: torch.cpu))
        stack.enter_context(patch.object(_fully_shard, "_get_device_from_mesh", lambda _: META))
        stack.enter_context(patch.object(_fsdp_init, "_move_states_to_device", _move))
        stack.enter_context(
            patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)
        )
        param, allocating = _fsdp_param.FSDPParam, _fsdp_collectives.DefaultAllocMixin
        for owner, name, label in (
            (param, "init_all_gather_outputs", TOGETHER),
            (param, "alloc_all_gather_outputs", TOGETHER),
            (allocating, "allocate", BUFFERS),
        ):
            stack.enter_context(patch.object(owner, name, _labelled(getattr(owner, name), label)))
        yield


def _move(parameters: Any, buffers: Any, device: torch.device) -> None:
    """What was loaded on the host goes to the card (`load.from_host` makes the copy)."""
    for tensor in itertools.chain(parameters, buffers):
        tensor.data = tensor.to(device)


def _labelled(real: Callable[..., Any], label: str) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with called(label):
            return real(*args, **kwargs)

    return within
