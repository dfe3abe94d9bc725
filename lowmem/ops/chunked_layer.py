"""A decoder layer whose work on single tokens is done slice by slice; only attention sees all tokens at once.

The layer's own code runs, three times a pass: over slices up to its attention function, which is met with an exception
that carries the queries, keys and values away; then the attention function itself, over all tokens; then over slices
again, with a stand-in for the attention function that hands out its result. In the last run, the projections before
attention are left out. Attention itself runs over a few heads at a time where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.environment import same_random_numbers
from lowmem.errors import UserError
from lowmem.ops.dequantised import forwards_replaced, unpacked_once
from lowmem.ops.tiled import Slices, sliced

Forward = Callable[..., Any]


_MOST_GROUPS = 4


class _Reached(BaseException):
    """The attention function was called; no model's code should catch this.

    Args:
        real: the function it would have been.
        arguments: module, query, key, value (rows, heads, tokens, width), mask.
        options: the others.
    """

    def __init__(self, real: Forward, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.real, self.arguments, self.options = real, arguments, options


class SlicedLayer:
    """Replaces the forward of a decoder layer.

    Args:
        block: the layer.
        tokens: tokens of all rows together in a slice.
        forward: its forward.
    """

    def __init__(self, block: nn.Module, tokens: int, forward: Forward) -> None:
        self.block, self.forward, self.tokens = block, forward, tokens
        self.before_attention: dict[nn.Module, int] | None = None  # module -> width of what it returns
        self.head_groups = 1

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output (rows, tokens, width); rows that are no longer than a slice take the plain way."""
        step = max(1, self.tokens // hidden.shape[0])
        length = hidden.shape[1]
        if step >= length:
            return self.forward(hidden, *args, **kwargs)
        if self.before_attention is None:
            self.before_attention = self._look(hidden[:, :1], length, args, kwargs)
        skipped, groups, last = self.before_attention, self.head_groups, list[_Reached]()

        def called(start: int, part: Tensor) -> Any:
            return self.forward(part, *_cut(args, length, start, part), **_cut(kwargs, length, start, part))

        def project(start: int, part: Tensor) -> tuple[Tensor, ...]:
            reached = _until_attention(lambda: called(start, part))
            module, query, key, value, *mask = reached.arguments
            # without the slice's tensors, which backward's last call would keep alive, and their graph
            last[:] = [_Reached(reached.real, (module, *mask), reached.options)]
            return tuple(heads for tensor in (query, key, value) for heads in tensor.chunk(groups, dim=1))

        def finish(start: int, part: Tensor, *attended: Tensor) -> tuple[Tensor]:
            with _answered(torch.cat(attended, dim=2)), _left_out(skipped):
                output = called(start, part)
            if not isinstance(output, Tensor):
                raise UserError(
                    f"chunked_layers: a {type(self.block).__name__} returns more than hidden states; drop it"
                )
            return (output,)

        parameters = list(self.block.parameters())

        def unpacked() -> Any:
            return unpacked_once(self.block)

        projected = sliced(Slices(project, step, (1,), (2,) * 3 * groups, unpacked), [hidden], parameters)
        reached = last.pop()
        options = {name: kwargs.get(name, value) for name, value in reached.options.items()}
        module, *mask = reached.arguments
        attended = [reached.real(module, *projected[i::groups], *mask, **options)[0] for i in range(groups)]
        del projected, reached
        return sliced(Slices(finish, step, (1,) * (1 + groups), (1,), unpacked), [hidden, *attended], parameters)[0]

    def _look(self, few: Tensor, length: int, args: Any, kwargs: Any) -> dict[nn.Module, int]:
        """Which parts of the attention module run before its function does."""
        widths: dict[nn.Module, int] = {}
        hooks = [m.register_forward_hook(_note(widths)) for m in self.block.modules()]
        try:
            # backward does not look again: it must neither draw random numbers nor be counted by who keeps operations
            with torch.no_grad(), same_random_numbers(few.device), _disable_current_modes():
                reached = _until_attention(
                    lambda: self.forward(few, *_cut(args, length, 0, few), **_cut(kwargs, length, 0, few))
                )
        finally:
            for hook in hooks:
                hook.remove()
        query = reached.arguments[1]
        if query.dim() != 4 or query.shape[2] != 1:
            raise UserError(
                f"chunked_layers: {type(reached.arguments[0]).__name__} gives its attention function queries of shape "
                f"{list(query.shape)} where (rows, heads, tokens, width) is expected; drop chunked_layers"
            )
        self.head_groups = _head_groups(reached)
        return {child: widths[child] for child in reached.arguments[0].children() if child in widths}


def _head_groups(reached: _Reached) -> int:
    """In how many parts attention may run: kernels that treat every head alike, with nothing given per head."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    alike = [ALL_ATTENTION_FUNCTIONS[n] for n in ALL_ATTENTION_FUNCTIONS if n == "sdpa" or n.startswith("flash")]
    mask = next(iter(reached.arguments[4:]), reached.options.get("attention_mask"))
    per_head = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1
    if reached.real not in alike or per_head or reached.options.get("s_aux") is not None:
        return 1
    heads = reached.arguments[2].shape[1]  # of keys and values; each serves as many of the queries
    return next(n for n in range(_MOST_GROUPS, 0, -1) if heads % n == 0)


def _note(widths: dict[nn.Module, int]) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        inputs = given[0] if given else None
        if isinstance(output, Tensor) and isinstance(inputs, Tensor) and output.shape[:-1] == inputs.shape[:-1]:
            widths[module] = output.shape[-1]

    return hook


def _until_attention(call: Callable[[], Any]) -> _Reached:
    def stop(real: Forward, *arguments: Any, **options: Any) -> Any:
        raise _Reached(real, arguments, options)

    try:
        with _attention(stop):
            call()
    except _Reached as reached:
        # The traceback holds all frames up to here, and in them the tensors of the whole pass.
        return reached.with_traceback(None)
    raise UserError("chunked_layers: this model's layers do not call transformers' attention interface; drop it")


def _answered(attended: Tensor) -> Any:
    return _attention(lambda real, *arguments, **options: (attended, None))


@contextmanager
def _attention(answer: Callable[..., Any]) -> Iterator[None]:
    """Inside, whoever asks transformers for an attention function gets `answer`, which is told the real one first."""
    from transformers.modeling_utils import AttentionInterface

    real = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Forward) -> Forward:
        found = real(self, name, default)
        return lambda *arguments, **options: answer(found, *arguments, **options)

    with patch.object(AttentionInterface, "get_interface", get_interface):
        yield


def _left_out(widths: dict[nn.Module, int]) -> AbstractContextManager[None]:
    """Inside, these modules return zeros, without memory, of the shape they would return."""

    def zeros(width: int) -> Forward:
        return lambda x, *_, **__: x.new_zeros(()).expand(*x.shape[:-1], width)

    return forwards_replaced({module: zeros(width) for module, width in widths.items()})


def _cut(value: Any, length: int, start: int, part: Tensor) -> Any:
    """Arguments of the layer for a slice: what has an entry per token is cut; masks, which attention takes, are not."""
    if isinstance(value, dict):
        return {k: v if "mask" in k else _cut(v, length, start, part) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(v, length, start, part) for v in value)
    if isinstance(value, Tensor):
        dim = {1: 0, 2: 1, 3: 1}.get(value.dim())
        if dim is not None and value.shape[dim] == length:
            return value.narrow(dim, start, part.shape[1])
    return value
