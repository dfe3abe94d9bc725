"""Data parallelism with a part of the model on every card."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lowmem.config import LoadConfig
from lowmem.loading import raise_trainable_dtype
from lowmem.model import blocks
from lowmem.ops.without_data import keeping
from lowmem.run import Run, device_kind
from lowmem.strategies.distributed.data_parallel import over_ranks
from lowmem.strategy import ForwardBackward, Inference, MakeOptimizer, Stage, Strategy, Trait


@dataclass
class FSDP2(Strategy):
    """torch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277): weights, gradients and states in parts.

    A decoder layer is put together when it is computed, and taken apart again; gradients are added up and cut as soon
    as they are there. Quantised weights, which are no numbers that could be cut, are replicated.

    Attributes:
        offload: parts wait in the host's memory, and the optimizer works there.
        param_dtype: layers are put together and computed in it; null: in the dtype of the parts.
        reduce_dtype: gradients are added up in it; null: in that of the layers.
        reshard_after_forward: layers are taken apart after forward, too, and put together again for backward.
    """

    stage: ClassVar[Stage] = Stage.PARALLEL
    slot: ClassVar[str | None] = "data_parallel"
    saves: ClassVar[str] = "weights, gradients and states: every rank holds its part of them"
    costs: ClassVar[str] = "each layer is sent twice per pass, its gradient once"
    period = 1
    remedy: ClassVar[str] = "drop it, or use ddp, which keeps whole weights on every rank"

    offload: bool = False
    param_dtype: Literal["bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    reshard_after_forward: bool = True
    _trainable_dtype: str | None = field(default=None, init=False, repr=False)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether layers are computed in the dtype of their parts."""
        return self.param_dtype is None and self.reduce_dtype in (None, "float32")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP, Trait.STATIC_PARAMS, Trait.LAYER_BY_LAYER})

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.SHARED})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.ONE_PROCESS, Trait.DENSE_PARAMS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        self._trainable_dtype = config.trainable_dtype
        if run.world.claim_rest("data", self.name) > 1:
            if self.offload and run.device.type == "cpu":
                run.notice("fsdp_2.offload: on a CPU the parts wait in the host's memory anyway")
            here = config.device if run.device.type == "meta" else "cpu"
            return replace(config, device=here, on_host=device_kind(run.device) == "cuda")
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        if run.world.group_size("data") == 1:
            return model
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        # A loss that wants no logits gets hidden states as a view; nobody here writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        raise_trainable_dtype(model, self._trainable_dtype)  # parts keep the dtype they are made with
        options = self._options(model, run)
        for block in blocks(model):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gradients are added up, not averaged
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        return model

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        if not (self.offload and run.device.type == "meta"):
            return make

        def on_host(parameters: list[nn.Parameter]) -> Optimizer:
            rule = make(parameters)
            step = type(rule).step
            rule.step = MethodType(_keeping_on_host(step), rule)  # type: ignore[method-assign]
            return rule

        return on_host

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        return over_ranks(forward_backward, run.world)

    def wrap_inference(self, inference: Inference, run: Run) -> Inference:
        if run.world.group_size("data") == 1:
            return inference

        from torch.distributed.fsdp import FSDPModule

        @contextmanager
        def in_parts() -> Iterator[nn.Module]:
            try:
                with inference() as model:
                    yield model
            finally:  # what an evaluation has put together may be the averaged weights of another strategy
                for module in run.model.modules() if run.model else ():
                    if isinstance(module, FSDPModule):
                        module.reshard()

        return in_parts

    def _options(self, model: nn.Module, run: Run) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        named = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype}
        dtypes = {key: getattr(torch, name) for key, name in named.items() if name}
        options: dict[str, Any] = {
            "mesh": run.world.mesh["data"],
            "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False),
            "ignored_params": {p for p in model.parameters() if not p.is_floating_point()},
        }
        pins = device_kind(run.device) == "cuda"
        return {**options, "offload_policy": CPUOffloadPolicy(pin_memory=pins)} if self.offload else options


def _keeping_on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    def on_host(rule: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with keeping("host"):
            return step(rule, *args, **kwargs)

    return on_host
