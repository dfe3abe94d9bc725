"""What data parallelism has in common, whatever engine adds up the gradients: every rank has rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.loss import IGNORE
from lowmem.strategy import ForwardBackward, Loss, Sample
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
        mine.append(left[rank::size] or [without_targets(left[-1])])
    return mine


def without_targets(sample: Sample) -> Sample:
    """The sample, for the place it takes: nothing in it counts."""
    return {**sample, "labels": np.full(len(sample["labels"]), IGNORE)}


def over_ranks(
    forward_backward: ForwardBackward,
    world: World,
    unsynchronised: Callable[[], AbstractContextManager[None]] | None = None,
) -> ForwardBackward:
    """The pass over this rank's share, and the mean loss over all.

    Gradients are to be added up over the ranks, not averaged: an average would have to be made up for in the loss,
    which under float16 overflows then where one process does not.

    Args:
        forward_backward: of one rank; its engine adds up gradients.
        world: whose dimension `data` is meant.
        unsynchronised: inside, a backward pass adds to this rank's gradients only; null: all micro-batches go in one
            pass.
    """
    size, rank = world.group_size("data"), world.place("data")
    if size == 1:
        return forward_backward

    def shared(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
        mine = share(micro_batches, rank, size)
        if unsynchronised is None or len(mine) == 1 or not torch.is_grad_enabled():
            return world.sum(forward_backward(mine, divisor), "data")
        with unsynchronised():
            total = forward_backward(mine[:-1], divisor)
        return world.sum(total + forward_backward(mine[-1:], divisor), "data")

    return shared


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], world: World, bucket_bytes: float) -> None:
    """Put the sum over the ranks along `data` in place of every gradient; where a rank has none, it counts as zero.

    Args:
        parameters: the same on all ranks of the group, in the same order.
        world: whose ranks.
        bucket_bytes: as many gradients as fit into it are sent together.
    """
    trained = list(parameters)
    if world.group_size("data") == 1:
        return
    # a prediction has no numbers to ask for: there the other ranks have what this one has
    device = torch.device("cpu") if world.is_silent else trained[0].device
    there = torch.tensor([float(p.grad is not None) for p in trained], device=device)
    anywhere = world.sum(there, "data").tolist()
    gradients = list[Tensor]()
    for p, ranks in zip(trained, anywhere, strict=True):
        if ranks:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(p.grad)
    while gradients:
        bucket = [gradients.pop(0)]
        while gradients and gradients[0].dtype == bucket[0].dtype and _bytes([*bucket, gradients[0]]) <= bucket_bytes:
            bucket.append(gradients.pop(0))
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat, group=world.group("data"))
        for g, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            g.copy_(part.view_as(g))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


class WholePass(nn.Module):
    """Model and loss as one module for an engine, and the model itself stays as it is: names, saving, generation."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the loss."""
        return self._loss(self.model, inputs)
