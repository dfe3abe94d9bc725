"""Optimizer in backward: a parameter is updated, and its gradient freed, as soon as the gradient is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.checks import require_finite, require_finite_loss
from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.ops.optimizers import PerParameter
from lowmem.run import Run
from lowmem.sharded import whole
from lowmem.strategy import Loss, MakeOptimizer, Stage, Step, Strategy, Trait


@dataclass
class OptimizerInBackward(Strategy):
    """Steps every parameter inside backward (Lv et al. 2023, arXiv:2306.09782).

    All gradients never exist together, so nothing can look at all of them: no accumulation, no global-norm clipping.
    A loss that is not finite is found before the update, a gradient only after it: such a run stops.
    """

    stage: ClassVar[Stage] = Stage.PLACEMENT
    slot: ClassVar[str | None] = "placement"
    saves: ClassVar[str] = "gradients: those of a layer or two instead of all"
    costs: ClassVar[str] = "one small update per parameter; no accumulation, no clipping"
    period = 1
    remedy: ClassVar[str] = "drop optimizer_in_backward"

    _norms: list[Tensor] = field(default_factory=list, init=False, repr=False)

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if run.config.on_nonfinite == "skip":
            raise UserError(
                "optimizer_in_backward: training.on_nonfinite: skip cannot be honoured, since weights are updated "
                "before the whole gradient is known; set on_nonfinite: stop, or drop optimizer_in_backward"
            )
        return config

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
                assert parameter.grad is not None
                self._norms.append(whole(torch.linalg.vector_norm(parameter.grad.detach())).float())
                inner[parameter][0].step()
                parameter.grad = None

            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
            return PerParameter(inner, step=lambda: None)

        return in_backward

    def wrap_step(self, step: Step, run: Run) -> Step:
        def looked_at() -> None:
            norms, self._norms = self._norms, []
            if norms:
                run.log(grad_norm=torch.stack(norms).norm())
            require_finite(run, damaged=True)
            step()

        return looked_at
