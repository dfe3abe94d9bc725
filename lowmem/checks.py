"""Checks a run makes on itself. Each ends it with one line instead of hours of useless work."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.run import Run


class NonFiniteError(UserError):
    """The loss or the gradient is NaN or infinite."""


def require_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of all that is trained, tied weights once.

    Raises:
        UserError: nothing is trainable.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise UserError("model: no parameter is trainable; unfreeze some, or add the strategy lora")
    return trainable


def require_finite(run: Run) -> None:
    """Stop before the weights are touched when the loss of the step is NaN or infinite.

    Raises:
        NonFiniteError: with the step, and what to do.
    """
    require_finite_loss(run, run.metrics["loss"])


def require_finite_loss(run: Run, loss: float | Tensor) -> None:
    """Stop when a loss is NaN or infinite; its gradient must not have reached the weights yet.

    Raises:
        NonFiniteError: with the step, and what to do.
    """
    if run.device.type != "meta" and not math.isfinite(value := float(loss)):
        raise NonFiniteError(
            f"step {run.global_step + 1}: the loss is {value}; the weights were not updated. Lower the learning rate, "
            "look at the rows of this batch, or resume from the last checkpoint"
        )


def require_finite_norm(run: Run, norm: Tensor) -> None:
    """Stop before the weights are touched when a gradient is NaN or infinite.

    Raises:
        NonFiniteError: with the step.
    """
    if run.device.type != "meta" and not math.isfinite(float(norm)):
        raise NonFiniteError(
            f"step {run.global_step + 1}: the gradient's norm is {float(norm)} (loss {float(run.metrics['loss'])}); "
            "the weights were not updated. Lower the learning rate, or resume from the last checkpoint"
        )


class FirstUpdate:
    """After the first step with a learning rate above 0, some trainable weight must have moved.

    Every tensor is summed in float64 before and after; nothing is copied.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before: list[float] | None = None if run.device.type == "meta" else _sums(run)

    def check(self) -> None:
        """Look after a step; once a weight has moved, never again.

        Raises:
            UserError: the step was taken, and no weight has changed.
        """
        if self.before is None or not self.run.metrics["learning_rate"] or self.run.metrics.get("skipped"):
            return
        if self.before == _sums(self.run):
            raise UserError(
                f"step {self.run.global_step}: no trainable weight has moved; the learning rate is too small for the "
                "weights' dtype, no gradient reaches them, or two strategies do not work together (please report it)"
            )
        self.before = None


@torch.no_grad()
def _sums(run: Run) -> list[float]:
    parameters = run.trainable.values()
    return torch.stack([p.sum(dtype=torch.float64) for p in parameters]).tolist()  # type: ignore[no-any-return]
