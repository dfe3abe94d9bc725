"""The proof that fused kernels compute what a model's modules compute, before any takes their place.

On small tensors, forward and backward, in the module's dtype and in float32. Nothing of the run changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.model import call, unwrapped
from lowmem.ops.fused import Kernels
from lowmem.ops.fused_modules import (
    OFFSETS,
    Formula,
    Forward,
    fused_gate,
    fused_norm,
    fused_rotation,
    projections,
    rotated_by,
    rotation,
    with_rotation,
)

_TOKENS = 16
# Two ways of rounding, seen over a whole tensor, differ by less; a kernel that is wrong by 1 % differs by more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 8e-3}
_LOOSE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}  # through a softmax, which amplifies


def prove_norm(module: nn.Module, kernels: Kernels, device: torch.device) -> Formula:
    """Which formula an RMSNorm follows, read off random weights.

    Raises:
        UserError: none.
    """
    weight: Any = module.weight
    inputs = _random((2, _TOKENS, len(weight)), (len(weight),), device=device)

    def of(forward: Callable[[nn.Module], Forward]) -> Forward:
        def normed(hidden: Tensor, scale: Tensor) -> Tensor:
            probe = copy.copy(module)
            probe._parameters = {"weight": scale}  # type: ignore[dict-item]
            found: Tensor = forward(probe)(hidden)
            return found

        return normed

    def error(formula: Formula) -> float:
        fused = of(lambda probe: fused_norm(probe, kernels, formula))
        return _worst("rms_norm", module, of(_plain), fused, inputs, weight.dtype)

    with torch.no_grad():  # who multiplies by the weight after going back to the input's dtype returns the wider one
        last = of(_plain)(inputs[0].half(), inputs[1]).dtype is torch.float32
    formulas = [(offset, "llama" if last else "gemma") for offset in OFFSETS]
    found = {formula: error(formula) for formula in formulas}
    best = min(found, key=lambda formula: found[formula])
    _require("rms_norm", module, found[best])
    return best


def prove_gate(module: nn.Module, kernels: Kernels, device: torch.device) -> None:
    """Raise UserError where a gated MLP does more to its gate and up than silu(gate) * up."""
    names = projections(module)
    widths = [int(getattr(module.get_submodule(name), "out_features", 64)) for name in names]
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    inputs = _random(*((2, _TOKENS, width) for width in widths), device=device)

    def of(forward: Callable[[nn.Module], Forward]) -> Forward:
        def multiplied(*given: Tensor) -> Tensor:
            probe = copy.copy(module)
            stubs: dict[str, nn.Module | None] = {n: _Gives(t) for n, t in zip(names, given, strict=True)}
            probe._modules = {**module._modules, **stubs, "down_proj": nn.Identity()}
            found: Tensor = forward(probe)(given[0])
            return found

        return multiplied

    fused = of(lambda probe: fused_gate(probe, kernels))
    _require("swiglu", module, _worst("swiglu", module, of(_plain), fused, inputs, dtype))


class _Gives(nn.Module):
    """Returns one tensor, whatever it is given."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return self.tensor


def prove_rotation(model: nn.Module, modules: Sequence[nn.Module], kernels: Kernels, device: torch.device) -> None:
    """Raise UserError where the kernel does not rotate as the function that the modules call.

    The model runs on a few tokens until each module has called it. The function is compared on what it was given then,
    and the whole module as well, as the kernel writes over its inputs (not where weights have yet to come to the
    device).
    """
    for module, (arguments, options, given) in zip(modules, _calls(model, modules), strict=True):
        query, key, cos, sin = (tensor.to(device) for tensor in given)
        plain, fused = _rotation_of(module), rotated_by(kernels)

        def of(function: Forward, cos: Tensor = cos, sin: Tensor = sin) -> Forward:
            return lambda q, k: function(q, k, cos.to(q.dtype), sin.to(q.dtype))

        _require("rope", module, _worst("rope", module, of(plain), of(fused), [query, key], query.dtype))
        if any(p.device != query.device for p in module.parameters()):
            continue
        hidden, rest = (arguments[0], arguments[1:]) if arguments else (options.pop("hidden_states"), ())

        def attend(forward: Forward, rest: Any = rest, options: Any = options) -> Forward:
            return lambda states: forward(states, *rest, **options)[0]

        whole = attend(fused_rotation(module, kernels))
        error = _difference("rope", module, attend(_plain(module)), whole, [hidden])
        _require("rope", module, error / _LOOSE.get(hidden.dtype, 1e-3))


