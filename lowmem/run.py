"""What strategies and observers see of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.errors import UserError
from lowmem.strategy import ForwardBackward, Trait
from lowmem.world import World

if TYPE_CHECKING:
    from lowmem.config import TrainingConfig
    from lowmem.memory.subject import Subject


@dataclass
class Run:
    """The view of a run that is handed to strategies; the trainer fills it as the parts are built.

    Attributes:
        config: the training numbers.
        device: where the model computes.
        subject: the run as the predictor sees it, while nothing is built; null outside of a trainer.
        traits: what holds with the strategies of this run.
        world: the processes that share the run.
        autocast: the context in which operations run outside of a loss, too.
        loop: what computes a pass in place of the plain loop over micro-batches; null: that loop.
        find_gradients: the gradients of a step, where an engine keeps them elsewhere than in `Parameter.grad`.
        find_held: tensors that an engine keeps from step to step beside weights and states, by category.
        model: the wrapped model, once it exists.
        trainable: name -> parameter, once the model exists.
        optimizer: once it exists.
        global_step: optimizer steps done.
        metrics: what the current step has logged.
        stopped: why the loop ends after the current step, before its last one; null while it goes on.
        counters: things that happened, by name, kept in `result.json` (steps skipped, passes run again).
        all_notices: one-line remarks for the user, kept in `result.json`.
    """

    config: TrainingConfig
    device: torch.device
    traits: frozenset[Trait]
    world: World = field(default_factory=World)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    loop: ForwardBackward | None = None
    find_gradients: Callable[[], list[Tensor]] | None = None
    find_held: Callable[[], Iterable[tuple[str, list[Tensor]]]] | None = None
    subject: Callable[[], Subject] | None = None
    model: nn.Module | None = None
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    global_step: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None
    counters: dict[str, int] = field(default_factory=dict)
    all_notices: list[str] = field(default_factory=list)
    _untold: list[str] = field(default_factory=list)

    def log(self, **metrics: float | Tensor | bool) -> None:
        """Add to the metrics of the current step (tensors are read only when a line is written)."""
        self.metrics.update(metrics)

    def gradients(self) -> list[Tensor]:
        """All gradients of the step, or this rank's parts of them; they may be scaled in place."""
        if self.find_gradients is not None:
            return self.find_gradients()
        return [p.grad for p in self.trainable.values() if p.grad is not None]

    def count(self, name: str) -> int:
        """One more of `name`; returns how many there were."""
        self.counters[name] = self.counters.get(name, 0) + 1
        return self.counters[name]

    def notice(self, text: str) -> None:
        """Tell the user once what they should know (a setting that this device cannot honour, a step left out)."""
        if text not in self.all_notices:
            self.all_notices.append(text)
            self._untold.append(text)

    def take_notices(self) -> list[str]:
        """The notices that nobody has been shown yet."""
        untold, self._untold = self._untold, []
        return untold


def pick_device(model: object) -> torch.device:
    """The meta device for a model without data; else this process's CUDA device where there is one; else the CPU.

    Raises:
        UserError: more processes than cards on this machine.
    """
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        return torch.device("meta")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda")
    number, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= cards:
        raise UserError(f"rank {os.environ.get('RANK', number)}: there are {cards} cards here; start as many processes")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


_followed = ["cpu"]  # what the meta device stands for; the last one counts


def device_kind(device: torch.device) -> str:
    """`cuda`, `cpu` ...: whose ways a run takes; on the meta device, those of the device that it stands for."""
    return _followed[-1] if device.type == "meta" else device.type


@contextmanager
def meta_stands_for(kind: str) -> Iterator[None]:
    """Inside, a run on the meta device takes the ways of this kind of device."""
    _followed.append(kind)
    try:
        yield
    finally:
        _followed.pop()


def number(value: Any) -> Any:
    """A metric as a plain number; on the meta device there is none to read."""
    if not isinstance(value, Tensor):
        return value
    return float("nan") if value.is_meta else float(value)
