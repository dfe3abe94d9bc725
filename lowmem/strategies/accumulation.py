"""Gradient accumulation: the rows of one optimizer step, a few at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import ClassVar

from torch import Tensor

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.strategy import ForwardBackward, Sample, Stage, Strategy, Trait


@dataclass
class GradientAccumulation(Strategy):
    """Splits the rows of a step into micro-batches whose gradients add up; the sum stays the same.

    Rows of like length go together, so that little is padded.

    Attributes:
        steps: micro-batches per optimizer step.
        micro_batch_size: rows per micro-batch (packed rows under packing); 1 where neither is given.
    """

    stage: ClassVar[Stage] = Stage.SPLIT
    slot: ClassVar[str | None] = "split"
    saves: ClassVar[str] = "activations: those of one micro-batch instead of the whole batch"
    costs: ClassVar[str] = "smaller matrix products; gradients live from the first micro-batch on"
    period = 1
    remedy: ClassVar[str] = "drop gradient_accumulation and lower training.batch_size"

    steps: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.micro_batch_size is not None:
            raise UserError("gradient_accumulation: give steps or micro_batch_size, not both")
        if self.steps is None and self.micro_batch_size is None:
            self.micro_batch_size = 1
        if (self.steps or self.micro_batch_size or 0) < 1:
            raise UserError("gradient_accumulation: steps and micro_batch_size count from 1")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        for field in ("steps", "micro_batch_size"):
            value = getattr(self, field)
            if value is not None and value > run.config.batch_size:
                raise UserError(
                    f"gradient_accumulation.{field}: {value} is more than training.batch_size {run.config.batch_size}, "
                    "the rows of one optimizer step; raise batch_size or lower it"
                )
        return config

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        def split(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            return forward_backward([piece for batch in micro_batches for piece in self._pieces(batch)], divisor)

        return split

    def _pieces(self, batch: list[Sample]) -> list[list[Sample]]:
        longest_first = sorted(batch, key=lambda sample: -len(sample["input_ids"]))
        number = min(len(batch), self.steps or ceil(len(batch) / (self.micro_batch_size or 1)))
        borders = [len(batch) * i // number for i in range(number + 1)]
        return [longest_first[start:end] for start, end in pairwise(borders)]
