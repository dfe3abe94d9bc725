"""Pipeline parallelism: every card has some of the layers, and micro-batches go through them one behind another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lowmem.batches import to_device
from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.model import takes_one_row
from lowmem.ops.without_data import keeping
from lowmem.run import Run, device_kind
from lowmem.stage_checks import prove, require_own_parameters
from lowmem.stages import Stages, borders
from lowmem.strategies.distributed.data_parallel import without_targets
from lowmem.strategies.distributed.pipeline_without_data import few_stand_for_all
from lowmem.strategy import Loss, Sample, Stage, Strategy, Trait


@dataclass
class PipelineParallel(Strategy):
    """torch.distributed.pipelining: stages of layers on the ranks of a group (Huang et al. 2019, arXiv:1811.06965).

    The first stage has the embedding, the last one norm, head and loss; hidden states go forward, their gradients back.
    All micro-batches of a pass have one shape: shorter ones are padded, rows without a target fill them up. Where there
    are fewer micro-batches than stages, the rows are split anew, into as many as there are stages.

    Attributes:
        stages: stages, each on a rank of its own; null: as many as there are processes.
        schedule: `1f1b` (Narayanan et al. 2021, arXiv:2104.04473): a stage holds activations of no more micro-batches
            than there are stages from it to the end; `gpipe`: of all.
    """

    stage: ClassVar[Stage] = Stage.PIPELINE
    slot: ClassVar[str | None] = "pipeline"
    saves: ClassVar[str] = "weights, gradients and states: every rank has those of its layers"
    costs: ClassVar[str] = "stages wait for one another at both ends of a pass; hidden states are sent twice"
    remedy: ClassVar[str] = "drop it, or use ddp, which keeps all layers together"

    stages: int | None = None
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    _stages: Stages | None = field(default=None, init=False, repr=False)
    _dtypes: list[torch.dtype] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.stages is not None and self.stages < 1:
            raise UserError("pipeline_parallel.stages: counts from 1")

    @property
    def period(self) -> int | None:
        """A layer more for every stage."""
        return self.stages

    def ranks_apart(self, ranks: int, layers: int) -> Iterable[int]:
        """Both ends; of stages between them with as many layers the first, which holds most micro-batches."""
        number = min(self.stages or ranks, ranks)
        sizes = [end - start for start, end in pairwise(borders(layers, number))]
        middle = {sizes[place]: place for place in range(number - 2, 0, -1)}
        return {0, number - 1, *middle.values()}

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP, Trait.STATIC_PARAMS, Trait.DENSE_PARAMS})

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.SHARED})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.ONE_PROCESS, Trait.WHOLE_MODEL})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if run.world.size == 1:
            return config
        if self.stages is None:
            run.world.claim_rest("pipeline", self.name)
        else:
            run.world.claim("pipeline", self.stages, self.name)
        if run.world.group_size("pipeline") == 1:
            return config
        # cut on the host: no card ever holds the whole model
        here = config.device if run.device.type == "meta" else "cpu"
        return replace(config, device=here, on_host=device_kind(run.device) == "cuda")

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        if run.world.group_size("pipeline") == 1:
            return model
        self._stages = Stages(model, run.world.group_size("pipeline"))
        with keeping("host"):
            prove(self._stages)
        require_own_parameters(self._stages)
        self._stages.keep(run.world.place("pipeline"))
        gc.collect()  # layers of other stages, in cycles with what wraps their forwards
        return nn.Module.to(model, run.device)  # transformers' own refuses to move quantised weights

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        if self._stages is not None:
            stage = _Stage(self._stages, loss, run)

            def scheduled(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
                stage.divisor = divisor
                return self._pass(stage, micro_batches, run)

            run.loop = scheduled
        return loss

    def _pass(self, stage: _Stage, micro_batches: list[list[Sample]], run: Run) -> Tensor:
        """The mean loss, on all ranks; and the gradients of this stage, while gradients are on."""
        self._dtypes = self._dtypes or _dtypes_between(stage.stages, run)
        rows, number = even(micro_batches, stage.stages.number)
        (batch,) = to_device([rows], run.device)
        if "position_ids" in batch and takes_one_row(stage.stages.model):
            batch = {name: tensor.reshape(number, -1) for name, tensor in batch.items()}
        losses = self._schedule(stage, number, batch, run)
        total = torch.stack(losses).detach().sum() if losses else torch.zeros((), device=run.device)
        return run.world.sum(total, "pipeline")

    def _schedule(self, stage: _Stage, number: int, batch: dict[str, Tensor], run: Run) -> list[Tensor]:
        """The loss of every micro-batch, on the last stage; torch's engine is made anew, as shapes change."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        place, stages = run.world.place("pipeline"), stage.stages
        rows, length = batch["input_ids"].shape
        shape, train = (rows // number, length, stages.width), torch.is_grad_enabled()
        is_first, is_last = place == 0, place == stages.number - 1
        with keeping("nowhere"):
            between = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for dtype in self._dtypes]
            scalar = torch.empty((), device="meta", requires_grad=True)
        engine = PipelineStage(
            stage,
            place,
            stages.number,
            run.device,
            input_args=batch["input_ids"][: shape[0]].to("meta") if is_first else between[place - 1],
            output_args=scalar if is_last else between[place],
            group=run.world.group("pipeline"),
        )
        alternating = self.schedule == "1f1b" and train and number >= stages.number
        kind: Any = Schedule1F1B if alternating else ScheduleGPipe  # with fewer micro-batches they are the same
        in_brief = few_stand_for_all(engine, number, alternating=alternating, train=train)
        losses: list[Tensor] = []
        try:
            with in_brief if run.device.type == "meta" else nullcontext(number) as few:
                batch = {name: tensor[: few * shape[0]] for name, tensor in batch.items()}
                schedule = kind(engine, few, loss_fn=_is_the_loss, scale_grads=False)
                go: Callable[..., Any] = schedule.step if train else schedule.eval
                ids = [batch["input_ids"]] if is_first else []
                go(*ids, target=batch["labels"] if is_last else None, losses=losses, return_outputs=False, **batch)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # the engine has put a text of its own around it
        return losses