class _SeenAllError(Exception):
    """Every module has called its function."""


Call = tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]


def _calls(model: nn.Module, modules: Sequence[nn.Module]) -> list[Call]:
    """What each module was called with, and what it called its function with: q, k, cos, sin."""
    seen: dict[nn.Module, Call] = {}

    def spied(module: nn.Module) -> Forward:
        def called(*arguments: Any, **options: Any) -> Any:
            def rotate(*given: Any, **more: Any) -> Any:
                if more or len(given) != 4:
                    raise UserError(f"fused_kernels.rope: {_name(module)} rotates in its own way; set rope: false")
                seen[module] = (arguments, options, [t.detach().clone() for t in given])
                if len(seen) == len(modules):
                    raise _SeenAllError
                return _rotation_of(module)(*given)

            return with_rotation(module, rotate)(*arguments, **options)

        return called

    embedding: Any = unwrapped(model).get_input_embeddings()  # type: ignore[operator]
    ids = torch.randint(len(embedding.weight), (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    training = model.training
    model.eval()
    for module in modules:
        module.forward = spied(module)
    try:
        with torch.no_grad():
            call(model, {"input_ids": ids.to(embedding.weight.device)})
    except _SeenAllError:
        pass
    finally:
        for module in modules:
            del module.forward
        model.train(training)
    for module in modules:
        if module not in seen:
            raise UserError(f"fused_kernels.rope: {_name(module)} was not called on a few tokens; set rope: false")
    return [seen[module] for module in modules]


def _rotation_of(module: nn.Module) -> Forward:
    found = rotation(type(module))
    assert found is not None
    return found


def _plain(module: nn.Module) -> Forward:
    return MethodType(type(module).forward, module)


# -- comparison -------------------------------------------------------------------------------------------------------


def _random(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(device) for shape in shapes]


def _worst(
    part: str, module: nn.Module, plain: Forward, fused: Forward, inputs: Sequence[Tensor], dtype: torch.dtype
) -> float:
    """The largest difference in the module's dtype and in float32, in units of what is tolerated."""
    return max(
        _difference(part, module, plain, fused, [t.to(kind) for t in inputs]) / _TOLERANCE.get(kind, 1e-4)
        for kind in {dtype, torch.float32}
    )


def _difference(part: str, module: nn.Module, plain: Forward, fused: Forward, inputs: Sequence[Tensor]) -> float:
    """The largest relative difference (in the Euclidean norm) among outputs and gradients of two functions."""
    expected = _outcome(plain, inputs)
    try:
        found = _outcome(fused, inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler fails in many ways
        raise UserError(
            f"fused_kernels.{part}: {_name(module)} cannot use the kernel in {str(inputs[0].dtype).split('.')[-1]} "
            f"({type(error).__name__}: {_first_line(error)}); set {part}: false"
        ) from error
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in found]:
        return float("inf")
    errors = [float((b.double() - a.double()).norm() / a.double().norm()) for a, b in zip(expected, found, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("inf")


@torch.enable_grad()
def _outcome(function: Forward, inputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.autocast(inputs[0].device.type, enabled=False):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        outputs = function(*(leaf.clone() for leaf in leaves))  # copies, as a kernel may write over them
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        kept = [t.detach().clone() for t in outputs]
        draw = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=draw).to(t) for t in outputs]
        # a kernel may return a tensor that it saved, as the gradient
        return [*kept, *(g.detach() for g in torch.autograd.grad(outputs, leaves, grads))]


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _require(part: str, module: nn.Module, error: float) -> None:
    """`error`: in units of what is tolerated."""
    if not error <= 1:
        raise UserError(
            f"fused_kernels.{part}: {_name(module)} gives other numbers with the kernel than without it "
            f"({error:.3g} times what rounding explains); set {part}: false"
        )
