"""Linear layer and cross entropy in one, over chunks of tokens, with the gradient computed in the forward pass.

The logits of all tokens never exist: a chunk's logits become its loss and its gradient before the next chunk is made.
The idea is that of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989) and Cut Cross-Entropy (Wijmans et al. 2024,
arXiv:2411.09009); this is a plain PyTorch version of our own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.ops.without_data import starts
from lowmem.run import device_kind

# A card reads the whole head for every chunk, so its chunks are large; a CPU is as fast with small ones.
_LOGITS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**24}  # 16 and 64 MiB in float32
_FEWEST_TOKENS = {"cpu": 64, "cuda": 128}


def default_chunk_size(vocabulary: int, device: str) -> int:
    """Tokens per chunk: few float32 logits, but enough rows to keep a matrix product busy."""
    kind = "cpu" if device == "cpu" else "cuda"
    return max(_FEWEST_TOKENS[kind], _LOGITS_PER_CHUNK[kind] // vocabulary)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss_weights: Tensor | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Weighted sum of the cross entropy of `linear(hidden)` against `targets`.

    Args:
        hidden: (tokens, width); tokens without a target are left out by the caller.
        weight: (vocabulary, width).
        bias: (vocabulary), or none.
        targets: (tokens), class numbers.
        loss_weights: (tokens), or none for weights of 1.
        chunk_size: tokens whose logits exist at once.
        softcap: c in logits = c * tanh(logits / c).

    Returns:
        A scalar in float32 (float64 for float64 inputs).
    """
    device = hidden.device.type
    chunk = chunk_size or default_chunk_size(weight.shape[0], device_kind(hidden.device))
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    arguments = (hidden, weight, bias, targets, loss_weights, chunk, softcap, dtype)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]
    return _forward((False, False, False), *arguments)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient for a loss of 1 is made in forward and kept in float32, then scaled in backward.

    float32, because a float16 loss scale that came afterwards would find the small entries already flushed to zero.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, *ctx.gradients = _forward(ctx.needs_input_grad[:3], *arguments)
        ctx.dtypes = [None if a is None else a.dtype for a in arguments[:3]]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients were given away by the first backward"
        scaled = (None if g is None else g.mul_(grad).to(d) for g, d in zip(gradients, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None, None


def _forward(
    needs: tuple[bool, ...],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss_weights: Tensor | None,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, and the gradients of hidden, weight and bias that are needed, in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    # float16 cannot hold a softmax's small entries, so its gradient products run in float32.
    exact = wide if dtype is torch.float16 else dtype
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    grads = [
        torch.empty_like(hidden, dtype=wide) if needs[0] else None,
        torch.zeros_like(weight, dtype=wide) if needs[1] else None,
        torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None,
    ]
    device = hidden.device.type
    device = device if torch.amp.is_autocast_available(device) else "cpu"  # the meta device has none by itself
    with torch.no_grad(), torch.autocast(device, enabled=False):
        used_weight = weight.to(dtype)
        used_bias = None if bias is None else bias.to(dtype)
        exact_weight = used_weight.to(exact) if needs[0] else used_weight
        for start in starts(hidden.shape[0], chunk, hidden.device):
            part = slice(start, start + chunk)
            inputs = hidden[part].to(dtype)  # (chunk, width)
            logits = F.linear(inputs, used_weight, used_bias).to(wide)  # (chunk, vocabulary)
            weights = None if loss_weights is None else loss_weights[part].to(wide)
            chunk_loss, grad = _loss_and_grad(logits, targets[part], weights, softcap)
            del logits  # its memory now holds the gradient
            loss += chunk_loss
            if grads[2] is not None:
                grads[2] += grad.sum(0)
            grad = grad.to(exact)
            if grads[0] is not None:
                grads[0][part] = grad @ exact_weight
            if grads[1] is not None:
                grads[1] += grad.T @ inputs.to(exact)
            del grad  # before the next chunk's logits are made
    return loss, grads[0], grads[1], grads[2]


def _loss_and_grad(
    logits: Tensor, targets: Tensor, weights: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and its gradient in the memory of the logits."""
    slope = None
    if softcap:
        bent = logits.div_(softcap).tanh_()
        slope = bent.square().neg_().add_(1)  # d cap*tanh(x/cap) / dx
        logits = bent.mul_(softcap)
    columns = targets.unsqueeze(1)
    chosen = logits.gather(1, columns).squeeze(1)  # (chunk)
    top = logits.amax(1, keepdim=True)
    exp = logits.sub_(top).exp_()
    total = exp.sum(1, keepdim=True)
    losses = total.log().add_(top).squeeze(1) - chosen
    grad = exp.div_(total).scatter_add_(1, columns, torch.full_like(top, -1.0))
    if slope is not None:
        grad.mul_(slope)
    if weights is not None:
        losses = losses * weights
        grad.mul_(weights.unsqueeze(1))
    return losses.sum(), grad
