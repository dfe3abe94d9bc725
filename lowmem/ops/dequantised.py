"""4-bit weights that are unpacked once for several products, then let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    with forwards_replaced({m: _unpacking(m) for m in module.modules() if isinstance(m, _linear_4bit())}):
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


def _linear_4bit() -> Any:
    return import_bitsandbytes().nn.Linear4bit


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
