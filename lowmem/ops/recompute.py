"""Layers that run again in backward: alone or together, from an input on the card or off it, all of them or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowmem.errors import UserError
from lowmem.model import wrap_forward
from lowmem.ops.offload import Keeper

Forward = Callable[..., Any]

_PRODUCTS = ("mm", "addmm", "_grouped_mm", "_int_mm", "_scaled_mm")
_NEVER = "no such operation runs in the recomputed layers"
_WHY_NOT = {
    "attention": (
        f"{_NEVER} (eager attention, and sdpa with dropout on a CPU, are plain matrix products: with "
        "model.attn_implementation: sdpa there is one)"
    ),
    "linear": f"{_NEVER} outside of the slices that another strategy cuts them into",
}
_SLICED = [0]  # how many functions over slices are at work


class Group:
    """Layers that are recomputed together.

    The model calls one after the other. Those before the last hand their input on and remember how they were called;
    the last runs them all, in one checkpoint.

    Args:
        layers: in order.
        keeper: takes the input away; null: it stays.
        first: the model begins with them, or none before them is offloaded.
        selection: operations whose results are kept; null: all run again.
        last: none after them is recomputed.
        before: where these stay and those before them do not: who keeps the latter.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        keeper: Keeper | None = None,
        *,
        first: bool = False,
        selection: Selection | None = None,
        last: bool = False,
        before: Keeper | None = None,
    ) -> None:
        self.layers, self.keeper, self.first, self.last = layers, keeper, first, last
        self.selection, self.before = selection, before
        self.waiting: list[Forward] = []
        self.handed: Any = None  # what the model was given for the output of the layer before

    def wrap(self) -> None:
        """Replace the layers' forwards."""
        for number, layer in enumerate(self.layers):
            wrap_forward(layer, lambda forward, n=number: self._one(n, forward))  # type: ignore[misc]

    def _one(self, number: int, forward: Forward) -> Forward:
        layer, last = self.layers[number], len(self.layers) - 1

        def called(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return forward(hidden, *args, **kwargs)
            if number == 0:
                self.waiting = []
            elif hidden is not self.handed:
                raise UserError(
                    "gradient_checkpointing.layers_per_checkpoint: this model computes something between its layers; "
                    "set it to 1"
                )
            self.waiting.append(self._in_part(lambda inputs: forward(inputs, *args, **kwargs), 2 + (number < last)))
            if number < last:
                self.handed = hidden
                return hidden
            together, self.waiting, self.handed = _chain(self.waiting), [], None
            output = self._recomputed(together, hidden)
            if self.last and self.selection is not None:
                self.selection.require_all()
            return output

        return called

    def _in_part(self, forward: Forward, runs: int) -> Forward:
        return forward if self.selection is None else self.selection.kept_by(forward, runs)

    def _recomputed(self, together: Forward, hidden: Tensor) -> Any:
        if self.before is not None:
            self.before.leave_last()
        if self.keeper is None:
            return checkpoint(together, hidden, use_reentrant=False)
        kept = self.keeper.keep(hidden, self.first)
        # The marker tells torch the device whose random numbers are replayed.
        return checkpoint(lambda _: together(kept.get()), kept.marker, use_reentrant=False)


def _chain(forwards: list[Forward]) -> Forward:
    """All in a row. Those before the last have checkpoints of their own, within the group's: so when the group runs
    again, it keeps what is inside one layer, not inside all of them."""

    def together(hidden: Any) -> Any:
        for forward in forwards[:-1]:
            hidden = checkpoint(forward, hidden, use_reentrant=False)
            if not isinstance(hidden, Tensor):
                raise UserError(
                    "gradient_checkpointing.layers_per_checkpoint: this model's layers return more than a hidden "
                    "state; set it to 1"
                )
        return forwards[-1](hidden)

    return together


class Selection:
    """Operations whose results stay when the rest of a layer is recomputed.

    Args:
        names: `attention` (whatever has it in its name), `linear` (products with weights), or operations as torch
            calls them (`aten.mm`).

    Raises:
        UserError: a name is unknown, or there twice, or there is none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._met: set[str] = set()
        self._known: dict[Any, str | None] = {}
        if not self.names or len(set(self.names)) < len(self.names):
            raise UserError(f"gradient_checkpointing.keep: names of operations, each once; got {self.names}")
        for name in self.names:
            space, _, operation = name.partition(".")
            if name in ("attention", "linear") or (operation and space != "aten"):
                continue
            if not operation or not hasattr(torch.ops.aten, operation):
                raise UserError(
                    f"gradient_checkpointing.keep: there is no operation {name}; attention, linear, or a name of "
                    "torch's such as aten.mm"
                )

    def kept_by(self, forward: Forward, runs: int) -> Forward:
        """A layer's forward that runs so many times: it keeps results in every run but the last, and is given those of
        the run before in every run but the first."""
        make: Any = create_selective_checkpoint_contexts
        pairs = [make(self._policy) for _ in range(runs - 1)]
        numbers = iter(range(runs))

        def run(hidden: Any) -> Any:
            number = next(numbers, runs)
            assert number < runs, "a layer ran more often than its checkpoint does"
            with ExitStack() as stack:
                if number > 0:
                    stack.enter_context(pairs[number - 1][1])
                if number < runs - 1:  # above the other: it keeps on what that one gives
                    stack.enter_context(pairs[number][0])
                return forward(hidden)

        return run

    def require_all(self) -> None:
        """After a pass: every name has kept something.

        Raises:
            UserError: one has not.
        """
        for name in self.names:
            if name not in self._met:
                raise UserError(
                    f"gradient_checkpointing.keep: {name} has no effect: {_WHY_NOT.get(name, _NEVER)}; leave it out"
                )

    def _policy(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func not in self._known:
            self._known[func] = next((name for name in self.names if _is(func, name)), None)
        name = self._known[func]
        if name is None or _SLICED[0]:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._met.add(name)
        return CheckpointPolicy.MUST_SAVE


def _is(func: Any, name: str) -> bool:
    full = func._schema.name if hasattr(func, "_schema") else func.name()  # flex attention is of a higher order
    space, _, operation = full.rpartition("::")
    if name == "attention":
        return "attention" in operation or "attn" in operation
    if name == "linear":
        return operation in _PRODUCTS or (space == "bitsandbytes" and "mm" in operation)
    return name == f"{space}.{operation}"


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Inside, a function runs over slices of the sequence, which runs them again in backward in any case."""
    _SLICED[0] += 1
    try:
        yield
    finally:
        _SLICED[0] -= 1
