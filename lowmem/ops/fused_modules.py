"""Which modules of a model the fused kernels can stand in for, by their structure, and how they call them.

Only instances are changed: another model of the same class in the same process stays as it is. RoPE is a function that
attention modules call by a global name; a module at hand gets a copy of its class's forward in which that name means
the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.ops.fused import Kernels

Forward: TypeAlias = Callable[..., Any]
Formula: TypeAlias = tuple[float, str]  # what is added to the weight, and what is computed in float32

OFFSETS = (0.0, 1.0)
ROTATE = "apply_rotary_pos_emb"
_SILU = ("SiLU", "SiLUActivation")


# -- what is there ----------------------------------------------------------------------------------------------------


def norms(model: nn.Module) -> list[nn.Module]:
    """Modules named RMSNorm that have one weight vector, an epsilon, and take hidden states alone."""
    return [m for m in model.modules() if "RMSNorm" in type(m).__name__ and _is_norm(m)]


def _is_norm(module: nn.Module) -> bool:
    weights = dict(module.named_parameters())
    return (
        set(weights) == {"weight"} and weights["weight"].dim() == 1 and _eps(module) is not None and _takes(module, 1)
    )


def _eps(module: Any) -> float | None:
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in found if isinstance(value, float)), None)


def gated(model: nn.Module) -> list[nn.Module]:
    """Modules of the form down_proj(silu(gate) * up), the two from one projection or from two."""
    return [m for m in model.modules() if projections(m) and _takes(m, 1)]


def projections(module: nn.Module) -> tuple[str, ...]:
    """What makes gate and up in a gated MLP with SiLU, by name; empty where it is none."""
    children = dict(module.named_children())
    if not any(type(child).__name__ in _SILU for child in children.values()) or "down_proj" not in children:
        return ()
    return next((names for names in (("gate_proj", "up_proj"), ("gate_up_proj",)) if set(names) <= set(children)), ())


def rotating(model: nn.Module) -> list[nn.Module]:
    """Modules whose forward calls `apply_rotary_pos_emb(q, k, cos, sin)`."""
    return [m for m in model.modules() if rotation(type(m)) is not None]


def rotation(cls: type[nn.Module]) -> Forward | None:
    """The function that the forward of a class calls by that name."""
    function: Any = inspect.unwrap(cls.forward)
    if not isinstance(function, FunctionType) or ROTATE not in function.__code__.co_names:
        return None
    found: Any = function.__globals__.get(ROTATE)
    if not callable(found) or list(inspect.signature(found).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    plain: Forward = found
    return plain


def _takes(module: nn.Module, number: int) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == number + 1


# -- the fused forwards -----------------------------------------------------------------------------------------------


def fused_norm(module: nn.Module, kernels: Kernels, formula: Formula) -> Forward:
    """The forward of an RMSNorm; the weight is looked up at each call."""
    eps, (offset, casting) = _eps(module), formula
    assert eps is not None

    def forward(hidden: Tensor) -> Tensor:
        weight: Any = module.weight
        if casting == "llama":  # which multiplies by the weight last, so that the wider of both decides
            hidden = hidden.to(torch.promote_types(hidden.dtype, weight.dtype))
        return kernels.rms_norm(hidden, weight, eps, offset, casting)

    return forward


def fused_gate(module: nn.Module, kernels: Kernels) -> Forward:
    """The forward of a gated MLP; its projections are called as they are (adapted, quantised, ...)."""
    mlp: Any = module
    if projections(module) == ("gate_up_proj",):
        return lambda hidden: mlp.down_proj(kernels.silu_mul(*mlp.gate_up_proj(hidden).chunk(2, dim=-1)))
    return lambda hidden: mlp.down_proj(kernels.silu_mul(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def fused_rotation(module: nn.Module, kernels: Kernels) -> Forward:
    """The forward of an attention module, with the kernel in place of the function it calls."""
    return with_rotation(module, rotated_by(kernels))


def rotated_by(kernels: Kernels) -> Forward:
    """The kernel, called as transformers' function is."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1:
            raise UserError("queries and keys are not of shape (rows, heads, tokens, width)")
        return kernels.rope(q, k, cos, sin)

    return rotated


def with_rotation(module: nn.Module, rotation: Forward) -> Forward:
    """The forward of a module's class, bound to the module, in which `apply_rotary_pos_emb` means `rotation`."""
    forward: Any = type(module).forward
    copied = _with_global(forward, ROTATE, rotation)
    if copied is None:
        raise UserError(f"fused_kernels.rope: {type(module).__name__}'s forward cannot be copied; set rope: false")
    return MethodType(copied, module)


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType | None:
    """A copy of a function to which a global name means something else; what wraps it is copied as well."""
    cells, globals = function.__closure__, function.__globals__
    inner: Any = getattr(function, "__wrapped__", None)
    if inner is None:
        globals = {**globals, name: value}
    else:
        copied = _with_global(inner, name, value)
        held = [cell.cell_contents is inner for cell in cells or ()]
        if copied is None or not any(held):
            return None
        cells = tuple(CellType(copied) if is_it else cell for is_it, cell in zip(held, cells or (), strict=True))
    made = FunctionType(function.__code__, globals, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
