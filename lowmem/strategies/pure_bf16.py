"""Pure bfloat16: 16-bit weights and gradients, with updates that are rounded at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lowmem.config import LoadConfig
from lowmem.ops.optimizers import PerParameter
from lowmem.ops.rounding import stochastic_round
from lowmem.run import Run
from lowmem.sharded import local, set_data
from lowmem.strategy import MakeOptimizer, Stage, Strategy, Trait


@dataclass
class PureBF16(Strategy):
    """All weights in bfloat16; the update is computed in float32 and rounded stochastically.

    To nearest, an update below half a step of bfloat16 (1/256 of the weight) would vanish (Zamirai et al. 2020,
    arXiv:2010.06192). The moments of the optimizer stay float32 (8-bit with adamw_8bit).
    """

    stage: ClassVar[Stage] = Stage.ROUNDING
    slot: ClassVar[str | None] = "precision"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "half of the weights, gradients and activations"
    costs: ClassVar[str] = "rounding noise; a float32 copy of one parameter while it is updated"
    period = 1

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.WHOLE_LAYERS})  # the dtype of a part of a weight cannot be changed any more

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.FLOAT32})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        return replace(config, dtype="bfloat16", trainable_dtype=None)

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        # Parameters only: buffers such as rotary frequencies need their precision.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        def rounded(parameters: list[nn.Parameter]) -> Optimizer:
            inner = {p: _stand_in(p, make) for p in parameters}

            def step() -> None:
                with _noise_of_all_ranks(run):
                    for parameter, (optimizer, wide) in inner.items():
                        if parameter.grad is not None:
                            _update(parameter, wide, optimizer)

            return PerParameter(inner, step)

        return rounded


@contextmanager
def _noise_of_all_ranks(run: Run) -> Iterator[None]:
    """What several ranks hold is rounded alike on all of them; dropout goes on with the numbers of each rank."""
    if run.world.is_silent:
        yield
        return
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.config.seed * 1_000_003 + run.global_step)
        yield


def _stand_in(parameter: nn.Parameter, make: MakeOptimizer) -> tuple[Optimizer, nn.Parameter]:
    wide = nn.Parameter(parameter.detach().float())
    wide.stands_for = parameter  # type: ignore[attr-defined]  # a rule may depend on which parameter it is
    optimizer = make([wide])
    set_data(wide, local(wide.data).new_empty(0))  # between updates the stand-in holds nothing
    return optimizer, wide


@torch.no_grad()
def _update(parameter: nn.Parameter, wide: nn.Parameter, optimizer: Optimizer) -> None:
    assert parameter.grad is not None
    set_data(wide, parameter.float())
    wide.grad = parameter.grad.float()
    optimizer.step()
    local(parameter).copy_(stochastic_round(local(wide)))
    set_data(wide, local(wide.data).new_empty(0))
    wide.grad = None
