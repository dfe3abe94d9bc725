"""What DeepSpeed's engine holds and sends, on the meta device, on which it cannot run; here its stages 1 and 2.

Written after deepspeed 0.19.8, with everything at its default that `DeepSpeedZeRO` does not set.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.host import on_host
from lowmem.ops.without_data import called, keeping
from lowmem.world import World

META = torch.device("meta")
BUFFERS, GRADIENTS, COPY = "communication", "gradients", "float32 copies of parts"


@dataclass(frozen=True)
class Settings:
    """What decides about memory.

    Attributes:
        world: whose dimension `data` shares the run.
        zero: of DeepSpeed's configuration, the section `zero_optimization`.
        on_card: the model is on a card; what lies on the host is pinned.
    """

    world: World
    zero: dict[str, Any]
    on_card: bool

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return int(self.zero["stage"])

    @property
    def bucket(self) -> int:
        """Elements of gradients that are sent together."""
        return int(self.zero["reduce_bucket_size"])

    @property
    def offloads(self) -> bool:
        """Whether the update is the host's."""
        return "offload_optimizer" in self.zero

    @property
    def ranks(self) -> int:
        """How many share the run."""
        return self.world.group_size("data")

    @property
    def group(self) -> Any:
        """Their process group."""
        return self.world.group("data")

    def beside_update(self) -> AbstractContextManager[None]:
        """Inside, what is made lies where the update is made."""
        return keeping("host") if self.offloads else nullcontext()

    def for_update(self, size: int) -> Tensor:
        """Zeros in float32 where the update is made."""
        return on_host(size, torch.float32, self.on_card) if self.offloads else torch.zeros(size, device=META)


def flattened(pieces: list[Tensor]) -> Tensor:
    """A copy of all; of one piece alone, a view."""
    flat: Any = vars(torch._utils)["_flatten_dense_tensors"]
    return flat(pieces)  # type: ignore[no-any-return]


def norms(pieces: list[Tensor]) -> None:
    """DeepSpeed adds up squares in double precision, piece by piece."""
    for piece in pieces:
        torch.linalg.vector_norm(piece.to(torch.float64))


