"""Gradient checkpointing: a layer keeps its input and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowmem.errors import UserError
from lowmem.model import blocks, wrap_forward
from lowmem.run import Run
from lowmem.strategy import Stage, Strategy, Trait


@dataclass
class GradientCheckpointing(Strategy):
    """Recomputes decoder layers in backward (Chen et al. 2016, arXiv:1604.06174).

    Random numbers are replayed, so dropout is the same in both passes. The model's configuration is not touched.

    Attributes:
        every_n_layers: every n-th layer is checkpointed, the first among them; the others keep their activations.
    """

    stage: ClassVar[Stage] = Stage.RECOMPUTE
    slot: ClassVar[str | None] = "recompute"
    saves: ClassVar[str] = "activations: one hidden state per layer instead of everything inside it"
    costs: ClassVar[str] = "a second forward pass through the checkpointed layers"

    every_n_layers: int = 1

    def __post_init__(self) -> None:
        if self.every_n_layers < 1:
            raise UserError(
                "gradient_checkpointing.every_n_layers: counts from 1; leave the strategy out to switch it off"
            )

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.RECOMPUTE}) if self.every_n_layers == 1 else frozenset()

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.RUN_ONCE})

    @property
    def period(self) -> int:
        return self.every_n_layers

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        for block in blocks(model)[:: self.every_n_layers]:
            wrap_forward(block, lambda forward, block=block: _recomputed(forward, block))  # type: ignore[misc]
        return model


def _recomputed(forward: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
