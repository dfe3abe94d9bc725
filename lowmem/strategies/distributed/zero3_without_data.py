"""What DeepSpeed's stage 3 holds and sends, on the meta device (see `zero_without_data`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.host import on_host
from lowmem.ops.without_data import called, keeping
from lowmem.run import Run, device_kind
from lowmem.strategies.distributed.zero3_fetching import Cut, Fetching, gather_now
from lowmem.strategies.distributed.zero_without_data import (
    BUFFERS,
    COPY,
    GRADIENTS,
    META,
    EngineWithoutData,
    Settings,
    ZeROWithoutData,
    flattened,
    norms,
)

_NORM_OF = 250_000_000  # elements at once, of gradients whose update is the host's


class WeightsInParts:
    """Stands for `DeepSpeedZeroOptimizer_Stage3` (deepspeed/runtime/zero/stage3.py), under its names.

    Args:
        module: the pass; of its weights only parts are left.
        rule: the optimizer; its groups are filled while a part is updated.
        settings: see there.
    """

    def __init__(self, module: nn.Module, rule: Optimizer, settings: Settings) -> None:
        self.optimizer, self.settings, self.is_boundary, self.micro_step_id = rule, settings, True, 0
        self.averaged_gradients: dict[int, Any] = {}
        self._ended = False  # a backward, since the last pass began
        self._filled, self._waiting = 0, list[nn.Parameter]()
        with torch.no_grad():
            self.cuts = self._cut(module)
            self._fetching = Fetching(module, self.cuts, settings)
            for cut in self.cuts.values():
                cut.stays = cut.size <= int(settings.zero["stage3_param_persistence_threshold"])
            self._group_of: list[int] = []  # sub-group -> group of the rule
            self.fp16_groups: list[list[nn.Parameter]] = []
            self._make_groups()
            self._flats = self._together()
            self.fp32_partitioned_groups_flat = [self._copy(flat) for flat in self._flats]
            for group in rule.param_groups:
                group["params"] = []
            self._make_buffers()
        for parameter in self.grad_position:
            with torch.no_grad():
                gather_now([self.cuts[parameter]], settings)
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            self.cuts[parameter].let_go()

    # -- at the beginning ---------------------------------------------------------------------------------------------

    def _cut(self, module: nn.Module) -> dict[nn.Parameter, Cut]:
        away, found = "offload_param" in self.settings.zero, dict[nn.Parameter, Cut]()
        for number, parameter in enumerate(module.parameters()):
            parameter.data = parameter.data.to(META)
            cut: Any = parameter
            size = -(-parameter.numel() // self.settings.ranks)
            if away:
                cut.ds_tensor = on_host(size, parameter.dtype, self.settings.on_card)
            else:
                cut.ds_tensor = torch.empty(size, dtype=parameter.dtype, device=META)
            cut.ds_shape, cut.ds_numel = parameter.shape, parameter.numel()
            cut.partition_numel = lambda size=size: size
            found[parameter] = Cut(parameter, number, cut.ds_tensor, away and self.settings.on_card)
            found[parameter].let_go()
        for buffer in module.buffers():
            buffer.data = buffer.data.to(META)
        return found

    def _make_groups(self) -> None:
        """Sub-groups of about a thousand million elements of parts, which are updated one by one."""
        self.grad_position: dict[nn.Parameter, tuple[int, int, int]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            sub_group, total = list[nn.Parameter](), 0
            for parameter in group["params"]:
                size = parameter.partition_numel()
                self.grad_position[parameter] = len(self.fp16_groups), total, size
                sub_group.append(parameter)
                total += size
                if total >= 1_000_000_000 or parameter is group["params"][-1]:
                    self._group_of.append(number)
                    self.fp16_groups.append(sub_group)
                    sub_group, total = [], 0

    def _together(self) -> list[Tensor]:
        """The parts of trained weights become views of one tensor: by way of the host, or there."""
        sizes = [sum(len(self.cuts[p].part) for p in group) for group in self.fp16_groups]
        dtype = self.fp16_groups[0][0].dtype
        trained = [self.cuts[p] for group in self.fp16_groups for p in group]
        if "offload_param" in self.settings.zero:
            flats = list[Tensor]()
            for number in range(len(self.optimizer.param_groups)):
                own = [size for size, group in zip(sizes, self._group_of, strict=True) if group == number]
                flats += torch.split(on_host(sum(own), dtype, self.settings.on_card), own)
        else:
            with keeping("host"):
                flat = torch.empty(sum(sizes), dtype=dtype, device=META)
            for cut in trained:
                cut.part.data = cut.part.new_empty(0)
            if self.settings.on_card:
                flat = torch.empty(sum(sizes), dtype=dtype, device=META)
            flats = list(torch.split(flat, sizes))
        for parameter, (number, offset, size) in self.grad_position.items():
            self.cuts[parameter].part.data = flats[number][offset : offset + size]
        return flats

    def _copy(self, flat: Tensor) -> Tensor:
        with called(COPY):
            copy = self.settings.for_update(len(flat)) if self.settings.offloads else flat.to(torch.float32).clone()
        return copy.requires_grad_()

    def _make_buffers(self) -> None:
        settings, sizes = self.settings, [len(flat) for flat in self._flats]
        with called(GRADIENTS):
            with settings.beside_update():
                torch.zeros(max(sizes), device=META)
            for part in self.fp32_partitioned_groups_flat if settings.offloads else []:
                part.grad = settings.for_update(len(part))
        with called(BUFFERS):
            self.ipg_buckets = {torch.float32: SimpleNamespace(buffer=torch.empty(settings.bucket, device=META))}
        with called(GRADIENTS):
            self.grad_partitions_flat_buffer = settings.for_update(sum(sizes))
        own = [size for _, _, size in self.grad_position.values()]
        self._gradients = dict(zip(self.grad_position, torch.split(self.grad_partitions_flat_buffer, own), strict=True))

    def get_param_id(self, parameter: nn.Parameter) -> nn.Parameter:
        """What `grad_position` knows it by."""
        return parameter

    # -- gradients ----------------------------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """A later backward of a step adds to what is there."""
        self.micro_step_id += self._ended
        self._ended = False

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        gradient: Any = parameter.grad
        if self._waiting and self._filled + gradient.numel() > self.settings.bucket:
            self._send()
        if self._filled + gradient.numel() <= self.settings.bucket:
            buffer = self.ipg_buckets[torch.float32].buffer
            room = buffer[self._filled : self._filled + gradient.numel()].view_as(gradient)
            gradient.data = room.copy_(gradient)
        self._waiting.append(parameter)
        self._filled += gradient.numel()

    def _send(self) -> None:
        self._waiting.sort(key=lambda p: self.cuts[p].number)
        for parameter, piece in zip(self._waiting, self._scattered(), strict=True):
            self._add(parameter, piece)
            parameter.grad = None
        self._waiting, self._filled = [], 0

    def _scattered(self) -> list[Tensor]:
        """This rank's parts of the waiting gradients, added up; they are sent as one tensor, in the ranks' order."""
        ranks, flat = self.settings.ranks, [p.grad.view(-1) for p in self._waiting]  # type: ignore[union-attr]
        sizes = [-(-len(gradient) // ranks) for gradient in flat]
        with called(BUFFERS):
            if len(flat) == 1 and len(flat[0]) % ranks == 0:
                whole = flat[0]
            else:
                chunks = []
                for rank in range(ranks):
                    for gradient, size in zip(flat, sizes, strict=True):
                        chunk = gradient[rank * size : (rank + 1) * size]
                        missing = size - len(chunk)
                        chunks += [chunk, chunk.new_empty(missing)] if missing else [chunk]
                whole = torch.cat(chunks)
            whole.div_(ranks)
            mine = whole[: len(whole) // ranks]
            sent = whole if self.settings.on_card else whole.clone()  # gloo works on a copy
            dist.reduce_scatter_tensor(mine, sent, group=self.settings.group)
        return list(torch.split(mine, sizes))

    def _add(self, parameter: nn.Parameter, piece: Tensor) -> None:
        total = self._gradients[parameter]
        if not self.settings.offloads:
            total.add_(piece) if self.micro_step_id else total.copy_(piece)
            return
        here = torch.empty_like(piece) if self.settings.on_card else total  # the total on the card
        if self.micro_step_id:
            here.add_(piece)
        if self.is_boundary:
            norms(list(torch.split(here, _NORM_OF)))
            number, offset, size = self.grad_position[parameter]
            whole: Any = self.fp32_partitioned_groups_flat[number].grad
            whole[offset : offset + size].copy_(here)

    @torch.no_grad()
    def after_backward(self) -> None:
        """What is left in the bucket is sent."""
        if self._waiting:
            self._send()
        if not self.settings.offloads:
            for number, group in enumerate(self.fp16_groups):
                self.averaged_gradients[number] = [self._gradients[p] for p in group]
        self._ended = True
        self._fetching.after_backward()

    # -- the update ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """The rule's copies take the weights of the model."""
        for part, flat in zip(self.fp32_partitioned_groups_flat, self._flats, strict=True):
            part.copy_(flat)

    def step(self) -> None:
        """Update the parts; weights that stay whole are put together again."""
        self.micro_step_id, self._ended = 0, False
        self._fetching.release_all()
        for pieces in self.averaged_gradients.values():
            for piece in pieces:
                piece.to(torch.float64).norm()
        self.zero_grad()
        for number, (part, flat) in enumerate(zip(self.fp32_partitioned_groups_flat, self._flats, strict=True)):
            if not self.settings.offloads:
                with called(GRADIENTS):
                    part.grad = flattened(self.averaged_gradients.pop(number))
            group = self.optimizer.param_groups[self._group_of[number]]
            group["params"] = [part]
            with self.settings.beside_update():
                part.grad.mul_(1.0)  # type: ignore[union-attr]
                self.optimizer.step()
            group["params"] = []
            flat.copy_(part)
            if not self.settings.offloads:
                part.grad = None
        gather_now([cut for cut in self.cuts.values() if cut.stays], self.settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of whole weights."""
        for parameter in self.grad_position:
            parameter.grad = None
        self.micro_step_id, self._ended = 0, False

    def reset_cpu_buffers(self) -> None:
        """Norms are not kept here."""


def engine_without_data(whole_pass: nn.Module, rule: Optimizer, config: dict[str, Any], run: Run) -> EngineWithoutData:
    """What stands for DeepSpeed's engine in a prediction."""
    settings = Settings(run.world, config["zero_optimization"], device_kind(run.device) == "cuda")
    if settings.stage == 3:
        return EngineWithoutData(whole_pass, WeightsInParts(whole_pass, rule, settings))
    return EngineWithoutData(whole_pass, ZeROWithoutData(rule, settings))
