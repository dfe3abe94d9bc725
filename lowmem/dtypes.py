"""The number formats of training: bytes, bits, range and resolution (`lowmem dtypes`, docs/dtypes.md)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

# Second-largest levels of the 4-bit code books, whose largest is 1.0. NF4: appendix E of QLoRA (arXiv:2305.14314);
# FP4 (E2M1): 8/12. tests/test_dtypes.py holds both against bitsandbytes.
_NEXT_TO_ONE = {"nf4": 0.7229568362236023, "fp4": 2 / 3}


@dataclass(frozen=True)
class DTypeInfo:
    """One number format.

    Attributes:
        name: as recipes and torch call it.
        bytes_per_value: bytes of one stored value; constants of quantized formats come on top (see `note`).
        exponent_bits: bits of the exponent; None where the values are not of that form.
        mantissa_bits: stored bits after the leading one; None where the values are not of that form.
        largest: largest finite value; of a quantized format in units of its scale.
        step_at_one: distance from 1.0 to the next larger value (4-bit formats end at 1.0: to the next smaller one).
        note: what the numbers leave out.
    """

    name: str
    bytes_per_value: float
    exponent_bits: int | None
    mantissa_bits: int | None
    largest: float
    step_at_one: float
    note: str = ""

    def as_dict(self) -> dict[str, str | float | int | None]:
        """The fields under their names."""
        return asdict(self)


def table() -> list[DTypeInfo]:
    """All rows, widest first; floating-point figures come from `torch.finfo`."""
    return [
        _float("float64"),
        _float("float32", "the reference; 1 sign, 8 exponent and 23 mantissa bits"),
        _tf32(),
        _float("bfloat16", "range of float32, 3 significant digits at most: no loss scaling needed"),
        _float("float16", "small range: gradients below 6e-8 become zero, so the loss is scaled"),
        _float("float8_e4m3fn", "needs a scale per tensor or block; no infinity"),
        _float("float8_e5m2", "needs a scale per tensor or block"),
        _int8(),
        _four_bit("nf4", None, None, "16 levels at quantiles of a normal distribution"),
        _four_bit("fp4", 2, 1, "E2M1 divided by 12"),
    ]


def markdown() -> str:
    """The table of docs/dtypes.md."""
    head = "| dtype | bytes per value | exponent bits | mantissa bits | largest value | step at 1.0 | note |"
    rows = [
        f"| {row.name} | {row.bytes_per_value:g} | {_bits(row.exponent_bits)} | {_bits(row.mantissa_bits)} "
        f"| {row.largest:.6g} | {row.step_at_one:.6g} | {row.note} |"
        for row in table()
    ]
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|---|", *rows])


def _bits(count: int | None) -> str:
    return "-" if count is None else str(count)


def _float(name: str, note: str = "") -> DTypeInfo:
    import torch

    info = torch.finfo(getattr(torch, name))
    mantissa = -round(math.log2(info.eps))  # eps is 2^-mantissa
    return DTypeInfo(name, info.bits / 8, info.bits - 1 - mantissa, mantissa, info.max, info.eps, note)


def _tf32() -> DTypeInfo:
    # not a torch dtype: tensor cores read float32 and keep 8 exponent and 10 mantissa bits of it (NVIDIA, "Accelerating
    # AI Training with NVIDIA TF32 Tensor Cores"; mantissa of float16, exponent of float32)
    wide, narrow = _float("float32"), _float("float16")
    step = narrow.step_at_one
    largest = 2.0 ** math.floor(math.log2(wide.largest)) * (2 - step)
    note = "compute only: stored as float32, rounded inside matrix products on NVIDIA cards since Ampere"
    return DTypeInfo("tf32", wide.bytes_per_value, wide.exponent_bits, narrow.mantissa_bits, largest, step, note)


def _int8() -> DTypeInfo:
    import torch

    info = torch.iinfo(torch.int8)
    note = "times a scale: one float32 per row of a weight on top"
    return DTypeInfo("int8", info.bits / 8, None, None, float(info.max), 1.0, note)


def _four_bit(name: str, exponent: int | None, mantissa: int | None, what: str) -> DTypeInfo:
    # per block of 64 values one scale: float32, or one byte with double quantization, whose own scale is a float32
    # per 256 blocks (QLoRA, arXiv:2305.14314, section 3)
    single, double = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)
    note = f"{what}, times the block's scale; {single:.4f} bytes with its scales, {double:.4f} with double quantization"
    return DTypeInfo(name, 0.5, exponent, mantissa, 1.0, 1.0 - _NEXT_TO_ONE[name], note)
