"""Bytes that kernels allocate inside themselves, where no tensor shows them. One row per operation and kind of device.

The CPU's rows are held against the allocator by a test, and benchmarks/predictor_on_cpu.py finds what they leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


def _safe_softmax(args: Sequence[Any]) -> list[int]:
    """Softmax of masked attention: which entries are minus infinity, and in which rows all of them."""
    values = args[0].numel()
    return [values, values // args[0].shape[-1]]


def _int8_product(args: Sequence[Any]) -> list[int]:
    """bitsandbytes 0.50: the product in int32, and in float16 where another dtype is asked for."""
    values = args[0].numel() // args[0].shape[-1] * args[1].shape[0]
    dtype = args[5] if len(args) > 5 else None
    return [values * 4] + ([] if dtype in (None, torch.float16) else [values * 2])


# -- on a CPU only ----------------------------------------------------------------------------------------------------


def _promoted(args: Sequence[Any]) -> list[int]:
    """Operands of two dtypes: a CPU copies the narrower one first (TensorIterator); a card casts on the fly."""
    first, second = args[0], args[1]
    if not isinstance(second, Tensor) or first.dtype == second.dtype:
        return []
    common = torch.result_type(first, second)
    return [t.numel() * common.itemsize for t in (first, second) if t.dim() and t.dtype != common]


def _promoted_in_place(args: Sequence[Any]) -> list[int]:
    """Beside the copies, a result in the wider dtype, before it is written back."""
    found = _promoted(args)
    changes = found and args[0].dim() and args[0].dtype != torch.result_type(args[0], args[1])
    return [found[0], *found] if changes else found


def _flash_cpu(args: Sequence[Any]) -> list[int]:
    """`FlashAttentionKernel.cpp`: every thread has scores, their maxima and sums, and an output of one tile."""
    query, width = args[0], args[0].shape[-1]
    rows, columns = _tile(query.shape[2], args[1].shape[2])
    values = torch.get_num_threads() * rows
    return [values * (columns + 2 + width) * 4, values * columns * 2 if query.element_size() == 2 else 0]


def _flash_cpu_backward(args: Sequence[Any]) -> list[int]:
    """Scores of one tile per thread and their gradients, and one tile's row sums."""
    query, key = args[1], args[2]
    rows, columns = _tile(query.shape[2], key.shape[2])
    values = torch.get_num_threads() * rows * columns * 2
    return [values * 4, values * 2 if query.element_size() == 2 else 0, rows * 4]


def _tile(queries: int, keys: int) -> tuple[int, int]:
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _gemm_4bit_cpu(args: Sequence[Any]) -> list[int]:
    """bitsandbytes 0.50 (`backends/default/ops.py`): the dequantised weight and its blocks' constants."""
    inputs, shape = args[0], args[2]
    nested = len(args) > 7 and args[7] is not None
    return [args[7].numel() * 4 if nested else 0, shape[0] * shape[1] * inputs.element_size()]


def _update_8bit_cpu(args: Sequence[Any]) -> list[int]:
    """bitsandbytes 0.50 (`backends/cpu/ops.py`): moments, gradient, denominator in float32, and a 16-bit weight."""
    values = args[2].numel() * 4
    return [values] * (5 if args[2].dtype == torch.float32 else 6)


def _update_32bit_cpu(args: Sequence[Any]) -> list[int]:
    values = args[2].numel() * 4
    return [values] * (3 if args[2].dtype == torch.float32 else 4)


_CUDA: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::logsumexp": _logsumexp,
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_scaled_mm": _int8_product,
}
_CPU: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    **{f"aten::{name}": _promoted for name in ("add", "sub", "mul", "div")},
    **{f"aten::{name}_": _promoted_in_place for name in ("add", "sub", "mul", "div")},
    "aten::_scaled_dot_product_flash_attention_for_cpu": _flash_cpu,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_cpu_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::logsumexp": _logsumexp,
    "bitsandbytes::gemm_4bit": _gemm_4bit_cpu,
    "bitsandbytes::optimizer_update_8bit_blockwise": _update_8bit_cpu,
    "bitsandbytes::optimizer_update_32bit": _update_32bit_cpu,
}
_MATRIX = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def hidden_rule(func: Any, device: str) -> Callable[[Sequence[Any]], list[int]] | None:
    """What tells, from its arguments, what an operation holds while it runs, in the order in which it allocates it."""
    return (_CUDA if device == "cuda" else _CPU).get(func._schema.name)


def is_matrix_product(func: Any) -> bool:
    """Whether an operation runs in cuBLAS, whose workspaces come from the allocator and stay."""
    return func._schema.name in _MATRIX
