"""Data parallelism by DeepSpeed's engine, which cuts states, gradients and weights among the ranks."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.loading import raise_trainable_dtype
from lowmem.ops.zero import States, drop_gradients, gradients, held, mark_parts
from lowmem.run import Run, device_kind
from lowmem.sharded import scale
from lowmem.strategies.distributed.data_parallel import WholePass, over_ranks
from lowmem.strategies.distributed.zero3_without_data import engine_without_data
from lowmem.strategy import ForwardBackward, Loss, MakeOptimizer, Sample, Stage, Strategy, Trait


@dataclass
class DeepSpeedZeRO(Strategy):
    """DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): every rank keeps a part of what all have twice.

    DeepSpeed's engine reduces the gradients and steps the optimizer of this run. Clipping, precision, learning rate and
    checkpoints stay lowmem's; nothing that the engine would do by default to the numbers is left on.

    Attributes:
        zero_stage: 1: states are cut; 2: gradients, too; 3: weights, too.
        offload_optimizer: states and the update are the host's.
        offload_param: the cut weights wait in the host's memory (stage 3).
        reduce_bucket_size: elements of gradients, and of weights, that are sent together; a float32 buffer as large.
        param_persistence_threshold: parameters of so many elements stay whole on every rank (stage 3).
    """

    stage: ClassVar[Stage] = Stage.PARALLEL
    slot: ClassVar[str | None] = "data_parallel"
    saves: ClassVar[str] = "states (stage 1), gradients (2) and weights (3): every rank holds its part of them"
    costs: ClassVar[str] = "DeepSpeed; a second float32 copy of each rank's part of the trained weights"
    remedy: ClassVar[str] = "drop it, or use ddp or fsdp_2"

    zero_stage: Literal[1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_param: bool = False
    reduce_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    _engine: Any = field(default=None, init=False, repr=False)
    _pass: Any = field(default=None, init=False, repr=False)
    _trainable_dtype: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.zero_stage not in (1, 2, 3):
            raise UserError(f"deepspeed_zero.zero_stage: 1, 2 or 3; got {self.zero_stage}")
        if self.offload_param and self.zero_stage != 3:
            raise UserError("deepspeed_zero.offload_param: stages 1 and 2 keep whole weights; set zero_stage: 3")
        if self.reduce_bucket_size < 1:
            raise UserError(f"deepspeed_zero.reduce_bucket_size: counts from 1; got {self.reduce_bucket_size}")
        if self.param_persistence_threshold < 0:
            raise UserError("deepspeed_zero.param_persistence_threshold: not negative")

    @property
    def period(self) -> int | None:
        """At stage 3, layers are kept or let go of by how many weights there are."""
        return None if self.zero_stage == 3 else 1

    @property
    def needs(self) -> frozenset[Trait]:
        needed = {Trait.GRADS_AT_STEP, Trait.STATIC_PARAMS, Trait.FLOAT32, Trait.WHOLE_MODEL, Trait.WHOLE_LAYERS}
        return frozenset(needed | {Trait.PLAIN_WEIGHTS, Trait.LAYER_BY_LAYER} if self.zero_stage == 3 else needed)

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.SHARED})

    @property
    def breaks(self) -> frozenset[Trait]:
        broken = {Trait.ONE_PROCESS, Trait.DENSE_PARAMS}
        return frozenset(broken | {Trait.WEIGHTS_AT_HAND, Trait.PURE_BLOCKS} if self.zero_stage == 3 else broken)

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if run.world.claim_rest("data", self.name) != run.world.size:
            raise UserError("deepspeed_zero: DeepSpeed takes all processes; use ddp or fsdp_2 beside other dimensions")
        if run.world.size == 1:
            return config
        self._trainable_dtype = config.trainable_dtype
        if run.device.type == "meta":
            return replace(config, on_host=self.zero_stage == 3 and device_kind(run.device) == "cuda")
        _import_deepspeed(run)
        return replace(config, device="cpu", on_host=True) if self.zero_stage == 3 else config

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        if run.world.size == 1:
            return loss
        assert run.model is not None
        self._pass = _Placed(run.model, loss)

        def reduced(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            whole_pass = self._engine if torch.is_grad_enabled() else self._pass
            summed: Tensor = whole_pass(inputs)
            return summed

        return reduced

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        if run.world.size == 1:
            return make

        def sharded(parameters: list[nn.Parameter]) -> Optimizer:
            rule, config = make(parameters), self._config(run)
            if self.zero_stage == 3:
                raise_trainable_dtype(self._pass, self._trainable_dtype)  # parts keep the dtype they are made with
            around = engine_without_data if run.device.type == "meta" else _with_deepspeed
            self._engine = around(self._pass, rule, config, run)
            if self.zero_stage == 3:
                mark_parts(self._pass, run.world)
            zero = self._engine.optimizer
            run.find_gradients = lambda: gradients(zero, self.offload_optimizer)
            run.find_held = lambda: held(zero)
            return _Sharded(parameters, self._engine, States(zero, run.world), self.offload_optimizer)

        return sharded

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        shared = over_ranks(forward_backward, run.world, self._unsynchronised)
        if run.world.size == 1:
            return shared

        def added_up(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            loss = shared(micro_batches, divisor)
            if torch.is_grad_enabled():  # the engine has averaged them
                scale(run.gradients(), torch.tensor(float(run.world.group_size("data"))))
            return loss

        return added_up

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def _config(self, run: Run) -> dict[str, Any]:
        """DeepSpeed's own configuration: all that touches a number is said, whatever its default is."""
        host = {"device": "cpu", "pin_memory": device_kind(run.device) == "cuda"}
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "reduce_bucket_size": self.reduce_bucket_size,
            "allgather_bucket_size": self.reduce_bucket_size + self.reduce_bucket_size % 2,
            "memory_efficient_linear": False,  # it would replace torch's linear function, for everybody
            "round_robin_gradients": False,
        }
        if self.zero_stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": self.reduce_bucket_size,
                "stage3_param_persistence_threshold": self.param_persistence_threshold,
            }
        zero |= {"offload_optimizer": host} if self.offload_optimizer else {}
        zero |= {"offload_param": host} if self.offload_param else {}
        off = {"enabled": False}
        return {
            "train_batch_size": run.world.size,  # of micro-batches; lowmem counts rows and says when a step is complete
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # by default it is 1
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "fp16": off,
            "bf16": off,
            "torch_autocast": off,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "wall_clock_breakdown": False,
            "timers": {"throughput": off},
        }


