"""The proof that an attention kernel computes on packed rows what plain attention computes, before a run relies on it.

On small random queries, keys and values, forward and backward. Nothing of the run changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.model import takes_one_row, text_config

PLAIN = ("eager", "sdpa")  # torch's own operations
_LENGTHS = (70, 130, 60)  # of the samples in a row: longer than a block of 128, at whose borders kernels may fail
# Ways of rounding differ by less (float32: with TF32); one token of a neighbour that is seen makes some 0.2.
_TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def prove_packed_attention(model: nn.Module, device: torch.device) -> None:
    """Compare the model's attention kernel with plain attention under a block-diagonal causal mask.

    torch's own operations are not compared. Without gradients (`torch.no_grad`) only the outputs are.

    Args:
        model: whose `attn_implementation`, numbers of heads and dtype are used.
        device: where it will run.

    Raises:
        UserError: the kernel fails, or its numbers differ by more than rounding.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = text_config(model)
    name = getattr(config, "_attn_implementation", None) or PLAIN[0]
    if name in PLAIN or device.type == "meta":  # there is nothing to compare without data
        return
    inputs = _inputs(config, 1 if takes_one_row(model) else 2, _dtype(model), device)
    grad = torch.randn(inputs[0].transpose(1, 2).shape, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    expected = _outcome(_plain, [tensor.double() for tensor in inputs], grad.double())
    try:
        kernel = ALL_ATTENTION_FUNCTIONS[name]
        found = _outcome(lambda *given: _packed(kernel, model, *given), inputs, grad)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # packages and compilers fail in many ways
        text = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"packing: the attention kernel {name} fails on a packed row ({type(error).__name__}: {text}); use "
            "model.attn_implementation: sdpa, or drop packing"
        ) from error
    off = _difference(expected, found) / _TOLERANCE[inputs[0].dtype]
    if not off <= 1:
        raise UserError(
            f"packing: the attention kernel {name} gives other numbers on a packed row than plain attention "
            f"({off:.3g} times what rounding explains); use model.attn_implementation: sdpa, or drop packing"
        )


def _dtype(model: nn.Module) -> torch.dtype:
    """Of the weights; flash kernels take 16 bits alone, which then come from autocast."""
    widths = {p.dtype for p in model.parameters() if p.dtype in _TOLERANCE}
    found = min(widths, key=lambda dtype: dtype.itemsize, default=torch.float32)
    return torch.bfloat16 if takes_one_row(model) and found.itemsize > 2 else found


def _inputs(config: Any, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Queries, keys and values (rows, heads, tokens, width), with the model's numbers of heads."""
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    draw = torch.Generator().manual_seed(0)
    shapes = [(rows, number, sum(_LENGTHS), width) for number in (heads, of_keys, of_keys)]
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def _packed(kernel: Any, model: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As a layer calls it: the kernel is given positions that restart, and the mask that transformers makes of them."""
    from transformers.masking_utils import create_causal_mask

    layer: Any = nn.Module()
    layer.config, layer.is_causal, layer.layer_idx = text_config(model), True, 0
    layer.num_key_value_groups = query.shape[1] // key.shape[1]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS]).expand(len(query), -1).to(query.device)
    embedded = query.new_empty(*positions.shape, 1)  # its shape, dtype and device count
    mask = create_causal_mask(layer.config, embedded, None, None, positions)
    found: Tensor = kernel(
        layer, query, key, value, mask, dropout=0.0, scaling=query.shape[-1] ** -0.5, position_ids=positions
    )[0]
    return found


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, written out."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    samples = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS)).to(query.device)
    seen = (samples[:, None] == samples[None, :]).tril()
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.matmul(weights, value).transpose(1, 2)


def _outcome(function: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """What it returns (rows, tokens, heads, width), and its gradients."""
    leaves = [tensor.detach().clone().requires_grad_(torch.is_grad_enabled()) for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *(torch.autograd.grad(output, leaves, grad) if torch.is_grad_enabled() else ())]


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest relative difference, in the Euclidean norm."""
    return float(torch.stack([(b - a).norm() / a.norm() for a, b in zip(expected, found, strict=True)]).max())
