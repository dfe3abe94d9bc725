"""Knowledge of adapters: how peft lays them out in a model, and in which folders they lie."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.config import ModelConfig
from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import local
from lowmem.strategy import ForwardBackward, Sample, Trait

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# With these, peft changes the base weights when the adapter is made: it fits no other copy of the base.
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda")
TAKEN_OVER = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save")


@torch.no_grad()
def empty_adapters(model: nn.Module) -> tuple[list[str], int]:
    """The trained adapters whose second matrix is all zero, so that they add nothing, and how many there are in all.

    Of matrices that are cut among ranks, this rank's part counts.
    """
    trained = {n: local(p) for n, p in model.named_parameters() if p.requires_grad and _is_second(n)}
    outputs = {name: part for name, part in trained.items() if part.numel()}
    if not outputs:
        return [], 0
    largest = torch.stack([m.float() for m in torch._foreach_norm(list(outputs.values()), math.inf)])
    return [name for name, size in zip(outputs, largest.tolist(), strict=True) if size == 0], len(outputs)


def _is_second(name: str) -> bool:
    return ".lora_B." in name or ".lora_embedding_B." in name


# -- making one -------------------------------------------------------------------------------------------------------


def put_on(model: nn.Module, config: Any, owner: str, *, no_data: bool = False) -> nn.Module:
    """The model with an adapter of peft's, new.

    Args:
        model: changed in place.
        config: peft's.
        owner: name of the strategy, for messages.
        no_data: its weights are made on the meta device; else peft makes and draws them on the host first.

    Raises:
        UserError: what peft says against it.
    """
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            # peft 0.21 asks for a property that transformers 5.24 has renamed
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # `merge` takes care of it
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=no_data)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"{owner}: {' '.join(str(error).split())}") from error
    return adapted


def require_modules(model: nn.Module, key: str, names: Collection[str]) -> None:
    """Every name picks out a module: peft skips one that matches nothing as long as another one matches.

    Raises:
        UserError: one does not; with those near it.
    """
    known = {part for name, _ in model.named_modules() for part in (name, name.rsplit(".", 1)[-1]) if part}
    for name in names:
        if name != "all-linear" and not any(k == name or k.endswith(f".{name}") for k in known):
            words = sorted(k for k in known if "." not in k and not k.isdigit())
            near = get_close_matches(name, words, n=3, cutoff=0.4)
            raise UserError(f"{key}: no module is called {name}" + (f"; near it: {', '.join(near)}" if near else ""))


def require_wide_modules(model: nn.Module, key: str, run: Run) -> None:
    """Modules that are trained in full are trained in float32, which a 16-bit model around them cannot take.

    Raises:
        UserError: it is 16-bit, and nothing casts.
    """
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    if narrow and Trait.AUTOCAST not in run.traits and Trait.FLOAT32 in run.traits:
        raise UserError(
            f"{key}: they are trained in float32 and the model is 16-bit; add mixed_precision, or set model.dtype: "
            "float32"
        )


def without_input_casts(forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
    """Under autocast: peft raises every adapter's input to float32, and autocast would lower it again."""
    if Trait.AUTOCAST not in run.traits or run.model is None:
        return forward_backward
    layers: list[Any] = [m for m in run.model.modules() if hasattr(m, "cast_input_dtype_enabled")]

    def without_casts(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
        _set_casts(layers, False)
        try:
            return forward_backward(micro_batches, divisor)
        finally:
            _set_casts(layers, True)  # outside autocast, peft's cast is needed

    return without_casts


def _set_casts(layers: list[Any], enabled: bool) -> None:
    for layer in layers:
        layer.cast_input_dtype_enabled = enabled


# -- folders ----------------------------------------------------------------------------------------------------------


def find_adapter(folder: Path) -> Path | None:
    """Where the adapter lies: `folder` itself (peft's format, a checkpoint), or the `model/` of a run folder."""
    return next((place for place in (folder, folder / "model") if (place / CONFIG).is_file()), None)


def refuse_adapter(model: ModelConfig | None) -> None:
    """Say what to do where an adapter stands in the place of a model.

    Raises:
        UserError: `name_or_path` leads to an adapter.
    """
    from lowmem.fetch import WEIGHTS as ALIASES

    if model is None or model.name_or_path in ALIASES:
        return
    if (place := find_adapter(Path(model.name_or_path).expanduser())) is None:
        return
    if place.name == "model" and (place.parent / "config.json").is_file():
        return  # a whole model with a folder of that name inside
    base = _read_config(place / CONFIG).get("base_model_name_or_path") or "its base model"
    raise UserError(
        f"model.name_or_path: {place.absolute()} is an adapter, not a model; name {base} there, and to train the "
        f"adapter further set strategies.lora.adapter_name_or_path: {model.name_or_path}"
    )


def open_adapter(name_or_path: str) -> tuple[Path, Any]:
    """The folder of a LoRA adapter to be trained further, and its peft configuration.

    Raises:
        UserError: there is none, it is of another kind, or only a pickle holds its weights.
    """
    where, given = "lora.adapter_name_or_path", Path(name_or_path).expanduser()
    place = find_adapter(given)
    if place is None:
        hint = (
            "the run has no result yet; name one of its checkpoints"
            if (given / "recipe.yaml").is_file() and not (given / "model").is_dir()
            else f"there is no {CONFIG} in it"
            if given.is_dir()
            else "there is no such folder (from the hub, get it with `hf download` first)"
        )
        raise UserError(f"{where}: {given.absolute()} is no adapter: {hint}")
    if not (place / WEIGHTS).is_file():
        pickled = (place / "adapter_model.bin").is_file()
        hint = "adapter_model.bin is a pickle, which is never read; save it as safetensors" if pickled else "incomplete"
        raise UserError(f"{where}: there is no {WEIGHTS} in {place.absolute()} ({hint})")
    kind = _read_config(place / CONFIG).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{where}: {place.absolute()} is an adapter of kind {kind}; only LORA can be trained further")
    from peft import LoraConfig

    try:
        config: Any = LoraConfig.from_pretrained(str(place))
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {place / CONFIG}: {' '.join(str(error).split())}") from error
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise UserError(
            f"{where}: {place.absolute()} was made with init_lora_weights: {start}, which changed the weights of its "
            "base; convert it to a plain LoRA first (see peft's documentation of that method)"
        )
    config.inference_mode = False
    return place, config


def take_over(strategy: Any, given: Collection[str], place: Path, config: Any) -> None:
    """Make a strategy's fields those of the adapter it starts from.

    Raises:
        UserError: a field was given, and is another.
    """
    for name in TAKEN_OVER:
        held, wanted = plain_setting(getattr(config, name)), plain_setting(getattr(strategy, name))
        if name in given and wanted == "all-linear":
            continue  # which layers these are, the model will tell
        if name in given and wanted != held and [wanted] != held:
            raise another(name, getattr(strategy, name), place, held)
        setattr(strategy, name, held)


def another(name: str, wanted: Any, place: Path, held: Any) -> UserError:
    """The error about a field that is not the adapter's."""
    return UserError(
        f"lora.{name}: {wanted} is given, and the adapter {place} has {held}; leave it out, or drop "
        "adapter_name_or_path to start a new adapter"
    )


def plain_setting(value: Any) -> Any:
    """Sets as sorted lists, an empty one as none."""
    return (sorted(value) or None) if isinstance(value, set | list | tuple) else value


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file.absolute()}: cannot be read: {error}") from error
