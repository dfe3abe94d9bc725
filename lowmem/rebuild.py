"""A model as training saw it, from its files: the base, quantised where it was, and the trained weights on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lowmem import checkpoint
from lowmem.config import LoadConfig, ModelConfig
from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import load_model, raise_trainable_dtype
from lowmem.recipe import Recipe
from lowmem.run import Run, pick_device
from lowmem.strategy import Stage, Strategy, check_slots, traits
from lowmem.weights import load_adapter

# What shapes a forward pass. Recompute, compilation, updates and averages belong to training; adapters are read.
FORWARD = (Stage.QUANTIZE, Stage.ADAPT, Stage.KERNEL, Stage.ROUNDING, Stage.PRECISION, Stage.SPLIT, Stage.PACK)
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def is_adapter(folder: Path) -> bool:
    """Whether an adapter in peft's format lies there."""
    return (folder / "adapter_config.json").is_file()


def is_prompt(folder: Path) -> bool:
    """Whether the adapter is a learned prompt: its file holds what its encoder made, and no encoder."""
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(folder))
    return bool(config.is_prompt_learning)


def rebuild(recipe: Recipe, weights: Path | None, named: bool) -> tuple[nn.Module, Run, list[Strategy]]:
    """A model in evaluation mode, nothing trainable; what strategies see; those that shape a forward pass.

    Args:
        recipe: base model, training numbers, strategies.
        weights: an adapter, a whole model or a checkpoint; null for the base model as it is.
        named: the user has just named the base model.

    Raises:
        UserError: a file is damaged, does not fit, or is not there.
    """
    ordered, strategies, run, load = _prepare(recipe)
    if weights is not None and not is_adapter(weights):
        model = _whole_model(load, weights)
    else:
        model = _base(load, strategies, run, named)
        if weights is not None:
            model = _with_adapter(model, weights, load.trainable_dtype)
    for strategy in strategies:
        if strategy.stage > Stage.ADAPT:
            model = strategy.wrap_model(model, run)
    run.model = model.eval()
    averages = [strategy for strategy in ordered if strategy.stage is Stage.AVERAGE]
    if averages and weights is not None and (weights / "trainer.json").is_file():
        _take_averages(run, weights, averages)
    model.requires_grad_(False)
    return model, run, strategies


def base_model(recipe: Recipe) -> nn.Module:
    """The base model as training saw it: quantised, without adapters."""
    _, strategies, run, load = _prepare(recipe)
    return _base(load, strategies, run, named=False)


def _prepare(recipe: Recipe) -> tuple[list[Strategy], list[Strategy], Run, LoadConfig]:
    """All strategies in order, those that shape a forward pass, what they see, and how the base model is loaded."""
    ordered = sorted(recipe.strategies, key=lambda strategy: strategy.stage)
    check_slots(ordered)
    strategies = [strategy for strategy in ordered if strategy.stage in FORWARD]
    run = Run(recipe.training, pick_device(None), traits(ordered)[0])
    load = LoadConfig.of(recipe.model, run.device)
    for strategy in strategies:
        if strategy.stage is not Stage.ADAPT:  # the adapter that training started from may be gone
            load = strategy.configure(load, run)
    return ordered, strategies, run, load


def given_in_memory(model: ModelConfig) -> bool:
    """Whether a run was handed a module, so that its recipe names a class and no place."""
    import transformers

    name = model.name_or_path
    return name.isidentifier() and hasattr(transformers, name)


def _base(load: LoadConfig, strategies: Sequence[Strategy], run: Run, named: bool) -> nn.Module:
    """The base model, quantised where training had it so."""
    assert load.model is not None
    name = load.model.name_or_path
    if not named and given_in_memory(load.model):
        raise UserError(f"the base model of this run was given in memory ({name}) and has no name; give --base PATH")
    try:
        model = load_model(load)
    except UserError as error:
        raise error if named else UserError(f"{error}; if the base model has moved, give --base PATH") from error
    for strategy in strategies:
        if strategy.stage < Stage.ADAPT:
            model = strategy.wrap_model(model, run)
    return model


def _with_adapter(base: nn.Module, folder: Path, dtype: str | None) -> nn.Module:
    """The adapter on its base, in the dtypes it was trained in."""
    import_bitsandbytes()  # before peft does
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"{folder}: the adapter has no adapter_model.safetensors")
    try:
        with warnings.catch_warnings():  # what peft warns of is an error below
            warnings.simplefilter("ignore")
            model = load_adapter(base, folder, is_trainable=not is_prompt(folder))
            raise_trainable_dtype(model, dtype)
            state = load_file(file)
            set_peft_model_state_dict(model, dict(state))  # once more: 16-bit modules had rounded what they got
            wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    except UserError:
        raise
    except SafetensorError as error:
        raise UserError(f"{file}: the file is damaged ({error})") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{folder}: the adapter does not fit its base model: {' '.join(str(error).split())}") from error
    if missing := sorted(wanted.keys() - state.keys()):
        raise UserError(f"{file}: it lacks {missing[0]} (and {len(missing) - 1} more), which its base model needs")
    return model


def _whole_model(load: LoadConfig, folder: Path) -> nn.Module:
    """A model that was trained in full, every weight in the dtype it was saved in."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: this model is none of transformers'; build it and load {folder / 'model.safetensors'} into it"
        )
    stored = _stored_dtypes(folder)
    widest = max(stored.values(), key=lambda dtype: (dtype.itemsize, dtype is torch.bfloat16), default=torch.float32)
    assert load.model is not None
    found: Any = load_model(
        replace(
            load,
            model=replace(load.model, name_or_path=str(folder), revision=None, add_tokens=None),
            dtype=str(widest).removeprefix("torch."),
            from_pretrained={"output_loading_info": True},
        )
    )
    model, report = found
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise UserError(f"{folder}: weights and config.json do not fit: {sorted(map(str, wrong))[:3]}")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(stored.get(name, parameter.dtype))
    return model  # type: ignore[no-any-return]


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Name -> dtype of the floating-point tensors in a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no dict
        except SafetensorError as error:
            raise UserError(f"{path}: the file is damaged ({error})") from error
        found.update({name: _DTYPES[kind] for name, kind in kinds.items() if kind in _DTYPES})
    return found


@torch.no_grad()
def _take_averages(run: Run, folder: Path, strategies: Sequence[Strategy]) -> None:
    """Give the model of a checkpoint the weights that evaluation saw: a checkpoint keeps averages beside the raw ones.

    A result needs none of it: it was saved as evaluation sees it.
    """
    assert run.model is not None
    run.trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}

    @contextmanager
    def plain() -> Iterator[nn.Module]:
        assert run.model is not None
        yield run.model

    for strategy in strategies:
        strategy.wrap_step(lambda: None, run)
    checkpoint.load_strategies(folder, strategies)
    for strategy in strategies:
        with strategy.wrap_inference(plain, run)():
            seen: dict[str, Tensor] = {name: p.detach().clone() for name, p in run.trainable.items()}
        for name, parameter in run.trainable.items():
            parameter.copy_(seen[name])
