"""torch's `fully_shard` on the meta device: the engine itself, which would otherwise refuse a model without data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lowmem.memory.host import on_host
from lowmem.ops.without_data import called
from lowmem.run import device_kind

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
        for name, wrap in (("_init_sharded_param", _cut), ("to_sharded_dtensor", _spread)):
            stack.enter_context(patch.object(param, name, wrap(getattr(param, name))))
        reduce = _without_copies(vars(_fsdp_param_group)["foreach_reduce"])
        stack.enter_context(patch.object(_fsdp_param_group, "foreach_reduce", reduce))
        inputs: Any = vars(param)["all_gather_inputs"]
        stack.enter_context(patch.object(param, "all_gather_inputs", property(_sent(inputs.fget))))
        stack.enter_context(
            patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_cpu_offload_params", lambda self: None)
        )
        yield


def _move(parameters: Any, buffers: Any, device: torch.device) -> None:
    """What was loaded on the host goes to the card (`load.from_host` makes the copy)."""
    for tensor in itertools.chain(parameters, buffers):
        tensor.data = tensor.to(device)


# With `CPUOffloadPolicy` parts and their gradients are the host's, which on a device without data only a mark says.


def _cut(real: Callable[..., Any]) -> Callable[..., Any]:
    def cut(spread: Any, *args: Any) -> Any:
        real(spread, *args)
        if spread.offload_to_cpu:
            shape, part = spread.padded_sharded_param_size, spread._sharded_param_data
            spread._sharded_param_data = on_host(part.numel(), part.dtype, spread.pin_memory)
            local = spread._sharded_param_data.view(shape).narrow(0, 0, spread.sharded_param._local_tensor.shape[0])
            spread.sharded_param._local_tensor = local

    return cut


def _spread(real: Callable[..., Any]) -> Callable[..., Any]:
    def spread(self: Any, part: Tensor) -> Any:
        if getattr(self, "gradient_to_host", False):
            part = on_host(part.numel(), part.dtype, self.pin_memory).view(part.shape)
        return real(self, part)

    return spread


def _without_copies(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch's copy of a gradient to the host would ask for data."""

    def reduce(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        away = [p for p in parameters if p.offload_to_cpu]
        for p in away:
            p.offload_to_cpu, p.gradient_to_host = False, True
        try:
            return real(parameters, *args, **kwargs)
        finally:
            for p in away:
                p.offload_to_cpu, p.gradient_to_host = True, False

    return reduce


def _sent(real: Callable[..., Any]) -> Callable[..., Any]:
    def inputs(self: Any) -> list[Tensor]:
        if not (self.offload_to_cpu and device_kind(META) == "cuda"):
            found: list[Tensor] = real(self)
            return found
        part = self._sharded_param_data
        on_card = torch.empty_like(part)
        return [on_card if tensor is part else tensor for tensor in real(self)]

    return inputs


def _labelled(real: Callable[..., Any], label: str) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with called(label):
            return real(*args, **kwargs)

    return within
