"""Where DeepSpeed's ZeRO optimizers keep gradients, states and weights, shown as parts of whole tensors.

DeepSpeed (0.19) flattens the parameters of a group into one tensor and cuts that among the ranks (stages 1 and 2), or
cuts every parameter by itself (stage 3). Either way a rank has one piece of a parameter, without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.world import World

_BEFORE_THE_FIRST = -1  # micro-batch of a step: DeepSpeed's INITIAL_MICRO_STEP_ID


@dataclass
class Part:
    """A rank's piece of a tensor (`lowmem.sharded.Parts`).

    Attributes:
        piece: finds it; (elements).
        start: its first element, counted in the flat tensor.
        shape: of the whole.
        world: whose dimension `data` cuts.
        kept_whole: a parameter that is small enough for every rank to have all of it beside its piece.
    """

    piece: Callable[[], Tensor]
    start: int
    shape: torch.Size
    world: World
    kept_whole: nn.Parameter | None = None

    def local(self) -> Tensor:
        """This rank's piece, as a view."""
        return self.piece()

    @torch.no_grad()
    def whole(self) -> Tensor:
        """The whole; all ranks must ask."""
        piece = self.piece()
        flat = piece.new_zeros(self.shape.numel())
        flat[self.start : self.start + len(piece)] = piece
        return self.world.sum(flat, "data").view(self.shape)

    @torch.no_grad()
    def copy_whole(self, value: Tensor) -> None:
        """Take this rank's piece of a whole tensor."""
        piece = self.piece()
        piece.copy_(value.flatten()[self.start : self.start + len(piece)])
        if self.kept_whole is not None and self.kept_whole.shape == self.shape:
            self.kept_whole.copy_(value)


@dataclass
class Place:
    """Where a parameter's piece lies in the flat tensor that the update rule works on.

    Attributes:
        group: number of the flat tensor.
        flat: this rank's part of the flat tensor, in float32.
        offset: first element of the piece in it.
        start: first element of the piece, counted in the flattened parameter.
        number: elements of the piece; 0 where other ranks have all of it.
        shape: of the parameter.
    """

    group: int
    flat: Tensor
    offset: int
    start: int
    number: int
    shape: torch.Size


def places(zero: Any, world: World) -> dict[nn.Parameter, Place]:
    """Trained parameter -> where its piece is."""
    found = {}
    if hasattr(zero, "fp16_groups"):  # stage 3
        for number, group in enumerate(zero.fp16_groups):
            flat = zero.fp32_partitioned_groups_flat[number]
            for parameter in group:
                _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = world.place("data") * parameter.partition_numel()
                size = min(size, max(0, parameter.ds_numel - start))  # the rest of the last piece is padding
                found[parameter] = Place(number, flat, offset, start, size, parameter.ds_shape)
        return found
    for number, group in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        for parameter in group:
            here = parameter._hp_mapping
            place = Place(number, flat, 0, 0, 0, parameter.shape)
            if here is not None:
                place.offset, place.number = here.hp_fragment_address.start, here.hp_fragment_address.numel
                place.start = here.lp_fragment_address.start
            found[parameter] = place
    return found


def mark_parts(model: nn.Module, world: World) -> None:
    """Tell `lowmem.sharded` of the parameters that stage 3 has cut."""
    for parameter in model.parameters():
        cut: Any = parameter
        start = world.place("data") * cut.partition_numel()
        number = min(cut.partition_numel(), max(0, cut.ds_numel - start))
        cut.parts = Part(_first(cut, number), start, cut.ds_shape, world, kept_whole=parameter)


def _first(parameter: Any, number: int) -> Callable[[], Tensor]:
    return lambda: parameter.ds_tensor.narrow(0, 0, number)  # type: ignore[no-any-return]


def gradients(zero: Any, offloaded: bool) -> list[Tensor]:
    """This rank's pieces of the gradients that backward has added up, as views; they are marked as such."""
    if offloaded:
        pieces = [flat.grad for flat in _flats(zero) if flat.grad is not None]
    else:
        pieces = [piece for group in zero.averaged_gradients.values() if group is not None for piece in group]
    return [marked(piece.detach()) for piece in pieces]


def marked(piece: Any) -> Tensor:
    """A piece that `lowmem.sharded.global_norm` is to add up over the ranks."""
    piece.cut_along = "data"
    return piece  # type: ignore[no-any-return]


