"""Adapter: any method of peft's, by its name there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.adalora import AdaLoRALoop
from lowmem.adapters import put_on, require_modules, require_wide_modules, without_input_casts
from lowmem.config import LoadConfig
from lowmem.embeddings import embedding_names, new_token_ids
from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.loss import count
from lowmem.memory.meta_adapters import UNPREDICTABLE
from lowmem.model import adaptable
from lowmem.peft_methods import (
    FLOAT32_TABLES,
    IN_CACHE,
    IN_PATH,
    MOVES_POSITIONS,
    bring_home,
    make_config,
    method_names,
    names_layers,
    require_quantised,
    require_settings,
)
from lowmem.run import Run
from lowmem.strategy import ForwardBackward, Sample, Stage, Step, Strategy, Trait
from lowmem.weights import not_in_file

_NAMES_MODULES = ("target_modules", "feedforward_modules", "modules_to_save")


@dataclass(init=False)
class Adapter(Strategy):
    """Any method of the installed peft: IA3, LoHa, LoKr, OFT, BOFT, VeRA, FourierFT, prompt and prefix tuning, ...

    `lora` is the common case, with checks and defaults of its own; `peft_type: LORA` is for those of peft's settings
    that it does not have. In Python the settings may be given as they are: `Adapter("IA3", target_modules=[...])`.

    Attributes:
        peft_type: the method, by peft's name (`IA3`, `LOHA`, `OFT`, ...); there is no default.
        config: the fields of peft's configuration class of that method; `target_modules: all-linear` means all linear
            layers in the decoder layers. What is left out has peft's defaults.
    """

    stage: ClassVar[Stage] = Stage.ADAPT
    slot: ClassVar[str | None] = "adapter"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "gradients and optimizer state of all frozen weights; what is trained depends on the method"
    costs: ClassVar[str] = "the method's own work in every layer; an update of its shape"

    peft_type: str | None = None
    config: dict[str, Any] | None = None
    _model: Any = field(default=None, init=False, repr=False, compare=False)
    _loop: AdaLoRALoop | None = field(default=None, init=False, repr=False, compare=False)

    def __init__(self, peft_type: str | None = None, config: dict[str, Any] | None = None, **settings: Any) -> None:
        if twice := settings.keys() & (config or {}).keys():
            raise UserError(f"adapter.config: {sorted(twice)[0]} is given twice")
        self.peft_type = peft_type
        self.config = {**(config or {}), **settings} or None
        self._model = self._loop = None
        if peft_type is None:
            if self.config:
                raise UserError("adapter.config: has no effect without peft_type")
            return
        require_settings(peft_type, self.config or {})
        if peft_type != "ADALORA" or "total_step" in (self.config or {}):
            make_config(peft_type, self._without_ours())

    @property
    def needs(self) -> frozenset[Trait]:
        wanted = {
            Trait.GRADS_AT_STEP: ("ADALORA",),
            Trait.RUN_ONCE: IN_CACHE,
            Trait.FLOAT32: FLOAT32_TABLES,
        }
        return frozenset(trait for trait, methods in wanted.items() if self.peft_type in methods)

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.TRAINABLE})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.POSITIONS}) if self.peft_type in MOVES_POSITIONS else frozenset()

    @property
    def period(self) -> int | None:
        return None if names_layers(self.config or {}) else 1

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if self.peft_type is None:
            raise UserError(f"adapter.peft_type: name a method of peft's: {', '.join(method_names())}")
        if self.peft_type == "ADALORA" and "total_step" not in (self.config or {}):
            if run.config.max_steps is None:
                raise UserError("adapter.config.total_step: ADALORA plans its ranks by it; set it, or max_steps")
            make_config("ADALORA", {**self._without_ours(), "total_step": run.config.max_steps})
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        import_bitsandbytes()  # before peft does
        assert self.peft_type is not None
        settings = dict(self.config or {})
        for key in _NAMES_MODULES:
            if isinstance(settings.get(key), list):
                require_modules(model, f"adapter.config.{key}", settings[key])
        if settings.get("target_modules") == "all-linear":
            settings["target_modules"] = adaptable(model)
        if settings.get("modules_to_save"):
            require_wide_modules(model, "adapter.config.modules_to_save", run)
        if self.peft_type in IN_PATH:
            require_wide_modules(model, f"adapter: the weights of {self.peft_type}", run)
        if self.peft_type == "ADALORA":
            settings.setdefault("total_step", run.config.max_steps)
        require_quantised(self.peft_type, model)
        if run.device.type == "meta" and self.peft_type in UNPREDICTABLE:
            raise UserError(f"adapter: {self.peft_type} cannot be predicted: {UNPREDICTABLE[self.peft_type]}")
        self._require_new_tokens(model)
        config = make_config(self.peft_type, settings, causal=hasattr(model, "prepare_inputs_for_generation"))
        self._model = adapted = put_on(model, config, "adapter")
        bring_home(adapted, run.device)
        if self.peft_type == "ADALORA":
            self._loop = AdaLoRALoop(adapted)
        return adapted

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        inner, loop = without_input_casts(forward_backward, run), self._loop
        if loop is None:
            return inner

        def penalised(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            loss = inner(micro_batches, divisor)
            if not torch.is_grad_enabled():
                return loss
            share = sum(map(count, micro_batches)) / divisor  # of the batch, and of the loss's scale
            penalty = loop.penalty() * share
            penalty.backward()  # type: ignore[no-untyped-call]
            return loss + penalty.detach()

        return penalised

    def wrap_step(self, step: Step, run: Run) -> Step:
        loop = self._loop
        if loop is None:
            return step

        def allocated() -> None:
            step()
            loop.allocate(run.global_step)

        return allocated

    def state_dict(self) -> dict[str, Any]:
        left = not_in_file(self._model)  # peft saves what a prompt's encoder makes, not the encoder
        state: dict[str, Any] = {"parameters": left} if left else {}
        return state | ({"adalora": self._loop.state_dict()} if self._loop else {})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        named = dict(self._model.named_parameters())
        for name, tensor in state.get("parameters", {}).items():
            named[name].copy_(tensor)
        if self._loop:
            self._loop.load_state_dict(state["adalora"])

    def _without_ours(self) -> dict[str, Any]:
        """The settings as peft knows them."""
        settings = dict(self.config or {})
        if settings.get("target_modules") == "all-linear":
            del settings["target_modules"]
        return settings

    def _require_new_tokens(self, model: nn.Module) -> None:
        """The rows of added tokens are trained, or the user is told how."""
        ids, settings = new_token_ids(model), self.config or {}
        names = embedding_names(model) if ids else []
        saved = settings.get("modules_to_save") or []
        if ids and not (
            settings.get("trainable_token_indices")
            or self.peft_type == "TRAINABLE_TOKENS"
            or all(any(f".{name}".endswith(f".{given}") for given in saved) for name in names)
        ):
            raise UserError(
                f"adapter: the rows of {len(ids)} new tokens would stay untrained; name {' and '.join(names)} in "
                "config.modules_to_save, or use lora, which trains these rows alone"
            )
