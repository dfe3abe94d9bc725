"""Liger's functions in plain torch: the same arguments, the same tensors kept, written over and returned.

Work happens where a recording of allocations does not look, so that what is recorded is what the real kernels allocate.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem import FusedKernels
from lowmem.ops import fused


def wide(tensor: Tensor) -> Tensor:
    """In the precision of a kernel's registers."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def normed(hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    inner = hidden.float()  # once, as transformers does: gradients are then the same to the last bit
    inner = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return inner.to(hidden.dtype) * (weight + offset)
    return (inner * (weight.float() + offset)).to(hidden.dtype)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool
    ) -> Tensor:
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        output, roots = torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)
        with _disable_current_modes():
            output.copy_(normed(rows, weight, eps, offset, casting))
        ctx.save_for_backward(rows, weight, roots)
        ctx.rest = eps, offset, casting, in_place
        return output.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        eps, offset, casting, in_place = ctx.rest
        grad = grad.contiguous()
        wants = ctx.needs_input_grad[1]
        sums = weight.new_empty(1, len(weight), dtype=torch.float32) if wants else None
        inputs = grad if in_place else torch.zeros_like(grad)
        with _disable_current_modes(), torch.enable_grad():
            leaves = [rows.detach().requires_grad_(), weight.detach().requires_grad_()]
            plain = normed(*leaves, eps, offset, casting)
            found = torch.autograd.grad(plain, leaves, grad.view(rows.shape).to(plain.dtype).clone())
            inputs.copy_(found[0].view(inputs.shape))
        if sums is None:
            return inputs, None, None, None, None, None
        weights = sums.sum(0).to(weight.dtype)
        with _disable_current_modes():
            weights.copy_(found[1])
        return inputs, weights, None, None, None, None


class SiLUMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        output = torch.empty_like(gate)
        with _disable_current_modes():
            output.copy_(F.silu(wide(gate)).to(up.dtype) * up)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        with _disable_current_modes():
            sigmoid, silu = torch.sigmoid(wide(gate)), F.silu(wide(gate))
            of_gate = wide(grad) * (silu * (1 - sigmoid) + sigmoid) * wide(up)
            up.data.copy_(wide(grad) * silu)
            gate.data.copy_(of_gate)
        return gate.view(grad.shape), up.view(grad.shape)


class RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        with _disable_current_modes():
            rotate(query.data, cos, sin)
            rotate(key.data, cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        cos, sin = ctx.saved_tensors
        with _disable_current_modes():
            rotate(query.data, cos, -sin)
            rotate(key.data, cos, -sin)
        return query.transpose(1, 2), key.transpose(1, 2), None, None


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place; heads: (rows, tokens, heads, width). Only the left half of cos and sin is read."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
    left, right = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half] = left * cos - right * sin
    heads[..., half : 2 * half] = right * cos + left * sin


def stand_in() -> fused.Kernels:
    return fused._applied(RMSNorm, SiLUMul, RoPE)


def fused_kernels(**fields: Any) -> FusedKernels:
    """The strategy with the stand-in, on any device."""
    strategy = FusedKernels(**fields)
    strategy._given = stand_in()
    return strategy


def package(name: str, norm: Any = RMSNorm, silu_mul: Any = SiLUMul, rope: Any = RoPE) -> dict[str, ModuleType]:
    """Modules as liger_kernel.ops, or its copy on the hub, holds them: name -> module, for `sys.modules`."""
    parts = {"rms_norm": ("LigerRMSNormFunction", norm), "swiglu": ("LigerSiLUMulFunction", silu_mul)}
    parts["rope"] = ("LigerRopeFunction", rope)
    modules = {name: ModuleType(name)}
    for part, (attribute, function) in parts.items():
        modules[f"{name}.{part}"] = ModuleType(f"{name}.{part}")
        setattr(modules[f"{name}.{part}"], attribute, function)
    return modules
