"""Adapters on the meta device: what peft would read off values that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# method -> why its shapes or its work cannot be told without the weights
UNPREDICTABLE = {
    "ADAMSS": "the shapes of its weights come from a clustering of the base's values",
    "FROD": "it decomposes the base's values on the host, and computes with sparse tensors",
    "SHIRA": "it computes with sparse tensors, which the meta device does not have",
}


@contextmanager
def meta_adapters(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """Inside, peft's layers on the meta device take the path that they take with data.

    Args:
        device: whose layout of a singular value decomposition is asked for.
    """
    if "peft" not in sys.modules:  # a strategy that needs it has imported it by now
        yield
        return
    from peft import PeftModel
    from peft.tuners.vblora.layer import Linear as VBLoRALinear
    from peft.tuners.waveft.layer import WaveFTLayer

    with ExitStack() as stack:
        for holder, name, make in (
            (VBLoRALinear, "_get_lora_matrices", _without_looking),
            (WaveFTLayer, "get_delta_weight", _all_valid),
            (PeftModel, "get_prompt_embedding_to_save", _kept_in_place),
        ):
            stack.enter_context(patch.object(holder, name, make(getattr(holder, name))))
        if device == "cpu":
            stack.enter_context(patch.object(torch.linalg, "svd", _column_major(torch.linalg.svd)))
        yield


def _kept_in_place(real: Any) -> Any:
    """peft copies the prompt that it saves to the host; without data the copy stays where it was made."""

    def prompt(model: Any, adapter_name: str) -> Any:
        if not any(p.is_meta for p in model.parameters()):
            return real(model, adapter_name)
        with patch.object(Tensor, "cpu", lambda tensor: tensor):
            return real(model, adapter_name)

    return prompt


def _without_looking(real: Any) -> Any:
    """VB-LoRA looks for infinite logits while it trains."""

    def matrices(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not layer.vblora_logits_A[layer.active_adapters[0]].is_meta:
            return real(layer, *args, **kwargs)
        training, layer.training = layer.training, False  # read by nothing else in there
        try:
            return real(layer, *args, **kwargs)
        finally:
            layer.training = training

    return matrices


class _AllTrue(TorchFunctionMode):
    """A mask without data picks everything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(_everything(i) for i in index))
        return func(*args, **(kwargs or {}))


def _everything(index: Any) -> Any:
    if isinstance(index, Tensor) and index.is_meta and index.dtype is torch.bool:
        return torch.arange(len(index), device="meta")
    return index


def _all_valid(real: Any) -> Any:
    """WaveFT drops frequencies beyond the edge of its grid; its padding puts none there."""

    def delta(layer: Any, adapter: str) -> Any:
        if not layer.waveft_spectrum[adapter].is_meta:
            return real(layer, adapter)
        with _AllTrue():
            return real(layer, adapter)

    return delta


def _column_major(real: Any) -> Any:
    """LAPACK returns Vh by columns, so that a slice of its rows is copied; CUDA's library, and meta, by rows."""

    def svd(matrix: Tensor, full_matrices: bool = True, **kwargs: Any) -> Any:
        u, s, vh = real(matrix, full_matrices, **kwargs)
        if matrix.is_meta:
            vh = vh.mT.contiguous().mT
        return torch.return_types.linalg_svd((u, s, vh))  # type: ignore[attr-defined]

    return svd
