"""torch.compile, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from lowmem.errors import UserError
from lowmem.model import blocks, wrap_forward
from lowmem.run import Run
from lowmem.strategy import Stage, Strategy, Trait


@dataclass
class Compile(Strategy):
    """Compiles every decoder layer with torch.compile: like layers share one compilation.

    Attributes:
        backend: a torch.compile backend (`inductor`, `aot_eager`, ...).
        dynamic: compile for any length at once; null lets torch find out which sizes change.
    """

    stage: ClassVar[Stage] = Stage.COMPILE
    slot: ClassVar[str | None] = "compile"
    predictable: ClassVar[bool] = False  # a compiler allocates by a plan of its own
    saves: ClassVar[str] = "temporaries that fused kernels never write"
    costs: ClassVar[str] = "compile time at the first steps, and again for new shapes"
    period = 1

    backend: str = "inductor"
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise UserError(f"compile.backend: there is no {self.backend}; known: {', '.join(sorted(known))}")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.PURE_BLOCKS})

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        if run.device.type == "meta":  # compiled code allocates by a plan of its own, made for the real device
            run.notice("compile: memory is predicted as without it; compiled layers mostly need less")
            return model
        for block in blocks(model):
            wrap_forward(block, lambda forward: torch.compile(forward, backend=self.backend, dynamic=self.dynamic))
        return model
