"""A model in memory as it is on the meta device: the same modules, no data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lowmem.memory.meter import _quant_state


def without_data(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device. Quantised weights (bitsandbytes) keep their scales there, too."""
    parameters = list(module.parameters())
    memo: dict[int, Any] = {id(t): t.to("meta") for t in module.buffers()}
    for parameter in parameters:
        memo |= {id(t): t.to("meta") for t in _quant_state(parameter)}
        data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    for parameter in parameters:  # what a class of parameters keeps beside its values
        vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
    return copy.deepcopy(module, memo)
