"""The textbook's rule of thumb for the memory of fine-tuning: 4N and the activations, counted from real tensors.

    weights      bytes of all unique parameters (tied ones once; quantized ones as stored, with their constants)
    gradients    bytes of the trainable parameters
    optimizer    2 x gradients (Adam keeps two averages of each value, in the dtype of the weight)
    activations  batch x length x hidden size x layers x bytes per element

The first three are exact for a run that is as the rule says (gradients and moments in the dtype of the weights, no
copies beside them). The fourth is one hidden-size tensor per layer, which is what gradient checkpointing of every
layer keeps: without it a Llama layer saves some twenty times as much. Logits, temporaries, the CUDA context and
fragmentation are in none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError

GB = 1024**3
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class MemoryEstimate:
    """What the rule of thumb says, in bytes. `float(estimate)` is the total in GB (1024^3 bytes).

    Attributes:
        parameter_bytes: all unique weights as stored, quantization constants included.
        gradient_bytes: one gradient for each trainable weight, in its dtype.
        optimizer_bytes: two Adam moments for each trainable weight, in its dtype.
        activation_bytes: batch x length x hidden size x layers x bytes per element.
        parameters: number of weights; a 4-bit weight counts as one although two share a byte.
        trainable_parameters: those of them that require a gradient.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    parameters: int
    trainable_parameters: int

    @property
    def total_bytes(self) -> int:
        """Sum of the four, in bytes."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def __float__(self) -> float:
        return self.total_bytes / GB

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The printed table: one line per part, in GB (1024^3 bytes) and in bytes."""
        rows = {
            "model": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activation": self.activation_bytes,
            "total": self.total_bytes,
        }
        head = f"{self.parameters:,} parameters, {self.trainable_parameters:,} trainable (GB = 1024^3 bytes)"
        return "\n".join([head, *(f"{name:<10}{size / GB:>10.2f} GB{size:>24,} bytes" for name, size in rows.items())])

    def as_dict(self) -> dict[str, int]:
        """The numbers under their names, `total_bytes` among them."""
        return {**vars(self), "total_bytes": self.total_bytes}


def estimate_memory_usage(
    model: Any, max_sequence_length: int = 1024, batch_size: int = 1, *, print_table: bool = True
) -> MemoryEstimate:
    """Estimate the memory of a training step by the rule of thumb (see the module's text for what it leaves out).

    Args:
        model: an `nn.Module` with a `config` (a transformers model, also quantized or with adapters), or a
            transformers config, which is built without weights; its `dtype` counts, float32 where it has none.
        max_sequence_length: tokens per row.
        batch_size: rows per forward pass (of a micro-batch, where the batch is split).
        print_table: print the table.

    Returns:
        The parts in bytes.

    Raises:
        UserError: the hidden size or the number of layers cannot be found, or a config cannot be built.
    """
    for name, value in (("max_sequence_length", max_sequence_length), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"estimate_memory_usage: {name} must be 1 or more; got {value}")
    module = model if isinstance(model, nn.Module) else _build(model)
    hidden, layers = _shape(module)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trainable)
    estimate = MemoryEstimate(
        parameter_bytes=stored_bytes(module),
        gradient_bytes=gradients,
        optimizer_bytes=2 * gradients,
        activation_bytes=batch_size * max_sequence_length * hidden * layers * activation_dtype(module).itemsize,
        parameters=sum(logical_size(parameter) for parameter in module.parameters()),
        trainable_parameters=sum(logical_size(parameter) for parameter in trainable),
    )
    if print_table:
        print(estimate)
    return estimate


def logical_size(parameter: Tensor) -> int:
    """Number of weights in a parameter: its `numel()`, except that a packed 4-bit one holds two per byte."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else parameter.numel()


def stored_bytes(module: nn.Module) -> int:
    """Bytes of all unique parameters and of the constants of quantized ones (buffers, such as RoPE's, are left out)."""
    parameters = list(module.parameters())
    seen = {_storage(parameter) for parameter in parameters}
    size = sum(parameter.nbytes for parameter in parameters)
    for part in module.modules():
        for constant in _constants(part):
            if _storage(constant) not in seen:
                seen.add(_storage(constant))
                size += constant.nbytes
    return size


def activation_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the hidden states: that of the first floating-point parameter, which is the embedding."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    for parameter in module.parameters():
        dtype = getattr(getattr(parameter, "quant_state", None), "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32


def _constants(part: nn.Module) -> Iterator[Tensor]:
    """The tensors bitsandbytes keeps beside the weights of one module.

    4-bit: scales, code book and, with double quantization, those of the scales (`quant_state`). 8-bit: one scale per
    output row, on the parameter (`SCB`) until the first forward pass and then on the module's `state`.
    """
    holders: list[Any] = [getattr(part, "state", None)]
    for parameter in part.parameters(recurse=False):
        state = getattr(parameter, "quant_state", None)
        holders += [parameter, state, getattr(state, "state2", None)]
    for holder in holders:
        for name in ("absmax", "code", "offset", "CB", "SCB"):
            constant = getattr(holder, name, None)
            if isinstance(constant, Tensor):
                yield constant


def _storage(tensor: Tensor) -> int:
    # the address of the storage object, not of its data: on the meta device there is no data to point at
    return int(tensor.untyped_storage()._cdata)


def _shape(module: nn.Module) -> tuple[int, int]:
    """Hidden size and number of layers from the module's config."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    hidden, layers = (_first(config, names) for names in (_HIDDEN, _LAYERS))
    missing = [name for name, value in (("hidden size", hidden), ("number of layers", layers)) if value is None]
    if hidden is None or layers is None:
        raise UserError(
            f"estimate_memory_usage: no {' and no '.join(missing)} in the config of {type(module).__name__}; "
            f"give it a `config` with {_HIDDEN[0]} and {_LAYERS[0]}, or pass a transformers model or config"
        )
    return hidden, layers


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _build(config: Any) -> nn.Module:
    """The model of a transformers config on the meta device: shapes and dtypes without weights."""
    if not hasattr(config, "model_type") or not hasattr(config, "to_dict"):
        raise UserError(
            f"estimate_memory_usage: expected a model or a transformers config, got {type(config).__name__}"
            + ("; load it with AutoConfig.from_pretrained" if isinstance(config, str) else "")
        )
    if getattr(config, "quantization_config", None):
        raise UserError(
            "estimate_memory_usage: this config describes quantized weights, whose bytes only the loaded model shows; "
            "pass the model"
        )
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # building writes into the config it is given
    dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except ValueError as error:
        raise UserError(
            f"estimate_memory_usage: no causal language model can be built from {type(config).__name__}; "
            f"pass the model itself ({str(error).splitlines()[0]})"
        ) from error
    assert isinstance(model, nn.Module)
    return model
