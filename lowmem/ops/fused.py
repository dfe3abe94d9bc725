"""Fused kernels for RMSNorm, SwiGLU and RoPE: where they come from, and what they allocate.

The kernels are Liger's (Hsu et al. 2024, arXiv:2410.10989, BSD-2). Three of their habits matter to a caller:

- RMSNorm saves its input and one number per token. Its backward could write the gradient over the one it was given;
  here it never does, as that one may belong to a residual branch as well.
- SwiGLU saves both factors, and its backward writes their gradients over them: one backward for each forward.
- RoPE writes over its inputs, forward and backward, where these lie as (rows, tokens, heads, width) in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lowmem.errors import UserError

HUB = "kernels-community/liger-kernels"


@dataclass(frozen=True)
class Kernels:
    """Three functions that autograd knows.

    Attributes:
        rms_norm: hidden (..., width), weight (width,), eps, offset added to the weight, casting (`llama`: only the root
            in float32; `gemma`: all of it) -> the same shape and dtype as hidden.
        silu_mul: gate and up (..., width) -> silu(gate) * up.
        rope: query and key (rows, heads, tokens, width), cos and sin (1 or rows, tokens, width) -> both, rotated.
    """

    rms_norm: Callable[[Tensor, Tensor, float, float, str], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def from_liger() -> Kernels:
    """Those of the package liger-kernel.

    Raises:
        UserError: it, or Triton, is not installed.
    """
    try:
        return _named("liger_kernel.ops")
    except ImportError as error:
        raise UserError(
            f"fused_kernels: the package liger-kernel cannot be imported ({error}); pip install 'lowmem[liger]'"
        ) from error


def from_hub(revision: str) -> Kernels:
    """The same kernels from the hub, at one commit, through the package kernels.

    Raises:
        UserError: the package is not installed, or does not get them.
    """
    try:
        from kernels import get_kernel  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(
            f"fused_kernels.source: the package kernels cannot be imported ({error}); pip install 'lowmem[kernels]'"
        ) from error
    try:
        return _named(get_kernel(HUB, revision=revision).__name__)
    except Exception as error:  # the package raises errors of many kinds: network, no build for this machine, ...
        raise UserError(
            f"fused_kernels.source: {HUB} at {revision}: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _named(package: str) -> Kernels:
    norm = import_module(f"{package}.rms_norm").LigerRMSNormFunction
    silu_mul = import_module(f"{package}.swiglu").LigerSiLUMulFunction
    rope = import_module(f"{package}.rope").LigerRopeFunction
    return _applied(norm, silu_mul, rope)


def _applied(norm: Any, silu_mul: Any, rope: Any) -> Kernels:
    def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
        found: Tensor = norm.apply(hidden, weight, eps, offset, casting, False)  # False: not over the gradient given
        return found

    return Kernels(rms_norm, silu_mul.apply, rope.apply)


# -- without data -----------------------------------------------------------------------------------------------------


def without_data(multiprocessors: int) -> Kernels:
    """What the kernels allocate and keep, and nothing else (liger-kernel 0.8).

    Args:
        multiprocessors: of the device: RMSNorm's backward sums a weight's gradient on each of them.
    """

    def rms_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
        found: Tensor = _RMSNorm.apply(hidden, weight, multiprocessors)  # type: ignore[no-untyped-call]
        return found

    return Kernels(rms_norm, _SiLUMul.apply, _RoPE.apply)  # type: ignore[arg-type]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, multiprocessors: int) -> Tensor:
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        output = torch.empty_like(rows)
        roots = rows.new_empty(len(rows), dtype=torch.float32)
        ctx.save_for_backward(rows, weight, roots)
        ctx.multiprocessors = multiprocessors
        return output.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        grad, weights, sums = grad.contiguous(), None, None
        if ctx.needs_input_grad[1]:
            sums = weight.new_empty(ctx.multiprocessors, len(weight), dtype=torch.float32)
        inputs = torch.zeros_like(grad)
        if sums is not None:
            weights = sums.sum(0).to(weight.dtype)
        return inputs, weights, None


class _SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad.contiguous()
        return gate.view(grad.shape), up.view(grad.shape)


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return query.transpose(1, 2), key.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        return query.transpose(1, 2), key.transpose(1, 2), None, None
