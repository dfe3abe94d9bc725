"""Which layers are recomputed or offloaded under a budget for activations: chosen by following the run without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.environment import same_random_numbers
from lowmem.errors import UserError
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.trace import Trace
from lowmem.model import blocks
from lowmem.run import Run, device_kind
from lowmem.sizes import gib

if TYPE_CHECKING:
    from lowmem.memory.subject import Subject
    from lowmem.strategies.checkpointing import GradientCheckpointing, Layout
    from lowmem.trainer import Trainer

ALL = 10**9  # layers: more than a model has


@dataclass(frozen=True)
class Held:
    """What a layer holds on the card between its forward and its backward.

    Attributes:
        inputs: bytes of its input (which the layer before has made); 0 where nobody holds it.
        inside: bytes of what was made in it, without its output.
    """

    inputs: int
    inside: int

    @property
    def all(self) -> int:
        """Both."""
        return self.inputs + self.inside


def choose(strategy: GradientCheckpointing, budget: int, run: Run) -> tuple[Layout, str]:
    """The layout whose layers hold no more than the budget, and the choice in words.

    Every layer is followed twice, once keeping everything and once recomputed; what is chosen is followed once more.

    Args:
        strategy: whose layers are laid out.
        budget: bytes.
        run: of a trainer that has built nothing yet.

    Raises:
        UserError: no layout fits, or the run cannot be followed without data.
    """
    from lowmem.strategies.checkpointing import Layout

    assert run.subject is not None
    try:
        subject = run.subject()
    except UserError as error:
        raise UserError(f"gradient_checkpointing.budget: this run cannot be followed without data ({error})") from None

    def held(layout: Layout) -> list[Held]:
        chosen = strategy.with_layout(layout)
        others = [s for s in subject.strategies if s.name != strategy.name]
        return most_held(subject.with_strategies([*others, chosen]), run)

    with same_random_numbers(run.device), _disable_current_modes():  # nobody who looks on sees this
        whole, again = held(Layout(whole=ALL)), held(Layout())
        layout = _fitting(Layout, whole, again, budget, offloads=strategy.offload is not None)
        while layout is not None and (kept := held(layout)) and sum(h.all for h in kept) > budget:
            layout = _less(layout, len(again), offloads=strategy.offload is not None)
    if layout is None:
        raise UserError(_too_little(strategy, whole, again, subject, budget))
    return layout, _words(layout, kept)


def _fitting(made: type[Layout], whole: list[Held], again: list[Held], budget: int, *, offloads: bool) -> Layout | None:
    """As many whole layers as fit; where the inputs of all are too much already, as few offloaded ones as needed."""
    layers = len(again)
    for number in range(layers, -1, -1):
        held = sum(h.all for h in again[: layers - number]) + sum(h.all for h in whole[layers - number :])
        if held <= budget:
            return made(whole=number)
    for number in range(1, layers if offloads else 1):  # the last one's input is needed at once
        if sum(h.inside for h in again[:number]) + sum(h.all for h in again[number:]) <= budget:
            return made(offloaded=number)
    return None


def _less(layout: Layout, layers: int, *, offloads: bool) -> Layout | None:
    """The next layout that holds less."""
    if layout.whole:
        return type(layout)(whole=layout.whole - 1)
    more = layout.offloaded + 1
    return type(layout)(offloaded=more) if offloads and more < layers else None


def _too_little(
    strategy: GradientCheckpointing, whole: list[Held], again: list[Held], subject: Subject, budget: int
) -> str:
    least = sum(h.all for h in again)
    remedy = "give that much, add offload: cpu, or lower training.max_length"
    if strategy.offload is not None:
        least = sum(h.inside for h in again[:-1]) + again[-1].all
        remedy = "give that much, or lower training.max_length"
    numbers = subject.training
    return (
        f"gradient_checkpointing.budget: {strategy.budget} is not enough for the {len(again)} layers of a micro-batch "
        f"of rows of {numbers.max_length:,} tokens, which hold at least {gib(least)} ({least:,} bytes); {remedy}"
    )


def _words(layout: Layout, held: list[Held]) -> str:
    layers = len(held)
    whole = min(layout.whole, layers)
    parts = [
        (whole, held[layers - whole :], "keep everything"),
        (layers - whole - layout.offloaded, held[layout.offloaded : layers - whole], "recompute"),
        (layout.offloaded, held[: layout.offloaded], "recompute from offloaded inputs"),
    ]
    total = gib(sum(h.all for h in held))
    shown = ", ".join(f"{number} {what} ({gib(sum(h.all for h in of))})" for number, of, what in parts if number)
    return f"of {layers} layers {shown}; together {total}"


# -- following --------------------------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """The forward passes of a step have been followed."""


def most_held(subject: Subject, run: Run) -> list[Held]:
    """What each layer holds at the end of a forward pass, for the micro-batch that holds most, of rows of `max_length`.

    Args:
        subject: the run.
        run: its numbers and its device.
    """
    watch = _Watch()
    device: Any = "cuda" if device_kind(run.device) == "cuda" else "cpu"
    with suppress(_EnoughError):
        subject.trace((run.config.max_length,) * run.config.batch_size, device, look=watch.begin)
    return max(watch.passes, key=lambda held: sum(h.all for h in held))


class _Watch:
    """Looks at the forward passes of a trainer's first step; nothing runs backward."""

    def __init__(self) -> None:
        self.passes: list[list[Held]] = []

    def begin(self, trainer: Trainer) -> None:
        """Stand around the trainer's loss."""
        loss, layers = trainer.loss, blocks(trainer.model)
        trainer.step = _enough

        def followed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            with Trace() as trace:
                for _, lasting in tensors_by_category(trainer):
                    for tensor in lasting:
                        trace.see(tensor)
                looks = [_Look(trace, layer) for layer in layers]
                result = loss(model, inputs)
                self.passes.append(_held(trace, looks))
                for look in looks:
                    look.remove()
            del result  # and with it all that was saved
            return torch.zeros((), device=trainer.device, requires_grad=True)

        trainer.loss = followed


def _enough() -> None:
    raise _EnoughError


class _Look:
    """Which storages of a trace are born in a layer, and which are its input and its output."""

    def __init__(self, trace: Trace, layer: nn.Module) -> None:
        self.trace = trace
        self.start = self.end = 0
        self.input: int | None = None
        self.output: int | None = None
        self._hooks = [
            layer.register_forward_pre_hook(self._enter, with_kwargs=True),
            layer.register_forward_hook(self._leave),
        ]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input = self.trace.see(args[0] if args else kwargs["hidden_states"])
        self.start = len(self.trace.storages)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.end = len(self.trace.storages)
        self.output = self.trace.see(output[0] if isinstance(output, tuple) else output)

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()


def _held(trace: Trace, looks: Sequence[_Look]) -> list[Held]:
    sizes = Counter[int]()
    for number, change in trace.events:
        sizes[number] += change
    live = {number for number, left in sizes.items() if left}
    passed = {number for look in looks for number in (look.input, look.output)}

    def bytes_of(numbers: set[int]) -> int:
        return sum(trace.storages[n].size for n in numbers & live if trace.storages[n].kept_on == "device")

    return [
        Held(
            bytes_of({look.input} if look.input is not None else set()),
            bytes_of(set(range(look.start, look.end)) - passed),
        )
        for look in looks
    ]
