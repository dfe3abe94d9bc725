"""Logits of a few tokens, of two models one after the other: what was trained, and what became of it on disk."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lowmem.rebuild import rebuild
from lowmem.run import pick_device
from lowmem.run_folder import RunFolder
from lowmem.strategy import Stage

_TOKENS = 24
_NEWEST = 4  # the last rows of the vocabulary are among them: tokens that were added


def probe_merge(run_folder: RunFolder, adapter: Path, merged: Path, notices: list[str]) -> dict[str, float] | None:
    """How far the logits of a merged model are from those of its base with the adapter.

    Args:
        run_folder: the run.
        adapter: the adapter's folder.
        merged: the merged model; transformers alone loads it.
        notices: is told where the memory is too small to load the model; None is returned then.

    Returns:
        largest_logit_difference, largest_logit (for the scale), same_top_token (share of positions).
    """
    if not fits(merged, notices):
        return None
    recipe = run_folder.recipe  # averages that lie beside the weights of a checkpoint are not merged
    strategies = [strategy for strategy in recipe.strategies if strategy.stage is not Stage.AVERAGE]
    model = rebuild(replace(recipe, strategies=strategies), adapter, named=False)[0]
    ids = probe_ids(model)
    expected = logits(model, ids)
    del model
    release()
    return compare(expected, logits(plain_model(merged), ids))


def compare(expected: Tensor, found: Tensor) -> dict[str, float]:
    """Two sets of logits (tokens, vocabulary), as numbers."""
    return {
        "largest_logit_difference": float((expected - found).abs().max()),
        "largest_logit": float(expected.abs().max()),
        "same_top_token": float((expected.argmax(-1) == found.argmax(-1)).float().mean()),
    }


def probe_ids(model: Any) -> Tensor:
    """Token ids (1, tokens), always the same for one size of vocabulary."""
    rows = len(model.get_input_embeddings().weight)
    ids = torch.randint(rows, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    ids[-_NEWEST:] = torch.arange(rows - _NEWEST, rows).clamp(min=0)
    return ids[None]


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) in float32, on the CPU."""
    device = next(model.parameters()).device
    result: Tensor = model(input_ids=ids.to(device)).logits[0].float().cpu()
    return result


def plain_model(folder: Path) -> nn.Module:
    """A folder as transformers alone loads it, in its own dtype."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": pick_device(0)})
    return model.eval()


def release() -> None:
    """Give back what a deleted model held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fits(folder: Path, notices: list[str], factor: float = 1) -> bool:
    """Whether the memory that is free now holds a model's weights, `factor` times as large as they lie on disk.

    Where it does not, that is added to `notices`.
    """
    size = int(factor * sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    if free >= size:
        return True
    notices.append(f"not checked: the model needs {size / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are free")
    return False
