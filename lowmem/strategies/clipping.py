"""Gradient clipping by global norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import global_norm, scale
from lowmem.strategy import Stage, Step, Strategy, Trait


@dataclass
class GradientClipping(Strategy):
    """Scales all gradients down together when their global norm is above a bound (Pascanu et al. 2013).

    The trainer adds it for `training.max_grad_norm`. It logs the norm before clipping, in true (unscaled) units.

    Attributes:
        max_norm: the bound on the 2-norm over all trainable parameters.
    """

    stage: ClassVar[Stage] = Stage.CLIP
    slot: ClassVar[str | None] = "clip"
    saves: ClassVar[str] = "nothing: it keeps training stable"
    costs: ClassVar[str] = "one pass over the gradients"
    period = 1
    remedy: ClassVar[str] = "set max_grad_norm: null, and leave gradient_clipping out"

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise UserError(f"gradient_clipping.max_norm: above 0; got {self.max_norm}")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP})

    def wrap_step(self, step: Step, run: Run) -> Step:
        def clipped() -> None:
            gradients = run.gradients()
            norm = global_norm(gradients, run.world)
            run.log(grad_norm=norm)  # the step inside looks at it; a norm that is not finite goes no further
            scale(gradients, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
            step()

        return clipped
