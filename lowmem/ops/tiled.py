"""A function of single tokens over slices of the sequence, forward and backward, so that its insides stay small.

What the function saves for backward never exists for more than one slice: backward runs it again, slice by slice. The
idea is that of TiledMLP in Arctic's long-sequence training (Bekman et al. 2025, arXiv:2506.13996), here with the
parameters as inputs of the autograd function: their gradients are summed over the slices and given back once, so hooks
that wait for a gradient run once for each parameter and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

Tokenwise = Callable[[Tensor], Tensor]


def tiled(
    function: Tokenwise,
    inputs: Tensor,
    parameters: Sequence[nn.Parameter],
    tile: int,
    around: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Tensor:
    """`function(inputs)`, computed over slices of `tile` tokens.

    Args:
        function: (rows, tokens, width) -> (rows, tokens, width'); each token for itself. Random
            numbers are drawn slice by slice, and replayed in backward.
        inputs: (rows, tokens, width).
        parameters: what the function uses and gives a gradient to.
        tile: tokens of all rows together in a slice; slices are cut along the second dimension.
        around: entered once for all slices of a pass (say, to unpack weights).
    """
    step = max(1, tile // inputs.shape[0])
    if step >= inputs.shape[1]:
        return function(inputs)
    used = [p for p in parameters if p.requires_grad]
    if not torch.is_grad_enabled() or not (used or inputs.requires_grad):
        with around() if around else ExitStack():
            return _joined(function, inputs, step)
    return _Tiled.apply(function, inputs, step, around, *used)  # type: ignore[no-untyped-call,no-any-return]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Tokenwise,
        inputs: Tensor,
        step: int,
        around: Callable[[], AbstractContextManager[Any]] | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.function, ctx.step, ctx.around = function, step, around
        ctx.replay = _random_state(inputs)
        ctx.autocast = _autocast_now(inputs.device.type)
        ctx.save_for_backward(inputs, *parameters)
        with torch.no_grad(), around() if around else ExitStack():
            return _joined(function, inputs, step)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *parameters = ctx.saved_tensors
        wants = ctx.needs_input_grad[1]
        grad_inputs = torch.empty_like(inputs) if wants else None
        sums: list[Tensor | None] = [None] * len(parameters)
        with ExitStack() as stack:
            stack.enter_context(ctx.replay())
            stack.enter_context(ctx.autocast())
            stack.enter_context(ctx.around() if ctx.around else ExitStack())
            for start in range(0, inputs.shape[1], ctx.step):
                part = slice(start, start + ctx.step)
                _one_slice(ctx.function, inputs[:, part], parameters, grad[:, part], sums, grad_inputs, part)
        return None, grad_inputs, None, None, *sums


def _one_slice(
    function: Tokenwise,
    inputs: Tensor,
    parameters: list[Tensor],
    grad: Tensor,
    sums: list[Tensor | None],
    grad_inputs: Tensor | None,
    part: slice,
) -> None:
    """Run a slice again with gradients; add what it gives to the sums. In a function, so that nothing of it stays."""
    leaf = inputs.detach().requires_grad_(grad_inputs is not None)
    with torch.enable_grad():
        output = function(leaf)
    wanted = [leaf, *parameters] if grad_inputs is not None else parameters
    found = list(torch.autograd.grad(output, wanted, grad, allow_unused=True))
    del output
    if grad_inputs is not None:
        own = found.pop(0)
        grad_inputs[:, part] = 0 if own is None else own
    for i, gradient in enumerate(found):
        if gradient is None:
            continue
        total = sums[i]
        if total is None:
            sums[i] = gradient
        else:
            total += gradient


def _joined(function: Tokenwise, inputs: Tensor, step: int) -> Tensor:
    """The results of all slices in one tensor."""
    whole: Tensor | None = None
    for start in range(0, inputs.shape[1], step):
        piece = function(inputs[:, start : start + step])
        if whole is None:
            whole = piece.new_empty((*inputs.shape[:2], *piece.shape[2:]))
        whole[:, start : start + step] = piece
        del piece
    assert whole is not None
    return whole


def _random_state(tensor: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which random numbers come as they come now; afterwards they go on as before it."""
    cpu = torch.get_rng_state()
    devices, states = get_device_states(tensor)

    def replay() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices, device_type=_kind(tensor)))
        torch.set_rng_state(cpu)
        if devices:
            set_device_states(devices, states, device_type=_kind(tensor))
        return stack

    return replay


def _kind(tensor: Tensor) -> str:
    return "cuda" if tensor.device.type in ("cpu", "meta") else tensor.device.type


def _autocast_now(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context with the autocast settings of this moment: backward runs outside of it."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    # The cache would keep cast weights beyond the pass.
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
