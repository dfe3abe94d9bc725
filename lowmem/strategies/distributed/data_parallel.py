"""What data parallelism has in common, whatever engine adds up the gradients: every rank has rows of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from lowmem.loss import IGNORE
from lowmem.strategy import ForwardBackward, Sample
from lowmem.world import World


def share(micro_batches: list[list[Sample]], rank: int, size: int) -> list[list[Sample]]:
    """The micro-batches of one rank out of `size`; every rank gets as many, so that all of them stay in step.

    Whole micro-batches go round the ranks, so that each holds as many rows at a time as one process would. The rows of
    those that do not go round are dealt out. A rank that gets none of them has a row without a target.
    """
    rounds = len(micro_batches) // size * size
    mine = micro_batches[rank:rounds:size]
    if left := [sample for batch in micro_batches[rounds:] for sample in batch]:
        left.sort(key=lambda sample: -len(sample["input_ids"]))
        mine.append(left[rank::size] or [_without_targets(left[-1])])
    return mine


def _without_targets(sample: Sample) -> Sample:
    return {**sample, "labels": np.full(len(sample["labels"]), IGNORE)}


def over_ranks(
    forward_backward: ForwardBackward,
    world: World,
    unsynchronised: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ForwardBackward:
    """The pass over this rank's share, and the mean loss over all.

    Gradients are to be added up over the ranks, not averaged: an average would have to be made up for in the loss,
    which under float16 overflows then where one process does not.

    Args:
        forward_backward: of one rank; its engine adds up gradients.
        world: whose dimension `data` is meant.
        unsynchronised: inside, a backward pass adds to this rank's gradients only.
    """
    size, rank = world.group_size("data"), world.place("data")
    if size == 1:
        return forward_backward

    def shared(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
        mine = share(micro_batches, rank, size)
        if len(mine) == 1 or not torch.is_grad_enabled():
            return world.sum(forward_backward(mine, divisor), "data")
        with unsynchronised():
            total = forward_backward(mine[:-1], divisor)
        return world.sum(total + forward_backward(mine[-1:], divisor), "data")

    return shared
