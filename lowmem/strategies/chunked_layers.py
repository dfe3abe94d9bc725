"""ChunkedLayers: all of a layer but attention, over slices of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from lowmem.errors import UserError
from lowmem.model import blocks, norms_beside, wrap_forward
from lowmem.ops.chunked_layer import SlicedLayer
from lowmem.ops.tiled import over_slices
from lowmem.run import Run
from lowmem.strategies.tiled_mlp import tokens_per_slice
from lowmem.strategy import Stage, Strategy, Trait


@dataclass
class ChunkedLayers(Strategy):
    """Norms, projections and MLP of every layer over slices of tokens, forward and backward; attention sees them all.

    What stays of a layer beyond a slice are its input, queries, keys, values and what attention returns, and the
    gradients of these. Attention runs over a quarter of the heads at a time, where its kernel treats heads alike, so
    that what it needs for itself is a quarter. The norm after the last layer is sliced, too. 4-bit weights are unpacked
    once for all slices of a pass and then let go. With dropout, random numbers are drawn slice by slice.

    Attributes:
        chunk_size: tokens in a slice, over all rows; null: as many as make an intermediate tensor of 2^25 values
            (2^22 on a CPU).
    """

    stage: ClassVar[Stage] = Stage.KERNEL
    slot: ClassVar[str | None] = "token_slices"
    saves: ClassVar[str] = "the insides of a layer: norms, projections and MLP shrink to one slice"
    costs: ClassVar[str] = "the projections before attention run once more; without checkpointing, the whole layer"
    remedy: ClassVar[str] = "drop chunked_layers"
    period = 1

    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UserError("chunked_layers.chunk_size: counts from 1")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.WEIGHTS_AT_HAND})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.PURE_BLOCKS})

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        for block in blocks(model):
            tokens = self.chunk_size or tokens_per_slice(block, run.device)
            wrap_forward(block, partial(SlicedLayer, block, tokens))
        for norm in norms_beside(model):
            wrap_forward(norm, lambda forward, m=norm: over_slices(m, forward, tokens))  # type: ignore[misc]
        return model
