"""Linear layers of which every rank holds a part, as torch's DTensor: what goes into and comes out of them is plain.

The split is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): weights are (outputs, inputs); where outputs
are cut, the gradients of the input are added up over the ranks, where inputs are cut, the outputs are. The forward of a
layer is replaced, so who replaces it in turn (a slice of a layer that leaves it out) sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from lowmem.model import wrap_forward

Side = Literal["outputs", "inputs"]


def cut_linear(linear: nn.Module, side: Side, mesh: DeviceMesh, device: torch.device, *, whole_around: bool) -> None:
    """Take this rank's part of a linear layer, and no more, to the device; every rank must hold the same whole.

    Args:
        linear: its parameters are replaced under their names.
        side: what is cut, evenly.
        mesh: one dimension.
        device: of the mesh's kind.
        whole_around: the activation on the cut side is whole outside: outputs are gathered, inputs taken apart.
    """
    for name, parameter in list(linear.named_parameters(recurse=False)):
        cut: Placement = Replicate()  # a bias where inputs are cut: it is added once, to the sum
        mine = parameter.data
        if side == "outputs" or name == "weight":
            dim = 0 if side == "outputs" else 1
            cut, mine = Shard(dim), mine.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        part = DTensor.from_local(mine.to(device, copy=True), mesh, [cut], run_check=False)
        setattr(linear, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    outside: Placement = Replicate() if whole_around else Shard(-1)
    given, wanted, returned = (
        (Replicate(), Replicate(), outside) if side == "outputs" else (outside, Shard(-1), Replicate())
    )

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def in_parts(x: Tensor) -> Tensor:
            spread = DTensor.from_local(x, mesh, [given], run_check=False).redistribute(placements=[wanted])
            result: Tensor = forward(spread).redistribute(placements=[returned]).to_local()
            return result

        return in_parts

    wrap_forward(linear, make)


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters that are whole on every rank, but see its part of the activations: gradients become sums over ranks.

    Within the graph, so a pass over several micro-batches, or over slices, adds up right.
    """

    if not module._parameters:
        return

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def summed(*args: Any, **kwargs: Any) -> Any:
            own = dict(module._parameters)
            try:
                for name, parameter in own.items():
                    if parameter is not None and parameter.requires_grad:
                        spread = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
                        module._parameters[name] = spread.to_local(grad_placements=[Partial()])  # type: ignore[assignment]
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(own)

        return summed

    wrap_forward(module, make)


class DropoutOfPart(nn.Module):
    """Dropout of this rank's part of an activation that is cut along its last dimension.

    All ranks draw the numbers of the whole, which are those that one process would draw, and take their own.
    """

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self.p, self.mesh = p, mesh

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width / ranks), with some of its values zero."""
        if not self.training:
            return x
        width = x.shape[-1]
        ones = x.new_ones(*x.shape[:-1], width * self.mesh.size())
        mask = functional.dropout(ones, self.p).narrow(-1, width * self.mesh.get_local_rank(), width)
        return x * mask


@torch.no_grad()
def bring(model: nn.Module, device: torch.device) -> None:
    """What is not cut, parameters and buffers, goes to the device."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
