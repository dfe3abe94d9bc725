"""Weights to disk and back: adapters in peft's format, whole models in transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lowmem.errors import UserError


def save_pretrained(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """The result of a run: an adapter in peft's format, or a whole model in transformers' format."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        save_file(named_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_weights(model: nn.Module, folder: Path) -> None:
    """The trainable weights of a checkpoint: peft's own files for an adapter, else all weights by parameter name."""
    if _is_peft(model):
        # "auto" would ask the hub for the base model's vocabulary at every checkpoint.
        model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        return
    save_file(named_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Take back what `save_weights` wrote, in place.

    Raises:
        UserError: a key is missing, unexpected, or of another shape.
    """
    if _is_peft(model):
        from peft import get_peft_model_state_dict

        # peft strips the adapter's name from the keys; the tensors are the live ones, so copying into them loads.
        _copy_into(get_peft_model_state_dict(model, save_embedding_layers=False), folder / "adapter_model.safetensors")
    else:
        _copy_into(_state(model), folder / "model.safetensors")


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name, as contiguous tensors."""
    return {name: tensor.contiguous() for name, tensor in _state(model).items()}


def _state(model: nn.Module) -> dict[str, Tensor]:
    everything = model.state_dict()
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    return {name: tensor.detach() for name, tensor in everything.items() if name not in shared}


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _copy_into(live: dict[str, Tensor], path: Path) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        stored = set(file.keys())
        missing, unexpected = sorted(live.keys() - stored), sorted(stored - live.keys())
        if missing or unexpected:
            raise UserError(
                f"{path}: missing {missing[:3]}, unexpected {unexpected[:3]}; it belongs to another model or recipe"
            )
        for name, tensor in live.items():
            value = file.get_tensor(name)
            if value.shape != tensor.shape:
                raise UserError(f"{path}: {name} has shape {tuple(value.shape)}, the model wants {tuple(tensor.shape)}")
            tensor.copy_(value)
