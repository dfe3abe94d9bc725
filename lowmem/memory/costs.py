"""What one operation asks of a card: products, bytes, kernels. One row per operation that is not plain elementwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.memory.cards import Card, Dtype
from lowmem.memory.messages import COLLECTIVES, sent_bytes

Kind = Literal["matmul", "attention", "elementwise", "transfer", "hidden transfer", "message"]


class Cost(NamedTuple):
    """What an operation asks for.

    Attributes:
        op: its name.
        kind: matrix product, fused attention, anything else on the card (`elementwise`), a copy between host and card,
            which other work may hide, or a message to other cards.
        dtype: of the products.
        flops: floating-point operations: of products, two per multiplication and addition; else one per result.
        bytes: read and written in the card's memory, every input and output once.
        launches: kernels.
        host_bytes: that cross the bus.
        sent_bytes: to other cards.
    """

    op: str
    kind: Kind
    dtype: Dtype
    flops: float
    bytes: float
    launches: float = 1
    host_bytes: float = 0
    sent_bytes: float = 0

    def seconds(self, card: Card) -> float:
        """By the roofline: the slower of products and bytes, and the launches."""
        given = card.assumptions
        if self.kind in ("transfer", "hidden transfer"):
            return self.host_bytes / (card.pcie_bandwidth * given.pcie) + self.launches * given.launch_seconds
        if self.kind == "message":  # over the bus, as cards without a link of their own do it
            return self.sent_bytes / (card.pcie_bandwidth * given.pcie) + self.launches * given.launch_seconds
        memory = self.bytes / (card.memory_bandwidth * given.bandwidth)
        if self.kind == "elementwise":
            return memory + self.launches * given.launch_seconds
        rate = card.matmul_rate(self.dtype) if self.kind == "matmul" else card.attention_rate(self.dtype)
        return max(self.flops / rate, memory) + self.launches * given.launch_seconds


# Neither data nor a kernel, beyond what the schema calls a view.
_FREE = (
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "detach_", "empty", "empty_like"),
    *("empty_strided", "new_empty", "new_empty_strided", "is_same_size", "record_stream", "is_pinned"),
    *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "dim", "numel", "is_contiguous"),
)
# The first argument is written and not read.
_OVERWRITE = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "_foreach_copy_",
)
# Declared as changed, but only read (or a few bytes).
_UNCHANGED = ("grads", "g", "qmap1", "qmap2", "state_steps", "unorm_vec")
# Of the table only the rows asked for are read, as many bytes as come out.
_GATHER = ("embedding", "index", "gather", "index_select", "take", "take_along_dim", "nll_loss_forward")
# Of the first argument only the places named are read and written.
_SCATTER = ("scatter_", "scatter_add_", "index_put_", "index_add_", "index_fill_")
# foreach kernels (`aten/src/ATen/native/cuda/MultiTensorApply.cuh`): 65,536 values a block, 320 blocks a launch
_FOREACH_VALUES = 65_536 * 320


@cache
def is_free(func: Any) -> bool:
    """Whether an operation moves no data: a view, an allocation, a question."""
    namespace, _, name = func._schema.name.partition("::")
    return bool(getattr(func, "is_view", False)) or (namespace in ("aten", "prim") and name in _FREE)


def costs_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, device: str) -> tuple[Cost, ...]:
    """What an operation costs on the device that stands for the card; nothing, where it runs on the host.

    Args:
        func: the operation (an overload).
        result: what it returned.
        device: type of the device that stands for the card: `meta`, `cuda` or (all on the CPU) `cpu`.
    """
    name = func._schema.name.partition("::")[2]
    everything = [*_tensors(args), *_tensors(kwargs.values()), *_tensors((result,))]
    here = [t for t in everything if t.device.type == device]
    if not here:
        return ()
    if name in ("_to_copy", "copy_", "_copy_from") and len(here) < len(everything):
        moved = max((_bytes(t) for t in _tensors((result,))), default=0)
        return (Cost(name, "transfer", "float32", 0, 0, 1, moved),)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, func, args, kwargs, result)
    formula = flop_registry.get(func._overloadpacket)
    traffic = _traffic(name, func, args, kwargs, result)
    if formula is not None:
        flops = formula(*args, **kwargs, out_val=result)
        kind: Kind = "attention" if "attention" in name else "matmul"
        return (Cost(name, kind, _dtype(args), flops / 2 if _causal(func, args, kwargs) else flops, traffic),)
    values = sum(t.numel() for t in _tensors((result,))) or sum(t.numel() for t in _tensors(args[:1]))
    lists = any(isinstance(a, list | tuple) and a and isinstance(a[0], Tensor) for a in args)
    launches = 1 + values / _FOREACH_VALUES if lists and name.startswith(("_foreach", "_fused")) else 1
    return (Cost(name, "elementwise", "float32", values, traffic, launches),)


# -- bytes ------------------------------------------------------------------------------------------------------------


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """Bytes that are really there: an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else min(size, 1) for size, stride in sizes) * tensor.element_size()


