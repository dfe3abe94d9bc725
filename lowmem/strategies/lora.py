"""LoRA: small trainable matrices beside frozen ones, through peft."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lowmem.adapters import (
    another,
    open_adapter,
    plain_setting,
    put_on,
    require_modules,
    require_wide_modules,
    take_over,
    without_input_casts,
)
from lowmem.config import LoadConfig
from lowmem.embeddings import embedding_names, new_token_ids, ties_embeddings
from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.model import adaptable, fused_experts, linears, unwrapped
from lowmem.run import Run
from lowmem.strategy import ForwardBackward, Stage, Strategy, Trait
from lowmem.weights import load_weights
from lowmem.world import World


@dataclass
class LoRA(Strategy):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), rsLoRA (Kalajdzievski 2023) and DoRA (Liu et al. 2024).

    Attributes:
        r: rank of the adapters.
        lora_alpha: scale; the adapter's output is multiplied by lora_alpha / r.
        lora_dropout: dropout on the adapter's input.
        target_modules: names of linear layers, or `all-linear` (all in the decoder layers, routers left alone).
        use_rslora: scale by lora_alpha / sqrt(r).
        use_dora: train magnitude and direction apart.
        modules_to_save: names of modules that are trained in full and saved with the adapter.
        adapter_name_or_path: an adapter that is trained further: a folder in peft's format, a checkpoint, or a run
            folder. The other fields come from it; one that is given, too, must be the same.
    """

    stage: ClassVar[Stage] = Stage.ADAPT
    slot: ClassVar[str | None] = "adapter"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "gradients and optimizer state of all frozen weights"
    costs: ClassVar[str] = "two thin matrix products per layer; an update of rank r"
    period = 1

    r: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    adapter_name_or_path: str | None = field(default=None, metadata={"path": True})
    _given: frozenset[str] = field(init=False, repr=False, compare=False)
    _start: tuple[Path, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> LoRA:
        """Takes note of which fields are given: beside an adapter, a default is no wish."""
        new = super().__new__(cls)
        new._given = frozenset({*kwargs, *(f.name for f, _ in zip(fields(cls), args, strict=False))})
        return new

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UserError("lora.r: counts from 1")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora.lora_dropout: from 0 to below 1; got {self.lora_dropout}")

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.TRAINABLE})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if self.adapter_name_or_path is not None:
            place, adapter = self._start = open_adapter(self.adapter_name_or_path)
            take_over(self, self._given, place, adapter)
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        import_bitsandbytes()  # before peft does
        if self.modules_to_save:
            require_wide_modules(model, "lora.modules_to_save", run)
        config = self._new_config(model, run) if self._start is None else self._old_config(model)
        no_data = run.device.type == "meta"
        base_then, base_now = config.base_model_name_or_path, getattr(model, "name_or_path", None)
        adapted = put_on(model, config, "lora", no_data=no_data)
        if self._start is not None:
            self._load(adapted, self._start[0])
            if base_then and base_now and base_then != base_now:
                run.notice(f"lora: {self._start[0]} was trained on {base_then}; here its base is {base_now}")
        elif self.target_modules == "all-linear" and (left := fused_experts(model)):
            run.notice(f"lora: {left:,} weights of fused experts are no linear layers and get no adapter")
        return adapted

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        return without_input_casts(forward_backward, run)

    def settings(self) -> dict[str, Any]:
        everything = super().settings()
        if self.adapter_name_or_path is None or self._start is not None:
            return everything
        return {name: everything[name] for name in everything if name in self._given}  # the rest is in the adapter

    def _load(self, adapted: nn.Module, place: Path) -> None:
        try:
            load_weights(adapted, place, World())  # before anything is shared
        except UserError as error:
            raise UserError(f"lora.adapter_name_or_path: {error}") from error

    def _old_config(self, model: nn.Module) -> Any:
        assert self._start is not None
        place, config = self._start
        inner: Any = unwrapped(model)
        rows = config.trainable_token_indices or []
        ids = rows if isinstance(rows, list) else [row for some in rows.values() for row in some]
        if ids and (new := len({row for row in ids if row >= len(inner.get_input_embeddings().weight)})):
            raise UserError(
                f"lora.adapter_name_or_path: {place} has trained {new} tokens that the base does not have; give the "
                "same model.add_tokens as then"
            )
        if self.target_modules == "all-linear":
            held = plain_setting(config.target_modules)
            chosen = {n for n, _ in model.named_modules() if any(f".{n}".endswith(f".{t}") for t in held)}
            if chosen != set(linears(model)):
                raise another("target_modules", self.target_modules, place, held)
        return config

    def _new_config(self, model: nn.Module, run: Run) -> Any:
        from peft import LoraConfig

        self._check_names(model)
        return LoraConfig(
            r=self.r,
            lora_alpha=self.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=self.lora_dropout,
            target_modules=self._targets(model),
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            modules_to_save=self.modules_to_save,
            trainable_token_indices=self._new_tokens(model, run),
            task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        )

    def _targets(self, model: nn.Module) -> list[str]:
        if self.target_modules != "all-linear":
            return [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        names = adaptable(model)
        if not names:
            raise UserError(f"lora.target_modules: {type(model).__name__} has no linear layer in its decoder layers")
        return names

    def _new_tokens(self, model: nn.Module, run: Run) -> dict[str, list[int]] | None:
        """Rows of added tokens, which are trained unless the whole embedding and head are."""
        ids = new_token_ids(model)
        if not ids:
            return None
        names = embedding_names(model)
        saved = [n for n in names if any(f".{n}".endswith(f".{given}") for given in self.modules_to_save or ())]
        if saved and saved != names:
            raise UserError(
                f"lora.modules_to_save: has {saved[0]} and not {' and '.join(set(names) - set(saved))}, where the new "
                "tokens would stay frozen; name both, or neither (their rows are trained alone then)"
            )
        if saved:
            return None
        run.notice(f"lora: the rows of {len(ids)} new tokens are trained in {' and '.join(names)}")
        return dict.fromkeys(names[:1] if ties_embeddings(model) else names, ids)

    def _check_names(self, model: nn.Module) -> None:
        for key in ("target_modules", "modules_to_save"):
            value: Any = getattr(self, key) or []
            require_modules(model, f"lora.{key}", [value] if isinstance(value, str) else value)