def held(zero: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Category -> tensors that DeepSpeed keeps from step to step, beside the weights and the states of the rule."""
    yield "float32 copies of parts", [flat.detach() for flat in _flats(zero)]
    totals = [flat.grad for flat in _flats(zero) if flat.grad is not None]
    totals += getattr(zero, "accumulated_grads_in_cpu", {}).values()
    totals += [zero.grad_partitions_flat_buffer] if hasattr(zero, "fp16_groups") else []
    yield "gradients", totals
    names = ("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
    buffers = [getattr(zero, name) for name in names if hasattr(zero, name)]
    buffers += getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    for bucket in zero.ipg_buckets.values():  # one tensor at stage 3, which stays
        buffers += [bucket.buffer] if isinstance(bucket.buffer, Tensor) else bucket.buffer
    yield "communication", buffers


def drop_gradients(zero: Any, offloaded: bool) -> None:
    """Forget the gradients of a step, whether it was taken or not.

    Buffers are cleared, too: a parameter that no row reaches in the next step would be given this step's gradient.
    """
    zero.zero_grad(set_to_none=True)
    if hasattr(zero, "fp16_groups"):
        zero.averaged_gradients = {}
        zero.grad_partitions_flat_buffer.zero_()
    else:
        zero.micro_step_id = _BEFORE_THE_FIRST
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
    if offloaded:
        zero.reset_cpu_buffers()
        for flat in _flats(zero):
            assert flat.grad is not None
            flat.grad.zero_()


def _flats(zero: Any) -> list[Tensor]:
    flats: list[Tensor] = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    return flats


class States(MutableMapping[nn.Parameter, Any]):
    """Parameter -> its states, whose tensors are pieces; a whole one that is set is cut.

    Args:
        zero: DeepSpeed's optimizer; its `optimizer` is the update rule.
        world: of the run.
    """

    def __init__(self, zero: Any, world: World) -> None:
        self.rule, self.world, self.places = zero.optimizer, world, places(zero, world)
        self.counts: dict[int, tuple[str, float]] = {}  # group -> the count that was set; an update clears it

    def __getitem__(self, parameter: nn.Parameter) -> _State:
        return _State(self, self.places[parameter])

    def __setitem__(self, parameter: nn.Parameter, value: Any) -> None:
        self[parameter].update(value)

    def __delitem__(self, parameter: nn.Parameter) -> None:
        raise UserError("deepspeed_zero: the states of single parameters cannot be dropped; they lie in one tensor")

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.places and bool(self.rule.state.get(self.places[parameter].flat))  # type: ignore[index]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.places if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class _Count:
    """A number that all parameters of a flat tensor have in common; setting it is looked at."""

    shape: torch.Size
    value: Tensor
    copy_whole: Callable[[Tensor], None]

    def local(self) -> Tensor:
        return self.value

    def whole(self) -> Tensor:
        return self.value.clone()


class _State(MutableMapping[str, Any]):
    """The states of one parameter."""

    def __init__(self, states: States, place: Place) -> None:
        self.states, self.place = states, place
        self.live: dict[str, Any] = states.rule.state[place.flat]

    def __getitem__(self, key: str) -> Any:
        value = self.live[key]
        if not isinstance(value, Tensor):
            return value
        if value.shape != self.place.flat.shape:
            count: Any = value.detach()
            count.parts = _Count(count.shape, value, partial(self.__setitem__, key))
            return count
        piece = value.narrow(0, self.place.offset, self.place.number)
        piece.parts = Part(lambda: piece, self.place.start, self.place.shape, self.states.world)  # type: ignore[attr-defined]
        return piece

    def __setitem__(self, key: str, value: Any) -> None:
        flat = self.place.flat
        if isinstance(value, Tensor) and value.shape == self.place.shape and key != "step":
            if key not in self.live:
                self.live[key] = torch.zeros_like(flat, dtype=value.dtype)
            self[key].parts.copy_whole(value)
            return
        if isinstance(value, Tensor) and value.numel() > 1:
            raise UserError(
                f"resume: deepspeed_zero cannot cut the optimizer state {key}; go on without deepspeed_zero"
            )
        before = self.states.counts.setdefault(self.place.group, (key, float(value)))
        if key == before[0] and float(value) != before[1]:
            raise UserError(
                f"resume: parameters have been updated {before[1]:.0f} and {float(value):.0f} times, and "
                "deepspeed_zero has one count for all of them; go on without deepspeed_zero"
            )
        on_device = any(group.get("fused") or group.get("capturable") for group in self.states.rule.param_groups)
        device = flat.device if on_device else "cpu"
        self.live[key] = value.to(device, copy=True) if isinstance(value, Tensor) else value

    def __delitem__(self, key: str) -> None:
        del self.live[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.live)

    def __len__(self) -> int:
        return len(self.live)
