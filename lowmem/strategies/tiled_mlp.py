"""TiledMLP: the MLP of a layer over slices of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from lowmem.errors import UserError
from lowmem.model import blocks, feed_forward, unwrapped, wrap_forward
from lowmem.ops.dequantised import unpacked_once
from lowmem.ops.tiled import over_slices
from lowmem.run import Run, device_kind
from lowmem.strategy import Stage, Strategy, Trait

# Values of one intermediate tensor in a slice. A card needs large products to be busy (64 MiB in 16 bits); a CPU is as
# fast with small ones.
_VALUES = {"cpu": 2**22, "cuda": 2**25}
_FEWEST = 256


@dataclass
class TiledMLP(Strategy):
    """The MLP of every layer, forward and backward, over slices of tokens (Bekman et al. 2025, arXiv:2506.13996).

    No tensor of (tokens x intermediate size) exists beyond a slice. 4-bit weights are unpacked once for all slices of a
    pass and then let go. With LoRA's dropout, random numbers are drawn slice by slice.

    Attributes:
        tile_size: tokens in a slice, over all rows; null: as many as make an intermediate tensor of 2^25 values
            (2^22 on a CPU).
    """

    stage: ClassVar[Stage] = Stage.KERNEL
    slot: ClassVar[str | None] = "token_slices"
    saves: ClassVar[str] = "the insides of the MLP: tokens x intermediate size shrinks to one slice"
    costs: ClassVar[str] = "without checkpointing, a second forward pass through the MLP"
    period = 1

    tile_size: int | None = None

    def __post_init__(self) -> None:
        if self.tile_size is not None and self.tile_size < 1:
            raise UserError("tiled_mlp.tile_size: counts from 1")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.WEIGHTS_AT_HAND})

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        for block in blocks(model):
            module = feed_forward(block)
            if module is None:
                raise UserError(
                    f"tiled_mlp: the layers of {type(unwrapped(model)).__name__} have no MLP module of their own; drop "
                    "tiled_mlp"
                )
            tokens = self.tile_size or tokens_per_slice(module, run.device)
            around = partial(unpacked_once, module)
            wrap_forward(module, lambda forward, m=module, t=tokens, a=around: over_slices(m, forward, t, a))  # type: ignore[misc]
        return model


def tokens_per_slice(module: nn.Module, device: torch.device) -> int:
    """As many tokens as make a tensor of 2^25 values (2^22 on a CPU) at the module's widest place, at least 256."""
    values = _VALUES["cpu" if device_kind(device) == "cpu" else "cuda"]
    widths = [int(getattr(m, "out_features", 0) or getattr(m, "nf", 0)) for m in module.modules()]
    return max(_FEWEST, values // max([*widths, 1]))
