"""Running a training step on the meta device: what the real device would do where plain `meta` tensors do otherwise.

Inside `on_meta`, the real code runs (transformers, peft, bitsandbytes, the strategies, the loop); only tensors have no
data. Each patch below stands for one place where the meta device would choose another path than the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor

from lowmem.libraries import import_bitsandbytes
from lowmem.memory.host import pinned_batches
from lowmem.memory.meta_autocast import lowered, meta_autocast
from lowmem.run import meta_stands_for

Device = Literal["cpu", "cuda"]
aten = torch.ops.aten


@contextmanager
def on_meta(device: Device = "cuda") -> Iterator[None]:
    """Inside, operations on meta tensors take the path that `device` would take.

    Args:
        device: `cuda`: flash or memory-efficient attention, foreach and fused optimizers, one-byte dropout masks;
            `cpu`: what torch does on a CPU.
    """
    functional = torch.nn.functional
    real_attention = functional.scaled_dot_product_attention
    attend = _attention(real_attention, _cuda_kernel if device == "cuda" else _cpu_kernel)
    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attend))
        stack.enter_context(meta_autocast(device))
        stack.enter_context(_masks())
        stack.enter_context(_positions())
        stack.enter_context(meta_stands_for(device))
        # tables that bitsandbytes makes once, on the device that asks first
        stack.enter_context(patch.dict(import_bitsandbytes().functional.name2qmap, clear=True))
        stack.enter_context(_optimizer_kernels("fused"))
        if device == "cuda":
            stack.enter_context(_optimizer_kernels("foreach"))
            stack.enter_context(patch.object(functional, "dropout", _dropout))
            stack.enter_context(pinned_batches())
        yield


def _attention(real: Callable[..., Tensor], kernel: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """The signature of torch's function; on the meta device a kernel answers, or (with None) what torch does there."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.is_meta:
            query, key, value = lowered(query, key, value)
            found = kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)
            if found is not None:
                return found
        return real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attention


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor | None:
    """What CUDA's dispatcher chooses: flash (half precision, no mask), else memory-efficient, else math (None)."""
    half, width = query.element_size() == 2, query.shape[-1]
    found: Tensor | None = None
    if mask is None and half and width <= 256 and width % 8 == 0:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    elif query.shape[1] == key.shape[1] and width % (8 if half else 4) == 0:
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(mask, query), grad, dropout, causal, scale=scale
        )[0]
    return found


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: in the dtype of the query, rows padded to 16 entries."""
    if mask is None:
        return None
    mask = _additive(mask, query)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], -1, -1)


def _cpu_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor | None:
    """Flash attention; with dropout, math (None)."""
    if dropout > 0:
        return None
    mask = None if mask is None else _additive(mask, query)
    found: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, attn_mask=mask, scale=scale
    )[0]
    return found


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """A mask of truths as one that is added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """On CUDA dropout keeps a mask of one byte per value."""
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


@contextmanager
def _optimizer_kernels(kind: Literal["fused", "foreach"]) -> Iterator[None]:
    """Optimizers and norms take this path for the meta device, too."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    name = f"_get_{kind}_kernels_supported_devices"
    known = getattr(_foreach_utils, name)()
    with ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            stack.enter_context(patch.object(module, name, lambda: [*known, "meta"]))
        yield


@contextmanager
def _masks() -> Iterator[None]:
    """transformers looks into position ids to see whether rows are packed; the answer travels with them here."""
    from transformers import masking_utils

    real = masking_utils.find_packed_sequence_indices

    def packed(position_ids: Tensor) -> Tensor | None:
        if position_ids.device.type != "meta":
            found: Tensor | None = real(position_ids)
            return found
        if not getattr(position_ids, "holds_packed_rows", False):
            return None
        return torch.empty(position_ids.shape, dtype=torch.int64, device="meta")

    with patch.object(masking_utils, "find_packed_sequence_indices", packed):
        yield


@contextmanager
def _positions() -> Iterator[None]:
    """Position ids on their way to the meta device keep the knowledge whether they restart inside a row."""
    from lowmem import batches

    real = batches._move

    def move(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        moved = real(batch, device)
        if device.type == "meta" and "position_ids" in batch:
            restarts = bool((batch["position_ids"].diff(dim=-1) != 1).any())
            moved["position_ids"].holds_packed_rows = restarts  # type: ignore[attr-defined]
        return moved

    with patch.object(batches, "_move", move):
        yield
