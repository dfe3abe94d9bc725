"""Gradient checkpointing: layers keep their input, on the card or off it, and run again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.model import blocks, wrap_forward
from lowmem.ops.host_memory import HostPool
from lowmem.ops.offload import DiskShelf, HostShelf, Keeper
from lowmem.run import Run
from lowmem.sizes import parse_size
from lowmem.strategy import Stage, Strategy, Trait

Forward = Callable[..., Any]


@dataclass
class GradientCheckpointing(Strategy):
    """Recomputes decoder layers in backward (Chen et al. 2016, arXiv:1604.06174).

    Random numbers are replayed, so dropout is the same in both passes. The model's configuration is not touched.

    Attributes:
        every_n_layers: every n-th layer is checkpointed, the first among them; the others keep their activations.
        layers_per_checkpoint: one input is kept for so many layers, which run again together (and all but the last of
            them once more on their own).
        offload: where inputs wait for backward: null on the card, `cpu` in pinned host memory, `disk` in a file.
        pinned_memory: how much host memory may be pinned (`48GiB`); null: no bound. Beyond it memory is pageable.
        offload_dir: folder of the file; null is the system's folder for temporary files.
    """

    stage: ClassVar[Stage] = Stage.RECOMPUTE
    slot: ClassVar[str | None] = "recompute"
    saves: ClassVar[str] = "activations: one hidden state per layer instead of everything inside it; off the card, none"
    costs: ClassVar[str] = "a second forward pass through the checkpointed layers; offloaded, copies over the bus"
    remedy: ClassVar[str] = "leave out offload and layers_per_checkpoint"

    every_n_layers: int = 1
    layers_per_checkpoint: int = 1
    offload: Literal["cpu", "disk"] | None = None
    pinned_memory: str | None = None
    offload_dir: str | None = None

    def __post_init__(self) -> None:
        if self.every_n_layers < 1:
            raise UserError(
                "gradient_checkpointing.every_n_layers: counts from 1; leave the strategy out to switch it off"
            )
        if self.layers_per_checkpoint < 1:
            raise UserError("gradient_checkpointing.layers_per_checkpoint: counts from 1")
        if self.every_n_layers > 1 and self.layers_per_checkpoint > 1:
            raise UserError(
                "gradient_checkpointing: every_n_layers leaves layers out, layers_per_checkpoint takes them together; "
                "give one of them"
            )
        if self.pinned_memory is not None:
            if self.offload != "cpu":
                raise UserError("gradient_checkpointing.pinned_memory: has no effect without offload: cpu")
            parse_size(self.pinned_memory, "gradient_checkpointing.pinned_memory")
        if self.offload_dir is not None and self.offload != "disk":
            raise UserError("gradient_checkpointing.offload_dir: has no effect without offload: disk")

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.RECOMPUTE}) if self.every_n_layers == 1 else frozenset()

    @property
    def breaks(self) -> frozenset[Trait]:
        pure = {Trait.PURE_BLOCKS} if self.offload or self.layers_per_checkpoint > 1 else set()
        return frozenset({Trait.RUN_ONCE, *pure})

    @property
    def period(self) -> int:
        return self.every_n_layers * self.layers_per_checkpoint

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if self.offload_dir is not None and not Path(self.offload_dir).is_dir():
            raise UserError(
                f"gradient_checkpointing.offload_dir: there is no folder {Path(self.offload_dir).absolute()}"
            )
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        keeper, layers = self._keeper(run), blocks(model)[:: self.every_n_layers]
        for start in range(0, len(layers), self.layers_per_checkpoint):
            group = layers[start : start + self.layers_per_checkpoint]
            _Group(group, keeper, first=start == 0).wrap()
        return model

    def _keeper(self, run: Run) -> Keeper | None:
        if self.offload is None:
            return None
        if self.offload == "disk":
            return Keeper(DiskShelf(self.offload_dir, run.device))
        if run.device.type == "cpu":
            run.notice(
                "gradient_checkpointing.offload: on a CPU there is nowhere to go; inputs are copied, nothing is saved"
            )
        limit = None if self.pinned_memory is None else parse_size(self.pinned_memory, "pinned_memory")
        return Keeper(HostShelf(HostPool(run.device, limit, lambda text: run.notice(f"{self.name}: {text}"))))


class _Group:
    """Layers that are recomputed together.

    The model calls one after the other. Those before the last hand their input on and remember how they were called;
    the last runs them all, in one checkpoint.

    Args:
        layers: in order.
        keeper: takes the input away; null: it stays.
        first: the model begins with them.
    """

    def __init__(self, layers: list[nn.Module], keeper: Keeper | None, first: bool) -> None:
        self.layers, self.keeper, self.first = layers, keeper, first
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
            self.waiting.append(lambda inputs: forward(inputs, *args, **kwargs))
            if number < last:
                self.handed = hidden
                return hidden
            together, self.waiting, self.handed = _chain(self.waiting), [], None
            return self._recomputed(together, hidden)

        return called

    def _recomputed(self, together: Forward, hidden: Tensor) -> Any:
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
