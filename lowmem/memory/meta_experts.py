"""Experts of a mixture on the meta device.

transformers computes fused experts by a grouped matrix product (`experts_implementation: grouped_mm`, its default) over
the pairs of token and expert, sorted by expert. Its tensors have one size however the tokens are routed, so no
assumption about the routing is needed. torch's own form for meta knows bfloat16 alone; CPU and CUDA know more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lowmem.errors import UserError


class _GroupedProduct(torch.autograd.Function):
    """Shapes and lifetimes of `grouped_mm` of (pairs, in) and (experts, in, out): (pairs, out).

    Each factor is kept for the gradient of the other, where that one is wanted.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(left if wanted[1] else None, right if wanted[0] else None)
        ctx.like = (left.shape, left.dtype), (right.shape, right.stride(), right.dtype)
        return left.new_empty(left.shape[0], right.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        wanted, ((shape, dtype), right) = ctx.needs_input_grad, ctx.like
        return (
            torch.empty(shape, dtype=dtype, device="meta") if wanted[0] else None,
            torch.empty_strided(right[0], right[1], dtype=right[2], device="meta") if wanted[1] else None,
        )


@contextmanager
def meta_experts() -> Iterator[None]:
    """Inside, `torch.nn.functional.grouped_mm` takes meta tensors of every dtype.

    Raises:
        UserError: (inside) experts are called one after the other, each with the tokens that chose it.
    """
    functional: Any = torch.nn.functional
    real: Any = functional.grouped_mm  # from torch 2.10 on
    find = Tensor.nonzero

    def nonzero(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_meta:
            raise UserError(
                "predict: this model picks values out of a tensor by what they are (experts_implementation: eager does "
                "so); there are none here. Leave experts_implementation at its default, grouped_mm"
            )
        return find(tensor, *args, **kwargs)

    def grouped_mm(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Any:
        if left.is_meta and left.dtype is not torch.bfloat16 and left.dim() == 2 and right.dim() == 3:
            return _GroupedProduct.apply(left, right)  # type: ignore[no-untyped-call]
        return real(left, right, *args, **kwargs)

    with patch.object(Tensor, "nonzero", nonzero), patch.object(functional, "grouped_mm", grouped_mm):
        yield
