"""Weights to disk and back: adapters in peft's format, whole models in transformers'."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lowmem.embeddings import embedding_names, new_token_ids, resize_embeddings
from lowmem.errors import UserError
from lowmem.model import unwrapped
from lowmem.sharded import copy_whole, gathered, is_spread, parts_of, whole_shape
from lowmem.world import World


def save_pretrained(model: nn.Module, tokenizer: Any, folder: Path, world: World) -> None:
    """The result of a run: an adapter in peft's format, or a whole model in transformers' format.

    All ranks must ask; rank 0 writes.
    """
    state = complete_state(model, world)
    if not world.is_main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if _is_peft(model):
        _save_adapter(model, folder, _would_be_lost(model), state)
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    else:
        save_file(state or named_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_weights(model: nn.Module, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """The trainable weights of a checkpoint: peft's own files for an adapter, else all weights by parameter name.

    Args:
        model: whose weights.
        folder: where to.
        state: whole tensors by name, where no rank has all of them (`complete_state`).
    """
    if _is_peft(model):
        # "auto" would ask the hub for the base model's vocabulary at every checkpoint.
        _save_adapter(model, folder, False, state)
        return
    save_file(state or named_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)


def load_weights(model: nn.Module, folder: Path, world: World) -> None:
    """Take back what `save_weights` wrote, in place.

    Raises:
        UserError: a key is missing, unexpected, or of another shape.
    """
    if _is_peft(model):
        from peft import get_peft_model_state_dict

        # peft strips the adapter's name from the keys; the tensors are the live ones, so copying into them loads.
        state = model.state_dict(keep_vars=True)
        live = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
        _copy_into(live, folder / "adapter_model.safetensors", world)
    else:
        _copy_into(_state(model), folder / "model.safetensors", world)


def not_in_file(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters of a model with an adapter that are not in peft's file of it, by name."""
    from peft import get_peft_model_state_dict

    if any(p.is_meta for p in model.parameters()):  # peft would run a prompt's encoder, and copy what it makes
        return {}
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    held = {tensor.untyped_storage()._cdata for tensor in saved.values()}
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {name: p for name, p in trained.items() if p.untyped_storage()._cdata not in held}


def load_adapter(base: nn.Module, folder: Path, *, is_trainable: bool = False) -> nn.Module:
    """Put an adapter in peft's format on the untouched base model, which grows first where tokens were added.

    Raises:
        UserError: there is no adapter, or it belongs to another model.
    """
    from peft import PeftModel

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder.absolute()} holds no adapter (it has no adapter_config.json)")
    grow_for(base, folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # `merge` takes care of it
            adapted: nn.Module = PeftModel.from_pretrained(base, str(folder), is_trainable=is_trainable)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{folder}: does not fit its base model: {' '.join(str(error).split())[:300]}") from error
    return adapted


def grow_for(base: nn.Module, folder: Path) -> None:
    """Give the embedding of a base model the rows that an adapter was trained with."""
    inner: Any = base
    if (rows := vocabulary_rows(base, folder)) > len(inner.get_input_embeddings().weight):
        resize_embeddings(base, rows)


def vocabulary_rows(base: nn.Module, folder: Path) -> int:
    """Rows that the embedding must have for an adapter: more than the base model's where tokens were added."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    indices = config.get("trainable_token_indices") or []
    lists = indices.values() if isinstance(indices, dict) else [indices]
    inner: Any = unwrapped(base)
    needed: list[int] = [len(inner.get_input_embeddings().weight), *(max(ids) + 1 for ids in lists if ids)]
    names = {
        f"base_model.model.{name}.{kind}" for name in embedding_names(base) for kind in ("weight", "base_layer.weight")
    }
    with open_safetensors(folder / "adapter_model.safetensors") as file:
        needed += [file.get_slice(key).get_shape()[0] for key in names.intersection(file.keys())]
    return max(needed)


def open_safetensors(path: Path) -> Any:
    """`safetensors.safe_open`, with an error of one line for a damaged file."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(
            f"{path}: the file is damaged ({error}); take another copy, or an earlier checkpoint"
        ) from error


def _save_adapter(model: nn.Module, folder: Path, embedding: bool, state: dict[str, Tensor] | None) -> None:
    """peft's own files; with `state` from `complete_state` where no rank has everything."""
    adapted: Any = model
    if state is None or state.keys() <= model.state_dict().keys():
        adapted.save_pretrained(folder, save_embedding_layers=embedding, state_dict=state)
        return
    adapted.save_pretrained(folder, save_embedding_layers=embedding)  # peft asks the modules of this stage alone
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _would_be_lost(model: nn.Module) -> bool:
    """Whether the embedding has rows that are neither in the base model's files nor in the adapter.

    peft's own "auto" would ask the hub for the base model's vocabulary.
    """
    ends: Any = unwrapped(model)
    embedding = ends.get_input_embeddings() if hasattr(ends, "get_input_embeddings") else None
    covered = hasattr(embedding, "modules_to_save") or hasattr(embedding, "token_adapter")
    return embedding is not None and not covered and bool(new_token_ids(model))


def complete_state(model: nn.Module, world: World) -> dict[str, Tensor] | None:
    """Whole tensors by name, on rank 0, where no rank has all of them; else null: the model itself has them.

    All ranks must ask. The names are the model's, and those of peft's file for the stages of a model with an adapter.
    """
    state = model.state_dict(keep_vars=True) if _is_peft(model) else _state(model)
    if not is_spread(state.values(), world):
        return None
    if _is_peft(model) and world.group_size("pipeline") > 1:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(model, save_embedding_layers=False)
    elif _is_peft(model):
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        state = {name: tensor for name, tensor in state.items() if name in trained}
    whole: dict[str, Tensor] = gathered(state, world) or {}
    return {name: tensor.contiguous() for name, tensor in whole.items()}


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name, as contiguous tensors."""
    return {name: tensor.contiguous() for name, tensor in _state(model).items()}


def _state(model: nn.Module) -> dict[str, Tensor]:
    everything = model.state_dict(keep_vars=True)  # a detached tensor would not know of its parts
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    kept = {name: tensor for name, tensor in everything.items() if name not in shared}
    return {name: tensor if parts_of(tensor) else tensor.detach() for name, tensor in kept.items()}


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _copy_into(live: dict[str, Tensor], path: Path, world: World) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        stored, anywhere = set(file.keys()), set(live)
        if world.group_size("pipeline") > 1:
            anywhere = {name for names in world.from_all(list(live)) for name in names}
        missing, unexpected = sorted(live.keys() - stored), sorted(stored - anywhere)
        if missing or unexpected:
            raise UserError(
                f"{path}: missing {missing[:3]}, unexpected {unexpected[:3]}; it belongs to another model or recipe"
            )
        for name, tensor in live.items():
            value = file.get_tensor(name)
            if value.shape != (wanted := whole_shape(tensor)):
                raise UserError(f"{path}: {name} has shape {tuple(value.shape)}, the model wants {tuple(wanted)}")
            copy_whole(tensor, value)
