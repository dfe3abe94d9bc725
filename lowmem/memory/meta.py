"""Running a training step on the meta device: what the real device would do where plain `meta` tensors do otherwise.

Inside `on_meta`, the real code runs (transformers, peft, bitsandbytes, the strategies, the loop); only tensors have no
data. Each patch below stands for one place where the meta device would choose another path than the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.memory.host import pinned_batches
from lowmem.memory.meta_adapters import meta_adapters
from lowmem.memory.meta_autocast import lowered, meta_autocast
from lowmem.memory.meta_experts import meta_experts
from lowmem.memory.meta_ranks import meta_ranks
from lowmem.run import meta_stands_for

Device = Literal["cpu", "cuda"]
aten = torch.ops.aten


@contextmanager
def on_meta(device: Device = "cuda", ranks: int = 1, rank: int = 0) -> Iterator[None]:
    """Inside, operations on meta tensors take the path that `device` would take.

    Args:
        device: `cuda`: flash or memory-efficient attention, foreach and fused optimizers, one-byte dropout masks;
            `cpu`: what torch does on a CPU.
        ranks, rank: processes that share the run, and which of them this is.
    """
    functional = torch.nn.functional
    real_attention = functional.scaled_dot_product_attention
    attend = _attention(real_attention, _cuda_kernel if device == "cuda" else _cpu_kernel)
    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attend))
        stack.enter_context(meta_autocast(device))
        stack.enter_context(meta_adapters(device))
        stack.enter_context(meta_experts())
        stack.enter_context(_masks())
        stack.enter_context(_flash_packages())
        stack.enter_context(_positions())
        stack.enter_context(meta_stands_for(device))
        stack.enter_context(meta_ranks(ranks, rank))
        # tables that bitsandbytes makes once, on the device that asks first
        stack.enter_context(patch.dict(import_bitsandbytes().functional.name2qmap, clear=True))
        stack.enter_context(_optimizer_kernels("fused"))
        stack.enter_context(_copies_of_4bit_weights())
        if device == "cpu":
            stack.enter_context(_int8_as_on_a_cpu())
            stack.enter_context(_random_states())
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


@contextmanager
def _flash_packages() -> Iterator[None]:
    """`flash_attention_2` and its like come from packages; torch's own flash kernel allocates what theirs do."""
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def flash(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **more: Any
    ) -> tuple[Tensor, None]:
        dtype = get_target_dtype(query, module) or query.dtype
        if dtype.itemsize != 2:
            raise UserError(
                "model.attn_implementation: flash attention takes 16-bit inputs, and these are wider; add "
                "mixed_precision or pure_bf16, or use sdpa"
            )
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, True, False, scale=more.get("scaling")
        )
        return found[0].transpose(1, 2), None

    def flex(*_: Any, **__: Any) -> None:
        raise UserError(
            "model.attn_implementation: flex_attention is compiled for the card at hand, so its memory cannot be "
            "foreseen; estimate with sdpa"
        )

    kernels = ALL_ATTENTION_FUNCTIONS._global_mapping
    stand_ins: dict[str, Any] = {name: flash for name in kernels if "flash_attention" in name}
    with patch.dict(kernels, {**stand_ins, "flex_attention": flex}):
        yield


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
        if not getattr(position_ids.untyped_storage(), "holds_packed_rows", False):
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
            # on the storage, which micro-batches that are cut from a batch share
            moved["position_ids"].untyped_storage().holds_packed_rows = restarts  # type: ignore[attr-defined]
        return moved

    with patch.object(batches, "_move", move):
        yield


@contextmanager
def _copies_of_4bit_weights() -> Iterator[None]:
    """To copy a weight (peft's DoRA does) bitsandbytes fills an empty CPU tensor, which cannot take a meta tensor."""
    weights: Any = import_bitsandbytes().nn.Params4bit
    real = weights.__deepcopy__

    def copied(self: Any, memo: Any) -> Any:
        if not self.is_meta:
            return real(self, memo)
        new = Tensor._make_subclass(type(self), self.data.clone(), self.requires_grad)
        new.__dict__.update(self.__dict__)
        new.quant_state = deepcopy(self.quant_state)
        return new

    with patch.object(weights, "__deepcopy__", copied):
        yield


@contextmanager
def _int8_as_on_a_cpu() -> Iterator[None]:
    """bitsandbytes multiplies int8 weights on a CPU by raising them to the inputs' dtype."""
    bnb: Any = import_bitsandbytes()
    real = bnb.matmul
    raised = bnb.autograd._functions.MatMul8bitFp

    def matmul(inputs: Tensor, weight: Tensor, out: Any = None, state: Any = None, **more: Any) -> Any:
        if inputs.is_meta and state is not None and state.is_training:
            return raised.apply(inputs, weight, out, more.get("bias"), state)
        return real(inputs, weight, out, state, **more)

    with patch.object(bnb, "matmul", matmul):
        yield


@contextmanager
def _random_states() -> Iterator[None]:
    """Checkpointing keeps the generator's state per layer; on a CPU it lies beside the activations, and counts."""
    state, fork = torch.get_rng_state, torch.random.fork_rng

    def forked(*args: Any, **kwargs: Any) -> Any:  # the meta device has no random numbers, and nothing would be kept
        return fork(*args, **(kwargs | {"device_type": "cpu"} if kwargs.get("device_type") == "meta" else kwargs))

    with (
        patch.object(torch, "get_rng_state", lambda: state().clone()),  # an operation shows it to who looks at those
        patch.object(torch.random, "fork_rng", forked),
    ):
        yield
