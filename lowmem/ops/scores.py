"""Cross entropy and greedy hits of a linear head, over chunks of tokens and without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.ops.cross_entropy import default_chunk_size
from lowmem.run import device_kind


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss_weights: Tensor | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross entropy of `linear(hidden)`, and how many targets have the largest logit.

    Args:
        hidden: (tokens, width); tokens without a target are left out by the caller.
        weight: (vocabulary, width).
        bias: (vocabulary), or none.
        targets: (tokens), class numbers.
        loss_weights: (tokens), or none for weights of 1.
        softcap: c in logits = c * tanh(logits / c).
        chunk_size: tokens whose logits exist at once; null: as many as make 16 MiB of float32 (64 MiB on a card).

    Returns:
        The loss, a scalar in float32 (float64 for float64 inputs), and the number of hits, an int64 scalar.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk = chunk_size or default_chunk_size(weight.shape[0], device_kind(hidden.device))
    wide = torch.promote_types(dtype, torch.float32)
    loss, hits = (
        torch.zeros((), dtype=wide, device=hidden.device),
        torch.zeros((), dtype=torch.int64, device=hidden.device),
    )
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = F.linear(hidden[part].to(dtype), weight, bias).to(wide)  # (chunk, vocabulary)
            if softcap:
                logits.div_(softcap).tanh_().mul_(softcap)
            weights = None if loss_weights is None else loss_weights[part]
            more_loss, more_hits = logit_scores(logits, targets[part], weights)
            del logits  # before the next chunk's are made
            loss, hits = loss + more_loss, hits + more_hits
    return loss, hits


def logit_scores(logits: Tensor, targets: Tensor, loss_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same, from logits (tokens, vocabulary) in float32 or wider."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    hits = (logits.argmax(-1) == targets).sum()
    return (losses if loss_weights is None else losses * loss_weights).sum(), hits
