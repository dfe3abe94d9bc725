"""AdamW: the optimizer that fills its slot where no other does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _foreach_utils

from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import spread_over
from lowmem.strategy import MakeOptimizer, Stage, Strategy


@dataclass
class AdamW(Strategy):
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): two moments in the dtype of the weights.

    Attributes:
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        fused: one kernel for the whole update. Null: wherever the device has it; the unfused update holds a copy of
            all second moments for a while.
    """

    stage: ClassVar[Stage] = Stage.UPDATE
    slot: ClassVar[str | None] = "optimizer"
    saves: ClassVar[str] = "nothing: it is the measure of the others"
    costs: ClassVar[str] = "two moments, 8 bytes per trainable float32 weight"
    period = 1

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    fused: bool | None = None

    def __post_init__(self) -> None:
        check_moments(self.name, self.betas, self.eps)

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        # asked anew each time: while a step is recorded on the meta device, the answer is that of the real one
        fused = run.device.type in _foreach_utils._get_fused_kernels_supported_devices()
        fused = fused if self.fused is None else self.fused

        def adamw(parameters: list[nn.Parameter]) -> Optimizer:
            groups = decay_groups(parameters, run.config.weight_decay)
            return torch.optim.AdamW(groups, lr=run.config.learning_rate, betas=self.betas, eps=self.eps, fused=fused)

        return adamw


def check_moments(name: str, betas: tuple[float, float], eps: float) -> None:
    """Raise UserError for decays outside [0, 1) and a negative epsilon."""
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"{name}.betas: each from 0 to below 1; got {list(betas)}")
    if eps < 0:
        raise UserError(f"{name}.eps: not negative; got {eps}")


def decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and embeddings decay; norms and biases, whatever their names, have one dimension."""
    kinds = dict.fromkeys(spread_over(p) for p in parameters)  # one update of many tensors takes one kind of them
    groups = [
        {"params": [p for p in parameters if (p.dim() >= 2) == decays and spread_over(p) == kind], "weight_decay": rate}
        for decays, rate in ((True, weight_decay), (False, 0.0))
        for kind in kinds
    ]
    return [group for group in groups if group["params"]]
