"""The two ends of a language model: its embedding and its head, and the rows that new tokens get in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem.model import unwrapped


def resize_embeddings(model: nn.Module, rows: int) -> None:
    """Let the embedding and the head grow to `rows` rows; the new ones are the mean of the old, always the same."""
    inner: Any = unwrapped(model)
    old = len(inner.get_input_embeddings().weight)
    inner.resize_token_embeddings(rows, mean_resizing=False)
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    with torch.no_grad():
        for tensor in {id(t): t for end in ends if end is not None for t in end.parameters(recurse=False)}.values():
            if not tensor.is_meta:
                tensor[old:] = mean_row(tensor[:old])


def mean_row(rows: Tensor) -> Tensor:
    """The mean over the first dimension, summed in float32, in the tensor's dtype."""
    return rows.float().mean(0).to(rows.dtype)


def extend_rows(tensor: Tensor, rows: int) -> Tensor:
    """The rows of an embedding or head after `resize_embeddings`; those that are there stay."""
    new = max(0, rows - len(tensor))
    return torch.cat([tensor, mean_row(tensor).expand(new, *tensor.shape[1:])]) if new else tensor


def add_rows_for(model: nn.Module, tokenizer: Any, tokens: list[str]) -> None:
    """Make room for tokens that the tokenizer was given, and remember which they are (`new_token_ids`)."""
    inner: Any = unwrapped(model)
    if len(tokenizer) > len(inner.get_input_embeddings().weight):
        resize_embeddings(model, len(tokenizer))
    inner.lowmem_new_token_ids = sorted(tokenizer.convert_tokens_to_ids(tokens))


def new_token_ids(model: nn.Module) -> list[int]:
    """Rows of the embedding that the weights on disk know nothing of: for added tokens, or by a resize.

    A model that was resized in memory is compared with the configuration it was loaded from, where that lies on this
    machine; the hub is never asked.
    """
    inner: Any = unwrapped(model)
    marked: list[int] | None = getattr(inner, "lowmem_new_token_ids", None)
    if marked is not None:
        return marked
    name = getattr(getattr(inner, "config", None), "_name_or_path", None)
    if not name or not hasattr(inner, "get_input_embeddings"):
        return []
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(name, local_files_only=True)
        known = config.get_text_config().vocab_size
    except (OSError, ValueError, AttributeError):  # not here, of an unknown kind, or without a vocabulary
        return []
    return list(range(known, len(inner.get_input_embeddings().weight)))


def embedding_names(model: nn.Module) -> list[str]:
    """Names of the embedding and of the head (where the model has a head); they may share one tensor."""
    inner: Any = unwrapped(model)
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    found = {id(module): name for name, module in inner.named_modules()}
    return [found[id(end)] for end in ends if end is not None]


def ties_embeddings(model: nn.Module) -> bool:
    """Whether the head is the embedding."""
    inner: Any = unwrapped(model)
    ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
    return ends[1] is not None and ends[0].weight is ends[1].weight
