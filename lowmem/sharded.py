"""Tensors of which every rank holds a part: their parts, the whole, and norms over all ranks.

They are torch's DTensor, or tensors of another engine: those have an attribute `parts` (`Parts`), or, where nobody
wants the whole, `cut_along`, a dimension of the world.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from lowmem.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_part(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks. Where nobody has loaded torch's module for that (a second), none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class Parts(Protocol):
    """How an engine of its own spreads a tensor over the ranks along one dimension of the world.

    Attributes:
        shape: of the whole.
    """

    shape: torch.Size

    def local(self) -> Tensor:
        """This rank's part, as a view."""

    def whole(self) -> Tensor:
        """The whole; all ranks must ask."""

    def copy_whole(self, value: Tensor) -> None:
        """Take this rank's part of a whole tensor."""


def parts_of(tensor: object) -> Parts | None:
    """How an engine of its own spreads this tensor; null for plain tensors and DTensor."""
    return getattr(tensor, "parts", None)


def _cut_along(tensor: object) -> str | None:
    return getattr(tensor, "cut_along", None)


def holds_parts(kinds: Iterable[type]) -> bool:
    """Whether one of these classes is that of tensors that are spread over ranks, or are on their way from others."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    messages = sys.modules["torch.distributed._functional_collectives"]  # which that one has loaded
    return any(issubclass(kind, (module.DTensor, messages.AsyncCollectiveTensor)) for kind in kinds)


def spread_over(tensor: Tensor) -> tuple[str, ...] | None:
    """The dimensions of the mesh that a tensor lives on; null for a plain one."""
    return (tensor.device_mesh.mesh_dim_names or ()) if is_part(tensor) else None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a view; a plain tensor as it is."""
    if parts := parts_of(tensor):
        return parts.local()
    return tensor.to_local() if is_part(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all ranks that hold parts of it must ask."""
    if parts := parts_of(tensor):
        return parts.whole()
    return tensor.full_tensor() if is_part(tensor) else tensor


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole of a tensor."""
    parts = parts_of(tensor)
    return parts.shape if parts else tensor.shape


def set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, which for a tensor that is spread changes nothing: its part is set."""
    if is_part(tensor):
        tensor._local_tensor = local(value)
    else:
        tensor.data = value


@torch.no_grad()
def copy_whole(into: Tensor, value: Tensor) -> None:
    """Fill a tensor from a whole one, which every rank has: each takes its own part."""
    if parts := parts_of(into):
        return parts.copy_whole(value)
    if is_part(into) and not is_part(value):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(into.device)
        value = distribute_tensor(value, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(value)
    return None


def is_spread(tensors: Iterable[Tensor], world: World) -> bool:
    """Whether no rank has all of these."""
    return world.group_size("pipeline") > 1 or any(is_part(t) or parts_of(t) or _cut_along(t) for t in tensors)


@torch.no_grad()
def gathered(value: Any, world: World) -> Any:
    """Nested plain values with whole tensors, on the host of rank 0; other ranks get null.

    All ranks must ask. Tensors that are not spread stay where they are; of dicts whose keys differ from rank to rank
    (stages of a pipeline) the union is made.
    """
    complete = _whole(value, world.is_main)
    if world.group_size("pipeline") > 1:
        parts = world.from_all(_on_host(complete) if world.place("data") == world.place("tensor") == 0 else None)
        complete = _union([part for part in parts if part is not None]) if world.is_main else None
    return complete if world.is_main else None


def _whole(value: Any, keep: bool) -> Any:
    if is_part(value) or parts_of(value):
        tensor = whole(value)
        return to_host(tensor) if keep else tensor.new_empty(0)
    if isinstance(value, Mapping):
        return {key: _whole(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_whole(item, keep) for item in value)
    return value


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory."""
    return tensor.cpu()


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return to_host(value.detach())
    if isinstance(value, Mapping):
        return {key: _on_host(item) for key, item in value.items()}
    return value


def _union(parts: list[Any]) -> Any:
    if not all(isinstance(part, Mapping) for part in parts):
        return parts[0]
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: _union([part[key] for part in parts if key in part]) for key in keys}


# -- norms ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def global_norm(tensors: list[Tensor], world: World) -> Tensor:
    """The 2-norm over all elements of all tensors, wherever they are; every element counts once.

    Args:
        tensors: plain ones (the same on all ranks of a group, or of one pipeline stage) and spread ones, of any mesh.
        world: all ranks must ask.

    Returns:
        A plain scalar, the same on all ranks.
    """
    if not is_spread(tensors, world):
        return get_total_norm(tensors)
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    meshes: dict[tuple[Any, ...], list[Any]] = {}
    for tensor in tensors:
        if is_part(tensor) and any(p.is_partial() for p in tensor.placements):
            tensor = tensor.full_tensor()
        key, groups = _spread_over(tensor, world)
        kinds.setdefault(key, []).append(local(tensor))
        meshes[key] = groups
    total = torch.zeros((), device=_device(tensors, world))
    for key in sorted(kinds, key=str):  # the same order on all ranks
        squares = get_total_norm(kinds[key]).to(total).square()
        for group in meshes[key]:
            dist.all_reduce(squares, group=group)
        total = total + squares
    return world.sum(total, "pipeline").sqrt()


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place, wherever they are."""
    if parts := [local(tensor) for tensor in tensors]:
        torch._foreach_mul_(parts, factor.to(parts[0].device))


def _spread_over(tensor: Tensor, world: World) -> tuple[tuple[Any, ...], list[Any]]:
    """The dimensions of its mesh along which a tensor is cut, and their process groups."""
    if dimension := _cut_along(tensor):
        return (dimension,), [world.group(dimension)]
    if not is_part(tensor):
        return (), []
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(names[number] for number in cut), [tensor.device_mesh.get_group(number) for number in cut]


def _device(tensors: list[Tensor], world: World) -> torch.device:
    return tensors[0].device if tensors else torch.device(world.device_type)
