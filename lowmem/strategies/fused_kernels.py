"""Fused kernels: RMSNorm, RoPE and SwiGLU, each in one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.model import unwrapped
from lowmem.ops import fused_modules as found
from lowmem.ops.fused import HUB, Kernels, from_hub, from_liger, without_data
from lowmem.ops.fused_proof import prove_gate, prove_norm, prove_rotation
from lowmem.run import Run, device_kind
from lowmem.strategy import Stage, Strategy, Trait

_MOST_MULTIPROCESSORS = 170  # of a card in cards.json


@dataclass
class FusedKernels(Strategy):
    """RMSNorm, RoPE and SwiGLU with Liger's Triton kernels (Hsu et al. 2024, arXiv:2410.10989), on CUDA.

    The modules of this model alone are changed. Each kind is first compared with its plain version on small tensors,
    forward and backward; one that differs by more than rounding ends the run. Elsewhere than on CUDA the plain
    operations run, and a notice says so.

    Attributes:
        rms_norm: normalisation without float32 copies of the hidden states.
        rope: queries and keys are rotated where they lie.
        swiglu: silu(gate) * up keeps gate and up alone, and its backward writes over them.
        source: `liger`: the package liger-kernel; `kernels`: code from the hub, fetched by the package kernels.
        revision: with `kernels`, the commit whose code is run (40 hexadecimal digits).
    """

    stage: ClassVar[Stage] = Stage.FUSE
    slot: ClassVar[str | None] = "fused"
    saves: ClassVar[str] = "float32 copies in norms, one in four tensors of (tokens x intermediate size); time"
    costs: ClassVar[str] = "a package; Triton compiles at the first step"
    remedy: ClassVar[str] = "drop fused_kernels, as torch.compile fuses these operations itself"
    period = 1

    rms_norm: bool = True
    rope: bool = True
    swiglu: bool = True
    source: Literal["liger", "kernels"] = "liger"
    revision: str | None = None
    _given: Kernels | None = field(default=None, init=False, repr=False)  # kernels for any device
    _kernels: Kernels | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.rms_norm or self.rope or self.swiglu):
            raise UserError("fused_kernels: rms_norm, rope and swiglu are all off, so it does nothing; leave it out")
        if self.source == "liger" and self.revision is not None:
            raise UserError("fused_kernels.revision: has no effect with source: liger")
        if self.source == "kernels" and not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            raise UserError(
                f"fused_kernels.revision: source: kernels runs code from the hub; give the commit of {HUB} to take (40 "
                "hexadecimal digits)"
            )

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.PURE_BLOCKS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        self._kernels = self._find(run)
        return config

    def _find(self, run: Run) -> Kernels | None:
        kind = device_kind(run.device)
        if kind != "cuda" and self._given is None:
            run.notice(f"fused_kernels: the kernels run on CUDA alone; on this device ({kind}) the plain operations do")
            return None
        if run.device.type == "meta":
            return without_data(_MOST_MULTIPROCESSORS if kind == "cuda" else 1)
        if self._given is not None:
            return self._given
        return from_liger() if self.revision is None else from_hub(self.revision)

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        if self._kernels is None:
            return model
        proven = run.device.type != "meta"  # there is nothing to compare without data
        forwards: dict[nn.Module, Any] = {}
        if self.rms_norm:
            forwards |= self._norms(model, self._kernels, run, proven)
        if self.swiglu:
            forwards |= self._gates(model, self._kernels, run, proven)
        if self.rope:
            forwards |= self._rotations(model, self._kernels, run, proven)
        for module, forward in forwards.items():
            module.forward = forward
        return model

    def _norms(self, model: nn.Module, kernels: Kernels, run: Run, proven: bool) -> dict[nn.Module, Any]:
        modules = _some(found.norms(model), model, "rms_norm", "RMSNorm with a weight")
        kinds = _kinds(modules, lambda norm: (type(norm), len(norm.weight), norm.weight.dtype))
        formulas = {
            kind: prove_norm(of_a_kind[0], kernels, run.device) if proven else (0.0, "llama")
            for kind, of_a_kind in kinds.items()
        }
        return {m: found.fused_norm(m, kernels, formulas[kind]) for kind, group in kinds.items() for m in group}

    def _gates(self, model: nn.Module, kernels: Kernels, run: Run, proven: bool) -> dict[nn.Module, Any]:
        modules = _some(found.gated(model), model, "swiglu", "MLP of the form down_proj(silu(gate) * up)")
        if proven:
            for of_a_kind in _kinds(modules, type).values():
                prove_gate(of_a_kind[0], kernels, run.device)
        return {module: found.fused_gate(module, kernels) for module in modules}

    def _rotations(self, model: nn.Module, kernels: Kernels, run: Run, proven: bool) -> dict[nn.Module, Any]:
        modules = _some(found.rotating(model), model, "rope", f"module that calls {found.ROTATE}(q, k, cos, sin)")
        if proven:
            prove_rotation(model, [group[0] for group in _kinds(modules, type).values()], kernels, run.device)
        return {module: found.fused_rotation(module, kernels) for module in modules}


def _some(modules: list[nn.Module], model: nn.Module, part: str, what: str) -> list[nn.Module]:
    """The modules, none of which may have been wrapped by someone else, whose work would be lost."""
    if not modules:
        raise UserError(f"fused_kernels.{part}: {type(unwrapped(model)).__name__} has no {what}; set {part}: false")
    for module in modules:
        if "forward" in vars(module):
            raise UserError(
                f"fused_kernels.{part}: {type(module).__name__} has a forward of its own already; set {part}: false"
            )
    return modules


def _kinds(modules: list[nn.Module], kind: Callable[[Any], Any]) -> dict[Any, list[nn.Module]]:
    groups: dict[Any, list[nn.Module]] = {}
    for module in modules:
        groups.setdefault(kind(module), []).append(module)
    return groups
