"""A bound on what a run can need, without running anything: enough to let small runs pass at once."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowmem.model import blocks

# Per weight: itself, gradient, two moments, an average, a copy each for autocast, evaluation and a foreach update, in
# float32.
_PER_WEIGHT = 32
# Of what goes into and comes out of every matrix, per token: kept in float32, with what lies between matrices.
_PER_TOKEN = 12
_PER_SCORE = 24  # of an attention matrix: scores, mask, softmax, dropout, their casts and gradients
_WORKSPACES = 64 * 2**20


def upper_bound(model: nn.Module, tokens: int, longest: int) -> int:
    """Bytes that a step of full training without any technique stays below, for transformers of the usual kinds.

    It is one and a half to five times too high, and meant to be: `tests/test_memory_check.py` holds it against
    predictions of many strategies and architectures.

    Args:
        model: on any device; only shapes are looked at.
        tokens: of the largest batch, padding included, taken as one micro-batch.
        longest: tokens of the longest row there may be.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 64)
    parameters = list(model.parameters())
    values = sum(p.numel() for p in parameters)
    widths = sum(sum(p.shape) for p in parameters if p.dim() > 1)
    vocabulary = max((max(p.shape) for p in parameters if p.dim() > 1), default=0)  # the head, also where it is tied
    scores = tokens * (longest + 16) * heads * len(blocks(model))
    return _WORKSPACES + _PER_WEIGHT * values + _PER_TOKEN * tokens * (widths + vocabulary) + _PER_SCORE * scores
