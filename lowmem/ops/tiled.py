"""A function of single tokens over slices of the sequence, forward and backward, so that its insides stay small.

What the function saves for backward never exists for more than one slice: backward runs it again, slice by slice. The
idea is that of TiledMLP in Arctic's long-sequence training (Bekman et al. 2025, arXiv:2506.13996), here with the
parameters as inputs of the autograd function: their gradients are summed over the slices and given back once, so hooks
that wait for a gradient run once for each parameter and backward pass.

Inputs are saved before the function runs, by an autograd node of their own. Under checkpointing, which runs a layer
again until it has got back the last tensor that was saved, the function then need not run a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lowmem.ops.without_data import starts

Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Slices:
    """A function of slices of tokens.

    Attributes:
        function: takes one slice of each input and its start, returns one slice of each output. Each token's result
            depends on that token alone. Random numbers are drawn slice by slice, and replayed in backward.
        step: tokens in a slice.
        inputs, outputs: which dimension of each input and output counts the tokens.
        around: is entered once for all slices of a pass (to unpack weights, say).
    """

    function: Callable[..., tuple[Tensor, ...]]
    step: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    around: Around = ExitStack

    def all(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The function over all tokens, slice by slice."""
        length = tensors[0].shape[self.inputs[0]]
        whole: list[Tensor] = []
        for start in starts(length, self.step, tensors[0].device):
            pieces = self.function(start, *self.cut(tensors, start))
            if not whole:
                whole = [_like(piece, dim, length) for piece, dim in zip(pieces, self.outputs, strict=True)]
            for full, piece, dim in zip(whole, pieces, self.outputs, strict=True):
                full.narrow(dim, start, piece.shape[dim]).copy_(piece)
            del pieces, piece
        return tuple(whole)

    def cut(self, tensors: Sequence[Tensor], start: int, dims: tuple[int, ...] | None = None) -> list[Tensor]:
        """One slice of each tensor."""
        dims = dims or self.inputs
        return [t.narrow(d, start, min(self.step, t.shape[d] - start)) for t, d in zip(tensors, dims, strict=True)]


def _like(piece: Tensor, dim: int, length: int) -> Tensor:
    """Memory for all slices, its dimensions in the order in which they lie in a piece: who follows makes its results in
    that order, too, and would otherwise copy them."""
    size = (*piece.shape[:dim], length, *piece.shape[dim + 1 :])
    order = sorted(range(piece.dim()), key=piece.stride, reverse=True)
    return torch.empty_permuted(size, order, dtype=piece.dtype, device=piece.device)


def over_slices(module: nn.Module, forward: Callable[..., Any], tokens: int, around: Around = ExitStack) -> Any:
    """The forward of a module that works on every token alone, over slices.

    Args:
        module: takes and returns (rows, tokens, width).
        forward: its forward.
        tokens: tokens of all rows together in a slice; an input that has no more takes the plain way.
        around: as in `Slices`.
    """

    def in_slices(hidden: Tensor) -> Tensor:
        step = max(1, tokens // hidden.shape[0])
        if step >= hidden.shape[1]:
            whole: Tensor = forward(hidden)
            return whole
        slices = Slices(lambda _, part: (forward(part),), step, (1,), (1,), around)
        return sliced(slices, [hidden], list(module.parameters()))[0]

    return in_slices


def sliced(slices: Slices, tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """The outputs of all slices, as one tensor each.

    Args:
        slices: what is computed, and how it is cut.
        tensors: the inputs.
        parameters: what the function uses and gives a gradient to.
    """
    used = [p for p in parameters if p.requires_grad]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *used)):
        with slices.around():
            return slices.all(tensors)
    saver = _Save.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn  # type: ignore[no-untyped-call]
    found: tuple[Tensor, ...] = _Sliced.apply(slices, saver, len(tensors), *tensors, *used)  # type: ignore[no-untyped-call]
    return found


class _Save(torch.autograd.Function):
    """Saves its inputs, and does nothing else; who has its node can ask for them."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return marker.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing depends on the marker")


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: Slices, saver: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slices, ctx.saver, ctx.count = slices, saver, count
        ctx.parameters = tensors[count:]
        ctx.replay = _random_state(tensors[0])
        ctx.autocast = _autocast_now(tensors[0].device.type)
        ctx.set_materialize_grads(False)
        with torch.no_grad(), slices.around():
            return slices.all(tensors[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slices, saver, ctx.saver = ctx.slices, ctx.saver, None
        assert saver is not None, "the inputs were let go by the first backward"
        tensors = list(saver.saved_tensors)
        del saver
        wants = ctx.needs_input_grad[3 : 3 + ctx.count]
        sums = _Sums(slices, tensors, list(ctx.parameters), wants)
        with ExitStack() as stack:
            stack.enter_context(ctx.replay())
            stack.enter_context(ctx.autocast())
            stack.enter_context(slices.around())
            for start in starts(tensors[0].shape[slices.inputs[0]], slices.step, tensors[0].device):
                sums.add(start, grads)
        return None, None, None, *sums.inputs, *sums.parameters


class _Sums:
    """Gradients of the inputs, slice by slice, and of the parameters, summed over the slices."""

    def __init__(
        self, slices: Slices, tensors: list[Tensor], parameters: list[Tensor], wants: tuple[bool, ...]
    ) -> None:
        self.slices, self.tensors, self.given = slices, tensors, parameters
        self.inputs = [torch.empty_like(t) if want else None for t, want in zip(tensors, wants, strict=True)]
        self.parameters: list[Tensor | None] = [None] * len(parameters)

    def add(self, start: int, grads: tuple[Tensor | None, ...]) -> None:
        """Run a slice again with gradients, and add what it gives."""
        slices = self.slices
        leaves = [
            t.detach().requires_grad_(own is not None)
            for t, own in zip(slices.cut(self.tensors, start), self.inputs, strict=True)
        ]
        with torch.enable_grad():
            outputs = slices.function(start, *leaves)
        pairs = [
            (out, slices.cut([grad], start, (dim,))[0])
            for out, grad, dim in zip(outputs, grads, slices.outputs, strict=True)
            if grad is not None and out.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = list(
            torch.autograd.grad(
                [out for out, _ in pairs], [*wanted, *self.given], [g for _, g in pairs], allow_unused=True
            )
        )
        del outputs, pairs
        for own, dim in zip(self.inputs, slices.inputs, strict=True):
            if own is not None:
                gradient = found.pop(0)
                place = own.narrow(dim, start, min(slices.step, own.shape[dim] - start))
                place.zero_() if gradient is None else place.copy_(gradient)
        for i, gradient in enumerate(found):
            total = self.parameters[i]
            if total is None:
                self.parameters[i] = gradient
            elif gradient is not None:
                total += gradient


def _random_state(tensor: Tensor) -> Around:
    """A context in which random numbers come as they come now; afterwards they go on as before it."""
    cpu = torch.get_rng_state()
    devices, states = get_device_states(tensor)
    kind = "cuda" if tensor.device.type in ("cpu", "meta") else tensor.device.type

    def replay() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        torch.set_rng_state(cpu)
        if devices:
            set_device_states(devices, states, device_type=kind)
        return stack

    return replay


def _autocast_now(kind: str) -> Around:
    """A context with the autocast settings of this moment: backward runs outside of it."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    # The cache would keep cast weights beyond the pass.
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
