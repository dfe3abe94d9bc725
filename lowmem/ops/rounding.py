"""Rounding float32 to bfloat16 up or down at random, so that small updates survive on average."""

from __future__ import annotations

import torch
from torch import Tensor


def stochastic_round(values: Tensor) -> Tensor:
    """bfloat16 neighbours of float32 values, the nearer one with the greater probability.

    The expectation of the result is the value (Croci et al. 2022, doi:10.1098/rsos.211631). bfloat16 is the upper half
    of float32, so a random number below 2^16 is added to the lower half before it is cut off.

    Args:
        values: float32, any shape. Infinities stay; random numbers come from torch's generator of the device.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 0, 1 << 16)
    return noise.add_(bits).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)
