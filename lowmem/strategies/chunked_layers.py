"""ChunkedLayers: all of a layer but attention, over slices of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lowmem.errors import UserError
from lowmem.model import blocks, wrap_forward
from lowmem.ops.chunked_layer import SlicedLayer
from lowmem.run import Run
from lowmem.strategies.tiled_mlp import tokens_per_slice
from lowmem.strategy import Stage, Strategy, Trait


@dataclass
class ChunkedLayers(Strategy):
    """Norms, projections and MLP of every layer over slices of tokens, forward and backward; attention sees them all.

    What stays of a layer beyond a slice are its input, queries, keys, values and what attention returns, and the
    gradients of these. 4-bit weights are unpacked once for all slices of a pass and then let go. With LoRA's dropout,
    random numbers are drawn slice by slice.

    Attributes:
        chunk_size: tokens in a slice, over all rows; null: as many as make an intermediate tensor of 2^25 values.
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
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.PURE_BLOCKS})

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        for block in blocks(model):
            tokens = self.chunk_size or tokens_per_slice(block)
            wrap_forward(block, lambda forward, b=block, t=tokens: SlicedLayer(b, forward, t))  # type: ignore[misc]
        return model
