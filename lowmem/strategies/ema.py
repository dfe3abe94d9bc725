"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import copy_whole
from lowmem.strategy import Inference, Stage, Step, Strategy, Trait


@dataclass
class EMA(Strategy):
    """Keeps an average of the trainable weights; evaluation and the saved result see it, training does not.

    Averages are float32 for 16-bit weights (Polyak and Juditsky 1992; decay as in Morales-Brotons et al. 2024,
    arXiv:2411.18704).

    Attributes:
        decay: share of the old average that is kept at every step.
    """

    stage: ClassVar[Stage] = Stage.AVERAGE
    slot: ClassVar[str | None] = "average"
    saves: ClassVar[str] = "nothing: it makes the result steadier"
    costs: ClassVar[str] = "one more copy of the trainable weights, and a second one while evaluating"
    period = 1

    decay: float = 0.999
    _average: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise UserError(f"ema.decay: between 0 and 1; got {self.decay}")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.STATIC_PARAMS, Trait.WEIGHTS_AT_HAND})

    def wrap_step(self, step: Step, run: Run) -> Step:
        # dict.update keeps the object that wrap_inference and load_state_dict hold, too
        self._average.update({name: _wide(p).clone() for name, p in run.trainable.items()})

        @torch.no_grad()
        def averaged() -> None:
            step()
            for name, parameter in run.trainable.items():
                self._average[name].lerp_(_wide(parameter), 1 - self.decay)

        return averaged

    def wrap_inference(self, inference: Inference, run: Run) -> Inference:
        @contextmanager
        def with_average() -> Iterator[nn.Module]:
            raw = {name: p.detach().clone() for name, p in run.trainable.items()}
            _assign(run, self._average)
            try:
                with inference() as model:
                    yield model
            finally:
                _assign(run, raw)

        return with_average

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, average in self._average.items():  # of a pipeline, a rank has its own layers only
            copy_whole(average, state["average"][name])


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


@torch.no_grad()
def _assign(run: Run, values: dict[str, Tensor]) -> None:
    for name, parameter in run.trainable.items():
        parameter.copy_(values[name])
