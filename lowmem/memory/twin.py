"""Models like others: one in memory as it is on the meta device, and configurations of another depth."""

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


def with_layers(config: Any, layers: int) -> Any:
    """The configuration with fewer (or more) layers; lists with one entry per layer are cut or continued."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = int(text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, [value[i % before] for i in range(layers)])
    text.num_hidden_layers = layers
    return config


def pattern_of(text: Any) -> int | None:
    """After how many layers the kinds repeat, by the configuration's lists with one entry per layer."""
    layers = int(text.num_hidden_layers)
    lists = [v for v in vars(text).values() if isinstance(v, list) and len(v) == layers]
    for period in range(1, layers):
        if all(v[i] == v[i % period] for v in lists for i in range(layers)):
            return period
    return None
