"""Learning-rate schedules: the factor on the peak rate at each optimizer step, as in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

from lowmem.config import TrainingConfig
from lowmem.errors import UserError


def lr_lambda(config: TrainingConfig, total_steps: int) -> Callable[[int], float]:
    """Factor on the learning rate for step 0, 1, ... (the first step of a warm-up has the rate 0).

    Args:
        config: the shape, and the warm-up as a number of steps or as a share of all steps (rounded up).
        total_steps: optimizer steps of the whole run.

    Raises:
        UserError: a warm-up that is longer than the run.
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    if 0 < total_steps < warmup:
        raise UserError(
            f"training.warmup_steps: {warmup} are more than the {total_steps} steps of the run, whose rate would "
            "never reach its peak"
        )
    decay = _DECAYS[config.lr_scheduler_type]

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return decay(min(1.0, (step - warmup) / max(1, total_steps - warmup)))

    return factor


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
    "constant_with_warmup": lambda done: 1.0,
}
