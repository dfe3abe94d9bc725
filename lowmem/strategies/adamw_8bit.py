"""AdamW with 8-bit moments, through bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lowmem.libraries import import_bitsandbytes
from lowmem.model import embedding_parameters
from lowmem.run import Run, device_kind
from lowmem.strategies.adamw import check_moments, decay_groups
from lowmem.strategy import MakeOptimizer, Stage, Strategy, Trait


@dataclass
class AdamW8bit(Strategy):
    """AdamW whose moments are quantised in blocks of 256 (Dettmers et al. 2022, arXiv:2110.02861).

    Embeddings and tensors below 4,096 values keep 32-bit moments. The state is allocated when the run is built, not at
    the first step, so that the first step tells the peak.

    Attributes:
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        paged: moments in CUDA's managed memory, which moves to the host when the card is full.
    """

    stage: ClassVar[Stage] = Stage.UPDATE
    slot: ClassVar[str | None] = "optimizer"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "three quarters of the moments: about 2 bytes per trainable weight instead of 8"
    costs: ClassVar[str] = "moments with 8 bits; paged ones travel over the bus when the card is full"
    period = 1

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    paged: bool = False

    def __post_init__(self) -> None:
        check_moments(self.name, self.betas, self.eps)

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.DENSE_PARAMS})

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        assert run.model is not None
        kind = device_kind(run.device)
        paged = self.paged and kind == "cuda"
        if self.paged and not paged:
            run.notice(f"adamw_8bit.paged: {kind} has no managed memory; the moments are ordinary tensors here")
        wide = {id(p) for p in embedding_parameters(run.model)}

        def bits_of(parameter: nn.Parameter) -> int:
            return 32 if id(getattr(parameter, "stands_for", parameter)) in wide else 8

        def adamw_8bit(parameters: list[nn.Parameter]) -> Optimizer:
            groups = [
                {**group, "params": members, "optim_bits": bits}
                for group in decay_groups(parameters, run.config.weight_decay)
                for bits in (8, 32)
                if (members := [p for p in group["params"] if bits_of(p) == bits])
            ]
            options = {"lr": run.config.learning_rate, "betas": self.betas, "eps": self.eps, "is_paged": paged}
            return _allocated(_adamw_class()(groups, **options))

        return adamw_8bit


_PAGED_VALUES = 100_000  # bitsandbytes keeps smaller moments in ordinary memory


def _adamw_class() -> Any:
    bitsandbytes = import_bitsandbytes()

    base: Any = bitsandbytes.optim.AdamW

    class GroupwiseAdamW(base):  # type: ignore[misc]
        """bitsandbytes' AdamW with the number of bits read from the parameter group.

        Its own override is keyed by `id(parameter)` in a global table, which outlives the parameter.
        """

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            return {**super().get_config(gindex, pindex, group), "optim_bits": group["optim_bits"]}

        def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Any:
            if not (p.is_meta and self.is_paged and p.numel() >= _PAGED_VALUES):
                return super().get_state_buffer(p, dtype=dtype)
            with _disable_current_modes():  # for a trace it is no tensor of the device; `is_paged` says what it is
                state: Any = torch.zeros_like(p, dtype=dtype)
            state.is_paged = True
            return state

        def prefetch_state(self, p: Tensor) -> None:
            if not p.is_meta:
                super().prefetch_state(p)

    return GroupwiseAdamW


def _allocated(optimizer: Any) -> Optimizer:
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, g, i)
    return optimizer  # type: ignore[no-any-return]
