"""Data parallelism with a whole model on every card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.strategies.distributed.data_parallel import WholePass, over_ranks, sum_gradients
from lowmem.strategies.distributed.ddp_without_data import DDPWithoutData
from lowmem.strategy import ForwardBackward, Loss, Sample, Stage, Strategy, Trait


@dataclass
class DDP(Strategy):
    """torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704): every rank computes other rows of a batch.

    Model, gradients and optimizer state are on every rank; gradients are added up while backward runs, once per
    optimizer step. Frozen weights are not sent around: every rank has read the same. Quantised ones are replicated.

    Attributes:
        bucket_cap_mb: MiB of gradients that are sent together.
        find_unused_parameters: for models in which a row does not reach every trained weight (experts).
    """

    stage: ClassVar[Stage] = Stage.PARALLEL
    slot: ClassVar[str | None] = "data_parallel"
    saves: ClassVar[str] = "time: every rank takes its share of the rows; activations of a batch that is not split"
    costs: ClassVar[str] = "the gradients are sent once per optimizer step; every rank holds all weights and states"
    period = 1
    remedy: ClassVar[str] = "drop it, or ddp"

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    _engine: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise UserError(f"ddp.bucket_cap_mb: above 0; got {self.bucket_cap_mb}")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP, Trait.STATIC_PARAMS, Trait.DENSE_PARAMS})

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.SHARED})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.ONE_PROCESS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        run.world.claim_rest("data", self.name)
        return config

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        if run.world.group_size("data") == 1 or Trait.WHOLE_MODEL not in run.traits:
            return loss
        assert run.model is not None
        whole_pass = WholePass(run.model, loss)
        self._engine = self._around(whole_pass, run)

        def reduced(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            summed: Tensor = self._engine(inputs) if torch.is_grad_enabled() else loss(model, inputs)
            return summed

        return reduced

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        if Trait.WHOLE_MODEL in run.traits:
            return over_ranks(forward_backward, run.world, self._unsynchronised)

        # The engine listens to a call of the whole model, and here nobody makes one.
        def summed(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            loss = forward_backward(micro_batches, divisor)
            if torch.is_grad_enabled():
                sum_gradients(run.trainable.values(), run.world, self.bucket_cap_mb * 2**20)
            return loss

        return over_ranks(summed, run.world)

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        with self._engine.no_sync():
            yield

    def _around(self, whole_pass: nn.Module, run: Run) -> Any:
        group = run.world.group("data")
        if run.device.type == "meta":
            return DDPWithoutData(whole_pass, group, self.bucket_cap_mb)
        frozen = [name for name, p in whole_pass.named_parameters() if not p.requires_grad]
        frozen += [name for name, _ in whole_pass.named_buffers()]
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(whole_pass, frozen)
        engine = DistributedDataParallel(
            whole_pass,
            process_group=group,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        engine.register_comm_hook(group, lambda group, bucket: _add_up(group, bucket))
        return engine


def _add_up(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Gradients summed over the ranks; without a hook they are averaged."""
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
