"""Autocast for the meta device, where torch's own does nothing: inputs are cast as the real device would.

The lists are those of `aten/src/ATen/autocast_mode.h` (PyTorch 2.13), as far as language models use them; a test holds
the CPU's list against real autocast, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_MATRIX = ("linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "multi_dot")
_LOW = (*_MATRIX, "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "prelu")
_WIDE_CUDA = (
    *("exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow", "sinh", "cosh", "tan", "softplus"),
    *("layer_norm", "group_norm", "nll_loss", "kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "logsumexp"),
    *("softmax", "log_softmax", "cumsum", "cumprod", "sum", "prod", "norm", "cross_entropy", "vector_norm"),
)
_WIDE_CPU = ("nll_loss", "cross_entropy", "prod", "mse_loss", "kl_div", "multilabel_margin_loss")
_PROMOTE = ("cat", "stack", "index_copy", "addcdiv", "addcmul")

Device = Literal["cpu", "cuda"]
# the settings of the autocast contexts that are open, outermost first
_open: list[tuple[bool, torch.dtype]] = []


class MetaAutocast:
    """`torch.autocast` for device type `meta`; the casts are made by an `AutocastMode`, active while it is open."""

    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __init__(self, dtype: torch.dtype | None, enabled: bool, device: Device) -> None:
        self.setting = (enabled, dtype or (torch.bfloat16 if device == "cpu" else torch.float16))
        self.mode = AutocastMode(device)

    def __enter__(self) -> MetaAutocast:
        """Open the context."""
        _open.append(self.setting)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; the outermost one forgets the cast weights."""
        self.mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _open.pop()
        if not _open:
            self.cache.clear()


class AutocastMode(TorchFunctionMode):
    """Casts the inputs of every operation that is called while a `MetaAutocast` is open."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.wide = frozenset(_WIDE_CUDA if device == "cuda" else _WIDE_CPU)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast, then call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        enabled, low = _open[-1] if _open else (False, torch.float32)
        name = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow"}.get(name, name)
        if enabled and name in _LOW:
            args, kwargs = tree_map(lambda v: _lowered(v, low), (args, kwargs))
        elif (enabled and name in self.wide) or (
            enabled
            and name in _PROMOTE
            and any(isinstance(v, Tensor) and v.dtype == torch.float32 for v in tree_leaves((args, kwargs)))
        ):
            args, kwargs = tree_map(_raised, (args, kwargs))
        return func(*args, **kwargs)


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    if not (isinstance(value, Tensor) and value.is_floating_point()) or value.dtype in (dtype, torch.float64):
        return value
    if not (value.requires_grad and value.is_leaf and value.dtype == torch.float32 and value._base is None):
        return value.to(dtype)
    cached = MetaAutocast.cache.get(id(value))
    if cached is None:
        cached = MetaAutocast.cache[id(value)] = (value, value.to(dtype))
    return cached[1]


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as an operation of the low-precision list would take them now."""
    enabled, dtype = _open[-1] if _open else (False, torch.float32)
    return tuple(_lowered(t, dtype) if enabled else t for t in tensors)


def _raised(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


@contextmanager
def meta_autocast(device: Device) -> Iterator[None]:
    """Inside, `torch.autocast("meta", ...)` and the questions about it work, as `device` would answer them."""
    real, enabled, dtype, available = (
        torch.autocast,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.amp.is_autocast_available,
    )

    def autocast(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
        if device_type != "meta":
            return real(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        return MetaAutocast(dtype, enabled, device)

    def is_enabled(device_type: str | None = None) -> bool:
        here = bool(_open) and _open[-1][0]
        if device_type is None:  # the question is about CUDA
            return here if device == "cuda" else enabled()
        return here if device_type == "meta" else enabled(device_type)

    def autocast_dtype(device_type: str) -> torch.dtype:
        return (_open[-1][1] if _open else torch.bfloat16) if device_type == "meta" else dtype(device_type)

    replaced = [
        (torch, "autocast", autocast),
        (torch.amp, "autocast", autocast),
        (torch.amp.autocast_mode, "autocast", autocast),
        (torch, "is_autocast_enabled", is_enabled),
        (torch, "get_autocast_dtype", autocast_dtype),
        (torch.amp, "is_autocast_available", lambda kind: kind == "meta" or available(kind)),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    for where, name, value in replaced:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
