"""What a trace knows of an operation, and when two calls of it are alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem.memory.kernels import hidden_rule, is_matrix_product


class Operation:
    """What a trace knows of an operation.

    Args:
        func: as a dispatch mode gets it.
        device: whose kernels count; null: none, and it is really run every time.

    Attributes:
        name: `aten.mm.default`.
        is_fresh: it returns one new tensor, and changes nothing.
        results: likeness of arguments -> shape, strides and dtype of the result.
        hidden: arguments -> what it holds while it runs; null: nothing.
        in_cublas: it runs in cuBLAS.
        copies: it copies its second argument into its first.
        is_promise: it returns torch's wrapper of a tensor that is on its way from other ranks, without memory.
    """

    __slots__ = ("copies", "hidden", "in_cublas", "is_fresh", "is_promise", "name", "results")

    def __init__(self, func: Any, device: str | None) -> None:
        returns = func._schema.returns
        self.name = str(func)
        self.is_fresh = (
            device is not None
            and len(returns) == 1
            and str(returns[0].type) == "Tensor"
            and returns[0].alias_info is None
            and not func._schema.is_mutable
        )
        self.results: dict[Any, tuple[Any, Any, torch.dtype]] = {}
        self.hidden = None if device is None else hidden_rule(func, device)
        self.copies = self.name == "aten.copy_.default"
        self.is_promise = self.name.startswith("_c10d_functional._wrap_tensor")
        self.in_cublas = device == "cuda" and is_matrix_product(func)


def likeness(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Equal for two calls on the meta device whose results are alike; None where a call is to be made anyway."""
    key: list[Any] = [torch.get_default_dtype()]  # of what is made without saying its dtype
    for value in (*args, *kwargs.items()) if kwargs else args:
        if type(value) is list:
            value = tuple(value)
        if isinstance(value, Tensor):
            if not value.is_meta:
                return None
            key += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, tuple):
            for part in value:
                if isinstance(part, Tensor):
                    if not part.is_meta:
                        return None
                    key += (part.shape, part.stride(), part.dtype)
                else:
                    key += (type(part), part)
        else:
            key += (type(value), value)
    return tuple(key)