class _Stage(nn.Module):
    """What the engine calls: the layers of this rank, and on the last one the loss behind them."""

    def __init__(self, stages: Stages, loss: Loss, run: Run) -> None:
        super().__init__()
        self.model, self.stages = stages.model, stages
        self.divisor: float | Tensor = 1.0
        self._loss, self._run = loss, run

    def forward(self, received: Tensor, **inputs: Tensor) -> Tensor:
        """Hidden states (rows, length, width), or the summed loss over the divisor.

        Args:
            received: hidden states of the stage before; token ids on the first one.
            inputs: the micro-batch.
        """
        hidden = None if self.stages.place == 0 else received
        if self.stages.place == self.stages.number - 1:
            return self.stages.finish(self._loss, inputs, received) / self.divisor
        with self._run.autocast():
            return self.stages.run(inputs, hidden)


def even(micro_batches: list[list[Sample]], stages: int) -> tuple[list[Sample], int]:
    """The rows of micro-batches of one size, one after another, and the number of micro-batches."""
    if len(micro_batches) < stages:
        rows = sorted((s for batch in micro_batches for s in batch), key=lambda sample: -len(sample["input_ids"]))
        number = min(len(rows), stages)
        borders = [len(rows) * i // number for i in range(number + 1)]
        micro_batches = [rows[start:end] for start, end in pairwise(borders)]
    size = max(map(len, micro_batches))
    filled = [batch + [without_targets(batch[-1])] * (size - len(batch)) for batch in micro_batches]
    return [sample for batch in filled for sample in batch], len(micro_batches)


def _dtypes_between(stages: Stages, run: Run) -> list[torch.dtype]:
    """The dtype of the hidden states between each stage and the next."""
    found = list[torch.dtype]()
    for place in range(stages.number - 1):
        mine = None
        if stages.place == place or run.world.is_silent:  # where nobody tells, other stages do as this one
            with run.autocast():
                mine = stages.dtype_behind()
        found += [next(dtype for dtype in run.world.from_all(mine) if dtype is not None)]
        if stages.place == place + 1:
            stages.receive(found[-1])
    return found


def _is_the_loss(output: Tensor, labels: Tensor) -> Tensor:
    return output
