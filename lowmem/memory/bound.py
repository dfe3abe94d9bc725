"""A bound on what a run can need, without running anything: enough to let small runs pass at once."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowmem.memory.phases import Answers
from lowmem.model import blocks

# Per weight: itself, gradient, two moments, an average, a copy each for autocast, evaluation and a foreach update, in
# float32.
_PER_WEIGHT = 32
# Of what goes into and comes out of every matrix, per token: kept in float32, with what lies between matrices.
_PER_TOKEN = 12
_PER_SCORE = 24  # of an attention matrix: scores, mask, softmax, dropout, their casts and gradients
# Of answers nothing is kept for a backward pass but keys and values: those, and what one layer computes.
_PER_CACHED = 8
_WORKSPACES = 64 * 2**20


def upper_bound(model: nn.Module, tokens: int, longest: int, answers: Answers | None = None) -> int:
    """Bytes that a step of full training without any technique stays below, for transformers of the usual kinds.

    It is one and a half to five times too high, and meant to be: `tests/test_memory_check.py` holds it against
    predictions of many strategies and architectures.

    Args:
        model: on any device; only shapes are looked at.
        tokens: of the largest batch, padding included, taken as one micro-batch.
        longest: tokens of the longest row there may be.
        answers: prompts that are answered in one go.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 64)
    parameters = list(model.parameters())
    values = sum(p.numel() for p in parameters)
    widths = sum(sum(p.shape) for p in parameters if p.dim() > 1)
    vocabulary = max((max(p.shape) for p in parameters if p.dim() > 1), default=0)  # the head, also where it is tied
    layers = len(blocks(model))
    kept = _PER_TOKEN * tokens * (widths + vocabulary) + _PER_SCORE * tokens * (longest + 16) * heads * layers
    if answers is not None:
        length = answers.prompt_length + answers.new_tokens
        hidden = int(getattr(text, "hidden_size", None) or getattr(text, "n_embd", None) or max(vocabulary, 1))
        cached = hidden * int(getattr(text, "num_key_value_heads", None) or heads) // heads
        head = int(getattr(text, "head_dim", None) or 0) * int(getattr(text, "num_key_value_heads", None) or heads)
        one_layer = _PER_TOKEN * widths // layers + _PER_SCORE * (length + 16) * heads
        answered = answers.rows * length * (_PER_CACHED * layers * max(cached, head) + one_layer)
        kept = max(kept, answered + answers.rows * vocabulary * _PER_TOKEN)
    return _WORKSPACES + _PER_WEIGHT * values + kept
