"""Gradient checkpointing: layers keep their input, on the card or off it, and run again in backward."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.model import blocks
from lowmem.ops.host_memory import HostPool
from lowmem.ops.offload import DiskShelf, HostShelf, Keeper
from lowmem.ops.recompute import Group, Selection
from lowmem.run import Run
from lowmem.sizes import parse_size
from lowmem.strategy import Stage, Strategy, Trait


@dataclass(frozen=True)
class Layout:
    """What is done to which layers under a budget: first come offloaded ones, then recomputed ones, then whole ones.

    Attributes:
        offloaded: layers whose input leaves the card.
        whole: layers that keep everything (the last ones: they come first in backward, and are gone when the others
            need room to run again).
    """

    offloaded: int = 0
    whole: int = 0


@dataclass
class GradientCheckpointing(Strategy):
    """Recomputes decoder layers in backward (Chen et al. 2016, arXiv:1604.06174).

    Random numbers are replayed, so dropout is the same in both passes. The model's configuration is not touched.

    A budget bounds what the layers hold on the card when a forward pass through them has ended: inputs of recomputed
    layers, what is kept of their insides, and all that autograd saves in the others. Not in it are the working memory
    of the layer at work, weights, gradients, the loss. It holds for a micro-batch whose rows are all `max_length` long.
    Before loading, the run is followed without data: as many layers as fit keep everything, the last ones of the model;
    where not even the inputs of all fit, and only then, `offload` sends those of the first layers away.

    Attributes:
        every_n_layers: every n-th layer is checkpointed, the first among them; the others keep their activations.
        layers_per_checkpoint: one input is kept for so many layers, which run again together (and all but the last of
            them once more on their own).
        keep: operations whose results stay on the card and are not computed again: `attention`, `linear` (products
            with weights), or names of torch's (`aten.mm`).
        budget: bytes (`6GiB`) that activations of layers may take; it decides which layers are recomputed.
        offload: where inputs wait for backward: null on the card, `cpu` in pinned host memory, `disk` in a file.
        pinned_memory: how much host memory may be pinned (`48GiB`); null: no bound. Beyond it memory is pageable.
        offload_dir: folder of the file; null is the system's folder for temporary files.
    """

    stage: ClassVar[Stage] = Stage.RECOMPUTE
    slot: ClassVar[str | None] = "recompute"
    saves: ClassVar[str] = "activations: one hidden state per layer instead of everything inside it; off the card, none"
    costs: ClassVar[str] = "a second forward pass through the checkpointed layers; offloaded, copies over the bus"
    remedy: ClassVar[str] = "leave out offload, keep, budget and layers_per_checkpoint"

    every_n_layers: int = 1
    layers_per_checkpoint: int = 1
    keep: list[str] | None = None
    budget: str | int | None = None
    offload: Literal["cpu", "disk"] | None = None
    pinned_memory: str | None = None
    offload_dir: str | None = None
    _layout: Layout | None = field(default=None, init=False, repr=False)

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
        if self.keep is not None:
            Selection(self.keep)
        if self.budget is not None:
            parse_size(self.budget, "gradient_checkpointing.budget")
            if self.every_n_layers > 1 or self.layers_per_checkpoint > 1:
                raise UserError(
                    "gradient_checkpointing.budget: decides itself which layers are recomputed; leave out "
                    "every_n_layers and layers_per_checkpoint"
                )
        if self.pinned_memory is not None:
            if self.offload != "cpu":
                raise UserError("gradient_checkpointing.pinned_memory: has no effect without offload: cpu")
            parse_size(self.pinned_memory, "gradient_checkpointing.pinned_memory")
        if self.offload_dir is not None and self.offload != "disk":
            raise UserError("gradient_checkpointing.offload_dir: has no effect without offload: disk")

    @property
    def needs(self) -> frozenset[Trait]:
        # these look at the list of layers as a whole: groups, an order in which inputs leave and return, a sum of bytes
        whole = self.offload or self.budget is not None or self.layers_per_checkpoint > 1
        return frozenset({Trait.WHOLE_MODEL}) if whole else frozenset()

    @property
    def provides(self) -> frozenset[Trait]:
        # beside keep, layers that bring their weights along would run other operations the second time
        every = self.every_n_layers == 1 and self.budget is None and self.keep is None
        return frozenset({Trait.RECOMPUTE}) if every else frozenset()

    @property
    def breaks(self) -> frozenset[Trait]:
        # compiled layers save what they like, which no budget can know beforehand
        more = self.offload or self.keep or self.budget is not None or self.layers_per_checkpoint > 1
        grouped = {Trait.LAYER_BY_LAYER} if self.layers_per_checkpoint > 1 else set()
        return frozenset({Trait.RUN_ONCE, *([Trait.PURE_BLOCKS] if more else []), *grouped})

    @property
    def period(self) -> int | None:
        return None if self.budget is not None else self.every_n_layers * self.layers_per_checkpoint

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if self.offload_dir is not None and not Path(self.offload_dir).is_dir():
            raise UserError(
                f"gradient_checkpointing.offload_dir: there is no folder {Path(self.offload_dir).absolute()}"
            )
        if self.budget is not None and self._layout is None and run.subject is not None:
            from lowmem.memory.activation_budget import choose

            self._layout, words = choose(self, parse_size(self.budget, "budget"), run)
            run.notice(f"{self.name}: budget {self.budget}: {words}")
        return config

    def with_layout(self, layout: Layout) -> GradientCheckpointing:
        """The same strategy, its layers chosen already."""
        chosen = copy.copy(self)
        chosen._layout = layout
        return chosen

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        layers = blocks(model)
        away, keeper = len(layers), self._keeper(run)
        if self.budget is not None:
            assert self._layout is not None, "a budget is met by a trainer, which follows the run without data"
            away = self._layout.offloaded
            layers = layers[: max(0, len(layers) - self._layout.whole)]
        chosen, size = layers[:: self.every_n_layers], self.layers_per_checkpoint
        selection = None if self.keep is None else Selection(self.keep)
        for start in range(0, len(chosen), size):
            Group(
                chosen[start : start + size],
                keeper if start < away else None,
                first=start == 0,
                selection=selection,
                last=start + size >= len(chosen),
                before=keeper if start == away else None,
            ).wrap()
        return model

    def _keeper(self, run: Run) -> Keeper | None:
        if self.offload is None or (self._layout is not None and not self._layout.offloaded):
            return None
        if self.offload == "disk":
            return Keeper(DiskShelf(self.offload_dir, run.device))
        if run.device.type == "cpu":
            run.notice(
                "gradient_checkpointing.offload: on a CPU there is nowhere to go; inputs are copied, nothing is saved"
            )
        limit = None if self.pinned_memory is None else parse_size(self.pinned_memory, "pinned_memory")
        return Keeper(HostShelf(HostPool(run.device, limit, lambda text: run.notice(f"{self.name}: {text}"))))