def _sum(values: Any) -> int:
    return sum(map(_bytes, _tensors(values)))


def _traffic(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes read and written: every input and every new output once, what is changed in place twice."""
    if name in _GATHER:
        return _sum(args[1:]) + 2 * _sum((result,))
    if name in _SCATTER:
        return _sum(args[1:]) + 2 * max((_bytes(t) for t in _tensors(args[1:])), default=0)
    if name.endswith("_like"):
        return _sum((result,))
    total = 0
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        size = _sum((value,))
        written = argument.alias_info is not None and argument.alias_info.is_write
        total += 0 if argument.is_out or (place == 0 and name in _OVERWRITE) else size
        total += size if written and argument.name not in _UNCHANGED else 0
    fresh = [
        out for out, declared in zip(_outputs(func, result), func._schema.returns, strict=False) if not _old(declared)
    ]
    return total + _sum(fresh)


def _outputs(func: Any, result: Any) -> Sequence[Any]:
    return result if len(func._schema.returns) > 1 else (result,)


def _old(declared: Any) -> bool:
    """Whether a result is an argument that was changed in place."""
    return declared.alias_info is not None


# -- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[str, Any, Sequence[Any], Mapping[str, Any], Any], tuple[Cost, ...]]
_DTYPES: Mapping[torch.dtype, Dtype] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
}


def _dtype(values: Any) -> Dtype:
    """Of the first tensor; float64 counts as float32."""
    return next((_DTYPES.get(t.dtype, "float32") for t in _tensors(values)), "float32")


def _attention(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Cost, ...]:
    """Two products forward, five backward (the scores again); half of each where the mask is causal."""
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, length, width = query.shape
    scores = batch * heads * length * key.shape[2]
    flops = 2 * scores * ((3 * width + 2 * value.shape[3]) if backward else (width + value.shape[3]))
    traffic = _traffic(name, func, args, kwargs, result)
    return (Cost(name, "attention", _dtype((query,)), flops / 2 if _causal(func, args, kwargs) else flops, traffic),)


def _causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is attention under a causal mask, of which it computes one half."""
    places = [place for place, argument in enumerate(func._schema.arguments) if argument.name == "is_causal"]
    if not places:
        return False
    return bool(args[places[0]] if places[0] < len(args) else kwargs.get("is_causal", False))


def _gemm_4bit(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Cost, ...]:
    """bitsandbytes 0.50 with more than about 1,500 rows: the weight is dequantised, then multiplied."""
    inputs, packed, shape, absmax = args[:4]
    weight = shape[0] * shape[1] * inputs.element_size()
    flops = 2 * (inputs.numel() // inputs.shape[-1]) * shape[0] * shape[1]
    return (
        Cost("dequantize_4bit", "elementwise", "float32", shape[0] * shape[1], _sum((packed, absmax)) + weight),
        Cost(name, "matmul", _dtype((inputs,)), flops, _sum((inputs, result)) + weight),
    )


def _int8(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Cost, ...]:
    """Integer products of (rows, k) and (n, k)."""
    left, right = [t for t in _tensors(args) if t.dtype == torch.int8][:2]
    flops = 2 * left.numel() * right.shape[0]
    return (Cost(name, "matmul", "int8", flops, _sum((left, right, result))),)


def _grouped(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Cost, ...]:
    """Every row meets one of the experts."""
    rows, weights = args[:2]
    if rows.dim() == 2 and weights.dim() == 3:
        flops = 2 * rows.numel() * weights.shape[2]
    else:  # the weights' gradient: (k, rows) and (rows, n), or batches
        flops = 2 * rows.numel() * weights.shape[-1]
    return (Cost(name, "matmul", _dtype((rows,)), flops, _sum((rows, weights, result))),)


def _message(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[Cost, ...]:
    """Something for the other ranks."""
    return (Cost(name, "message", "float32", 0, 0, 1, 0, sent_bytes(name, args, kwargs)),)


_RULES: Mapping[str, Rule] = {
    **{
        f"_scaled_dot_product_{kernel}{end}": _attention
        for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
        for end in ("", "_backward")
    },
    "gemm_4bit": _gemm_4bit,
    **dict.fromkeys(("int8_linear_matmul", "int8_scaled_mm", "int8_mixed_scaled_mm"), _int8),
    "_grouped_mm": _grouped,
    **dict.fromkeys(COLLECTIVES, _message),
}
