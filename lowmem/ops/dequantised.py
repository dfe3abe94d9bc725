"""Other ways of multiplying by 4-bit weights: unpacked once for several products, or kept by none for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem.libraries import import_bitsandbytes


@contextmanager
def unpacked_once(module: nn.Module) -> Iterator[None]:
    """Inside, every 4-bit linear layer of the module unpacks its weight at its first call and uses it again.

    The product is `linear(x, weight)` in the layer's compute dtype, as bitsandbytes' own backward takes it.
    """
    with forwards_replaced({layer: _unpacking(layer) for layer in _linears_4bit(module)}):
        yield


@contextmanager
def looked_up(module: nn.Module) -> Iterator[None]:
    """Inside, no 4-bit linear layer keeps a reference to its weight for backward, which takes the one that is there."""
    with forwards_replaced({layer: partial(_product, layer) for layer in _linears_4bit(module)}):
        yield


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, modules have other forwards; afterwards those they had, be it from another strategy."""
    own = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, before in own.items():
            if before is None:
                del module.forward
            else:
                module.forward = before  # type: ignore[method-assign]


def _linears_4bit(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, import_bitsandbytes().nn.Linear4bit)]


def _unpacking(layer: Any) -> Callable[[Tensor], Tensor]:
    weight: Tensor | None = None

    def forward(inputs: Tensor) -> Tensor:
        nonlocal weight
        dtype = layer.compute_dtype or inputs.dtype
        if weight is None:
            with torch.no_grad():
                packed = import_bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                weight = packed.to(dtype)
                del packed
        bias = None if layer.bias is None else layer.bias.to(dtype)
        # under autocast, too: bitsandbytes' product is not on its lists
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(inputs.to(dtype), weight, bias).to(inputs.dtype)

    return forward


def _product(layer: Any, inputs: Tensor) -> Tensor:
    """As `Linear4bit.forward` (bitsandbytes 0.50)."""
    dtype = layer.compute_dtype or inputs.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    found: Tensor = _Product.apply(inputs.to(dtype), bias, layer)  # type: ignore[no-untyped-call]
    return found.to(inputs.dtype)


class _Product(torch.autograd.Function):
    """bitsandbytes' `MatMul4Bit`, whose weight is looked up in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer = layer
        weight = layer.weight
        found: Tensor = import_bitsandbytes().matmul_4bit(inputs, weight, bias=bias, quant_state=weight.quant_state)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight = ctx.layer.weight
        of_inputs = of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            unpacked = import_bitsandbytes().functional.dequantize_4bit(weight.data.view(-1, 1), weight.quant_state)
            of_inputs = torch.matmul(grad, unpacked.to(grad.dtype))
        return of_inputs, of_bias, None
