"""Mixed precision: matrix products in 16 bits under autocast, weights and sums in 32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import local
from lowmem.strategy import ForwardBackward, Inference, Loss, Sample, Stage, Step, Strategy, Trait


@dataclass
class MixedPrecision(Strategy):
    """torch.autocast around the loss; float16 adds a loss scale that finds its own size (Micikevicius et al. 2018).

    An overflow under float16 skips the whole step: weights, clipping, averages and schedule stay, the scale is halved.

    Attributes:
        dtype: bfloat16 (no scale needed) or float16.
        initial_scale: the first loss scale of float16.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    slot: ClassVar[str | None] = "precision"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "half of the activations inside layers; faster matrix products"
    costs: ClassVar[str] = "16-bit copies of the weights while a pass runs, where they are 32-bit"
    period = 1
    remedy: ClassVar[str] = "use dtype: bfloat16, which needs no loss scale"

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    initial_scale: float = 2.0**16
    _scaler: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype == "bfloat16" and self.initial_scale != 2.0**16:
            raise UserError("mixed_precision.initial_scale: has no effect with bfloat16, which needs no loss scale")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP}) if self.dtype == "float16" else frozenset()

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.AUTOCAST})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        run.autocast = partial(torch.autocast, run.device.type, dtype=getattr(torch, self.dtype))
        if run.device.type == "cuda" and self.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(False):
            raise UserError("mixed_precision.dtype: this card has no bfloat16; use float16")
        if self.dtype == "float16":
            on_meta = run.device.type == "meta"
            scaler: Any = _ScalerWithoutData if on_meta else partial(torch.amp.GradScaler, run.device.type)
            self._scaler = scaler(init_scale=self.initial_scale)
        return config

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        def autocast(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            with run.autocast():
                return loss(model, inputs)

        return autocast

    def wrap_inference(self, inference: Inference, run: Run) -> Inference:
        @contextmanager
        def autocast() -> Iterator[nn.Module]:
            with inference() as model, run.autocast():
                yield model

        return autocast

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        if self._scaler is None:
            return forward_backward

        def scaled(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return forward_backward(micro_batches, divisor)
            scale = self._scaler.scale(torch.ones((), device=run.device))
            loss: Tensor = forward_backward(micro_batches, divisor / scale) / scale
            return loss

        return scaled

    def wrap_step(self, step: Step, run: Run) -> Step:
        if self._scaler is None:
            return step
        scaler = self._scaler

        def unscaled() -> None:
            optimizer = _StandIn([local(gradient) for gradient in run.gradients()], step)
            scaler.unscale_(optimizer)
            if not run.world.is_silent:
                _agree_on_overflow(scaler, optimizer, run)
            try:
                scaler.step(optimizer)
            finally:  # also where the step inside refuses a loss that is not finite
                scaler.update()
            run.log(loss_scale=scaler.get_scale(), skipped=not optimizer.stepped)

        return unscaled

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict()) if self._scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


def _agree_on_overflow(scaler: Any, optimizer: _StandIn, run: Run) -> None:
    """An overflow in one rank's part of the gradients is everybody's (as in torch's ShardedGradScaler)."""
    found: dict[Any, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    anywhere = run.world.any(any(bool(local(value)) for value in found.values()))
    for device in [*found] or [run.device]:
        found[device] = torch.full((1,), float(anywhere), device=run.device)


class _ScalerWithoutData:
    """What a `GradScaler` allocates and calls, on the meta device: it never finds an overflow, as it cannot look."""

    def __init__(self, init_scale: float) -> None:
        self._scale = init_scale
        self._tensor: Tensor | None = None

    def scale(self, outputs: Tensor) -> Tensor:
        if self._tensor is None:
            self._tensor = torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        return outputs * self._tensor

    def unscale_(self, optimizer: _StandIn) -> None:
        assert self._tensor is not None
        gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        self._found = torch.zeros((), device=self._tensor.device)
        inverse = self._tensor.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, inverse)

    def step(self, optimizer: _StandIn) -> None:
        optimizer.step()

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        return {}


class _StandIn:
    """What the scaler takes for an optimizer: its step is the wrapped one, so a skip skips clipping and averages.

    Its parameters stand for those whose gradients these are, wherever an engine keeps them.
    """

    def __init__(self, gradients: list[Tensor], step: Callable[[], None]) -> None:
        parameters = [gradient.detach() for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.param_groups = [{"params": parameters}]
        self._step = step
        self.stepped = False

    def step(self) -> None:
        self.stepped = True
        self._step()