class EngineWithoutData:
    """Stands for the engine that `deepspeed.initialize` makes.

    Args:
        module: the pass.
        optimizer: of the stage.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def __call__(self, *args: Any) -> Tensor:
        """The pass, whose backward ends with the optimizer's work on the gradients."""
        self.optimizer.before_pass()
        loss: Tensor = self.module(*args)
        loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return loss

    def _backward_begins(self, _: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.optimizer.after_backward)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Whether the next backward completes the gradients of the step."""
        self.optimizer.is_boundary = is_boundary

    def step(self) -> None:
        """Update the weights."""
        with torch.no_grad():
            self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class _Piece:
    """What a rank has of a parameter: `number` elements from `start` on, at `offset` of its part."""

    rank: int
    start: int
    offset: int
    number: int


class ZeROWithoutData:
    """Stands for `DeepSpeedZeroOptimizer` (deepspeed/runtime/zero/stage_1_and_2.py), under its names.

    The trained weights of a group become views of one flat tensor. Ranks differ in when they keep gradients: this is
    the one that does so when most is there. That is the first at stage 1, which goes through whole gradients in the
    order of the weights, and the last at stage 2, as backward comes to its weights first.

    Args:
        rule: the optimizer; its groups keep this rank's part in float32, and nothing else.
        settings: see there.
    """

    def __init__(self, rule: Optimizer, settings: Settings) -> None:
        self.optimizer, self.settings, self.is_boundary, self.micro_step_id = rule, settings, True, -1
        self.bit16_groups: list[list[nn.Parameter]] = [list(group["params"]) for group in rule.param_groups]
        self.averaged_gradients: dict[int, Any] = {}
        self.all_grad_tensors: dict[int, Any] = {}
        self._bucket: list[nn.Parameter] = []
        self._filled = 0
        self.ipg_buckets = {torch.float32: SimpleNamespace(buffer=list[Tensor]())}  # the gradients of the bucket
        self._kept: Tensor | None = None  # those of all weights that touch this rank's part
        self.accumulated_grads_in_cpu: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            self._flats = [self._flat(group) for group in self.bit16_groups]
            self._group = {p: number for number, group in enumerate(self.bit16_groups) for p in group}
            self._pieces = {p: piece for number in range(len(self._flats)) for p, piece in self._cut(number)}
            rank = 0 if settings.stage == 1 else settings.ranks - 1
            self._mine = {p: piece for p, pieces in self._pieces.items() for piece in pieces if piece.rank == rank}
            self.single_partition_of_fp32_groups = [self._part(number) for number in range(len(self._flats))]
            self._make_buffers()
        for parameter in self._group:
            here = self._mine.get(parameter)
            parameter._hp_mapping = None if here is None else _mapping(here)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    # -- at the beginning ---------------------------------------------------------------------------------------------

    def _flat(self, group: list[nn.Parameter]) -> Tensor:
        """On a card by way of the host, as where there is no room for the weights twice."""
        missing = -sum(p.numel() for p in group) % (2 * self.settings.ranks)
        weights, on_card = [p.detach() for p in group], self.settings.on_card
        with keeping("host") if on_card else nullcontext():
            if on_card:
                weights = [torch.empty_like(p) for p in group]
                for parameter in group:
                    parameter.data = parameter.new_empty(0)
            flat = flattened([*weights, *([weights[0].new_zeros(missing)] if missing else [])])
        sizes = [p.numel() for p in weights]
        shapes = [p.shape for p in weights]
        del weights
        flat = torch.empty_like(flat) if on_card else flat
        for parameter, view, shape in zip(group, torch.split(flat, [*sizes, missing]), shapes, strict=False):
            parameter.data = view.view(shape)
        return flat

    def _size(self, number: int) -> int:
        return len(self._flats[number]) // self.settings.ranks

    def _cut(self, number: int) -> list[tuple[nn.Parameter, list[_Piece]]]:
        size, at, found = self._size(number), 0, []
        for parameter in self.bit16_groups[number]:
            end, pieces = at + parameter.numel(), []
            for rank in range(at // size, -(-end // size)):
                first, last = max(at, rank * size), min(end, (rank + 1) * size)
                pieces.append(_Piece(rank, first - at, first - rank * size, last - first))
            found.append((parameter, pieces))
            at = end
        return found

    def _part(self, number: int) -> Tensor:
        """The rule's copy of this rank's part."""
        with called(COPY):
            part = self._flats[number][: self._size(number)].clone()
            if self.settings.offloads:
                part = self.settings.for_update(len(part))
        self.optimizer.param_groups[number]["params"] = [part.requires_grad_()]
        return part

    def _make_buffers(self) -> None:
        settings, sizes = self.settings, [len(part) for part in self.single_partition_of_fp32_groups]
        with called(BUFFERS):
            if settings.offloads:
                self.param_buffer_of_bit16_for_cpu_offload_groups = [settings.for_update(size) for size in sizes]
                largest = max(p.numel() for p in self._group)
                self.temp_grad_buffer_for_cpu_offload = settings.for_update(largest)
                self.temp_grad_buffer_for_gpu_offload = torch.zeros(largest, device=META)
        with called(GRADIENTS):
            gradients = [settings.for_update(size) for size in sizes]
        for part, gradient in zip(self.single_partition_of_fp32_groups, gradients, strict=True):
            part.grad = gradient if settings.offloads else None

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def _buffer(self) -> list[Tensor]:
        buffers: list[Tensor] = self.ipg_buckets[torch.float32].buffer
        return buffers

    def before_pass(self) -> None:
        """Nothing is to be done."""

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self._buffer:
            self.micro_step_id += 1
            with called(BUFFERS):
                self._buffer.append(torch.empty(self.settings.bucket, device=META))
        if self.settings.stage == 2:
            self._into_bucket(parameter)

    def _into_bucket(self, parameter: nn.Parameter) -> None:
        gradient: Any = parameter.grad
        if self._filled + gradient.numel() > self.settings.bucket:
            self._send()
        if gradient.numel() <= self.settings.bucket:
            room = self._buffer[0][self._filled : self._filled + gradient.numel()].view_as(gradient)
            gradient.data = room.copy_(gradient)
        elif self.settings.offloads:
            gradient.data = gradient.clone()
        self._filled += gradient.numel()
        self._bucket.append(parameter)

    def _send(self) -> None:
        """The gradients of the bucket are added up; each weight that touches this rank's part keeps its own."""
        if not self._bucket:
            return
        first: Any = self._bucket[0].grad
        self._add_up(first.view(-1) if self._filled > self.settings.bucket else self._buffer[0][: self._filled])
        for parameter in self._bucket:
            if parameter in self._mine:
                self._keep(parameter, parameter.grad)
            elif self.settings.stage == 2:
                parameter.grad = None
        self._bucket, self._filled = [], 0

    def _add_up(self, bucket: Tensor) -> None:
        runs: list[list[int]] = []  # rank, elements
        for piece in (piece for parameter in self._bucket for piece in self._pieces[parameter]):
            if runs and runs[-1][0] == piece.rank:
                runs[-1][1] += piece.number
            else:
                runs.append([piece.rank, piece.number])
        bucket.div_(self.settings.ranks)
        together: list[Tensor] = []
        for number, run in enumerate(torch.split(bucket, [size for _, size in runs]), 1):
            together.append(run)
            if number == len(runs) or sum(map(len, together)) > self.settings.bucket:
                with called(BUFFERS):
                    dist.all_reduce(flattened(together), group=self.settings.group)
                together = []

    def _keep(self, parameter: nn.Parameter, gradient: Any) -> None:
        if self.settings.offloads:
            return self._to_host(parameter, gradient)
        if self._kept is None:
            with called(GRADIENTS):
                self._kept = torch.empty(sum(p.numel() for p in self._mine), device=META)
            self._next = 0
        gradient.data = self._kept[self._next : self._next + gradient.numel()].view_as(gradient).copy_(gradient)
        self._next += gradient.numel()
        return None

    def _to_host(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self.micro_step_id > 0 or not self.is_boundary:
            if parameter not in self.accumulated_grads_in_cpu:
                with called(GRADIENTS):
                    self.accumulated_grads_in_cpu[parameter] = self.settings.for_update(gradient.numel())
            if self.micro_step_id > 0:
                before = self.temp_grad_buffer_for_gpu_offload[: gradient.numel()]
                gradient.view(-1).add_(before.copy_(self.accumulated_grads_in_cpu[parameter]))
            self.accumulated_grads_in_cpu[parameter].copy_(gradient.view(-1))
        if self.is_boundary:
            here = self._mine[parameter]
            piece = gradient.view(-1)[here.start : here.start + here.number]
            norms([piece])
            whole: Any = self.single_partition_of_fp32_groups[self._group[parameter]].grad
            whole[here.offset : here.offset + here.number].copy_(piece)
            parameter.grad = None

    @torch.no_grad()
    def after_backward(self) -> None:
        """Stage 1 sends the gradients of a step when the last of them are there."""
        if self.settings.stage == 1:
            if not self.is_boundary:
                return
            for parameter in self._group:
                if parameter.grad is not None:
                    self._into_bucket(parameter)
        self._send()
        if not self.settings.offloads:
            for number in range(len(self._flats)):
                self._collect(number)
        self._buffer.clear()
        self._kept = None
        for parameter in self._group:
            parameter.grad = None

    def _collect(self, number: int) -> None:
        mine = [p for p in self._mine if self._group[p] == number]
        found: list[Any] = [torch.zeros_like(p) if p.grad is None else p.grad for p in mine]
        before = self.all_grad_tensors.get(number)
        if before is None:
            self.all_grad_tensors[number] = found
        else:
            for total, gradient in zip(before, found, strict=True):
                total.add_(gradient)
        if self.is_boundary:
            pieces = []
            for p, gradient in zip(mine, self.all_grad_tensors[number], strict=True):
                here = self._mine[p]
                pieces.append(gradient.view(-1)[here.start : here.start + here.number])
            missing = self._size(number) - sum(map(len, pieces))
            self.averaged_gradients[number] = [*pieces, *([torch.zeros(missing, device=META)] if missing else [])]
            self.all_grad_tensors[number] = None

    # -- the update ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """The rule's copies take the weights of the model."""
        for number, part in enumerate(self.single_partition_of_fp32_groups):
            part.copy_(self._flats[number][: self._size(number)])

    def step(self) -> None:
        """Update this rank's part, and put the weights together."""
        self.micro_step_id = -1
        if not self.settings.offloads:
            for pieces in self.averaged_gradients.values():
                norms(pieces)
        groups = self.optimizer.param_groups
        for number, part in enumerate(self.single_partition_of_fp32_groups):
            if not self.settings.offloads:
                with called(GRADIENTS):
                    part.grad = flattened(self.averaged_gradients[number])
                self.averaged_gradients[number] = None
            self.optimizer.param_groups = [groups[number]]
            with self.settings.beside_update():
                self.optimizer.step()
            if self.settings.offloads:
                self.param_buffer_of_bit16_for_cpu_offload_groups[number].copy_(part)
            else:
                part.grad = None
        self.optimizer.param_groups = groups
        for number, flat in enumerate(self._flats):
            flat[: self._size(number)].copy_(self.single_partition_of_fp32_groups[number])
            dist.all_gather_into_tensor(flat, flat[: self._size(number)], group=self.settings.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of whole weights."""
        for parameter in self._group:
            parameter.grad = None

    def reset_cpu_buffers(self) -> None:
        """Norms are not kept here."""


def _mapping(piece: _Piece) -> SimpleNamespace:
    """As DeepSpeed says where a parameter's piece is: in the part, and in the parameter."""
    return SimpleNamespace(
        hp_fragment_address=SimpleNamespace(start=piece.offset, numel=piece.number),
        lp_fragment_address=SimpleNamespace(start=piece.start, numel=piece.number),
    )