class _Placed(WholePass):
    """It lies where it is to lie: frozen weights of other strategies may be elsewhere than on the device."""

    def to(self, *_: Any, **__: Any) -> _Placed:
        return self


class _Sharded(Optimizer):
    """The optimizer as the run sees it: the groups are those of the update rule, the states are parts."""

    def __init__(self, parameters: list[nn.Parameter], engine: Any, states: States, offloaded: bool) -> None:
        super().__init__(parameters, {})
        self.param_groups = states.rule.param_groups
        self.state = states  # type: ignore[assignment]
        self._engine, self._states, self._offloaded = engine, states, offloaded
        engine.set_gradient_accumulation_boundary(True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with the gradients that backward has added up; closures are not supported."""
        assert closure is None
        self._engine.optimizer.refresh_fp32_params()  # a checkpoint's weights go to the model, not to DeepSpeed's copy
        self._engine.step()
        self._states.counts.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, of a step that was left out, too."""
        assert set_to_none
        drop_gradients(self._engine.optimizer, self._offloaded)


def _with_deepspeed(whole_pass: nn.Module, rule: Optimizer, config: dict[str, Any], run: Run) -> Any:
    """DeepSpeed's engine."""
    deepspeed = _import_deepspeed(run)
    deepspeed.init_distributed(verbose=False)  # it takes over torch's process group
    if config["zero_optimization"]["stage"] == 3:
        deepspeed.zero.Init(module=whole_pass, config_dict_or_path=config)
        for buffer in whole_pass.buffers():
            buffer.data = buffer.data.to(run.device)
    return deepspeed.initialize(model=whole_pass, optimizer=rule, config=config)[0]


def _import_deepspeed(run: Run) -> Any:
    if run.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for cards, and compile for them
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UserError(f"deepspeed_zero: pip install 'lowmem[deepspeed]' ({error})") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It would compile collectives of its own for a CPU, for a minute, behind a lock that a killed run leaves behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
