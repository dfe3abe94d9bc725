"""Bytes that CUDA kernels allocate inside themselves, where no tensor shows them. One row per operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MIB = 2**20


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: Sequence[Any]) -> list[int]:
    """FlashAttention 2 (`flash_api.cpp`, Tri Dao, BSD-3): row sums, float32 gradient of the queries, expanded keys."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * _up(length, 128) * heads
    found = [rows * 4, rows * _up(width, 32) * 4]
    if key.shape[1] != heads:
        found += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return found


def _efficient_backward(args: Sequence[Any]) -> list[int]:
    """The memory-efficient kernel (xFormers, BSD-3): row sums in float32."""
    batch, heads, length, _ = args[1].shape
    return [batch * heads * length * 4]


def _gemm_4bit(args: Sequence[Any]) -> list[int]:
    """bitsandbytes 0.50 (`backends/cuda/ops.py`): the dequantised weight, and its blocks' constants in float32."""
    inputs, shape = args[0], args[2]
    values = shape[0] * shape[1]
    return [values // 64 * 4, values * inputs.element_size()]


def _logsumexp(args: Sequence[Any]) -> list[int]:
    """`(x - max).exp()`: a copy of x."""
    return [args[0].numel() * args[0].element_size()]


_CUDA: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "aten::logsumexp": _logsumexp,
}
_CPU: dict[str, Callable[[Sequence[Any]], list[int]]] = {"aten::logsumexp": _logsumexp}
_MATRIX = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def hidden_bytes(func: Any, args: Sequence[Any], device: str) -> list[int]:
    """What an operation holds while it runs, in the order in which it allocates it; empty for most."""
    name = func._schema.name
    rule = (_CUDA if device == "cuda" else _CPU).get(name)
    return [] if rule is None else rule(args)


def is_matrix_product(func: Any) -> bool:
    """Whether an operation runs in cuBLAS, whose workspaces come from the allocator and stay."""
    return func._schema.name in _MATRIX
