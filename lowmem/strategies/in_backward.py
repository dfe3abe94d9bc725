"""Optimizer in backward: a parameter is updated, and its gradient freed, as soon as the gradient is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.checks import require_finite_loss
from lowmem.ops.optimizers import PerParameter
from lowmem.run import Run
from lowmem.strategy import Loss, MakeOptimizer, Stage, Strategy, Trait


@dataclass
class OptimizerInBackward(Strategy):
    """Steps every parameter inside backward (Lv et al. 2023, arXiv:2306.09782).

    All gradients never exist together, so nothing can look at all of them: no accumulation, no global-norm clipping.
    """

    stage: ClassVar[Stage] = Stage.PLACEMENT
    slot: ClassVar[str | None] = "placement"
    saves: ClassVar[str] = "gradients: those of a layer or two instead of all"
    costs: ClassVar[str] = "one small update per parameter; no accumulation, no clipping"
    remedy: ClassVar[str] = "drop optimizer_in_backward"

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP})

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        def checked(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            value = loss(model, inputs)
            if torch.is_grad_enabled():
                require_finite_loss(run, value.detach())  # backward is the update: afterwards would be too late
            return value

        return checked

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        def in_backward(parameters: list[nn.Parameter]) -> Optimizer:
            inner = {p: (make([p]), p) for p in parameters}

            def update(parameter: nn.Parameter) -> None:
                inner[parameter][0].step()
                parameter.grad = None

            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
            return PerParameter(inner, step=lambda: None)

        return in_backward
