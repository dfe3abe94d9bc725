"""The model, adapter and optimizer of a row of peft's comparison, on the meta device.

Everything follows from the fields of the row; a row that cannot be built raises `UnbuiltError` with its reason.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

Row = dict[str, Any]

LAYERS = 28  # of Llama-3.2-3B, the base model of all rows
SHAPE: dict[str, Any] = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class UnbuiltError(Exception):
    """A row cannot be built with the installed libraries; the text says why."""


def base_model(row: Row, layers: int = LAYERS) -> nn.Module:
    """Llama-3.2-3B without data, in the dtype of the row."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    dtype = _DTYPES.get(row["dtype"])
    if dtype is None:
        raise UnbuiltError(f"base weights in {row['dtype']} are not replayed; known are {', '.join(_DTYPES)}")
    config = LlamaConfig(num_hidden_layers=layers, **SHAPE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    assert isinstance(model, nn.Module)
    return model


def with_adapter(model: nn.Module, row: Row, layers: int = LAYERS, on_host: bool = True) -> nn.Module:
    """The base model with the adapter of the row; without one, for full fine-tuning, the base model.

    Args:
        model: of `base_model`.
        row: the row.
        layers: of the model.
        on_host: the adapter is first made on the host, as peft does it, then moved to where the base model is. A method
            that computes its start from the base weights cannot mix the two and is made on the meta device.

    Raises:
        UnbuiltError: the installed peft cannot make it, or needs data.
    """
    from peft import get_peft_model

    if not row["peft_config"]:
        return model
    config = adapter_config(row, layers)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter that moves stays the same object
    try:
        with nullcontext() if on_host else torch.device("meta"):
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=row["autocast_adapter_dtype"])
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise UnbuiltError(f"its adapter cannot be made without data: {_line(error)}") from None
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    _onto_the_device(wrapped)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def adapter_config(row: Row, layers: int = LAYERS) -> Any:
    """The row's adapter config, for a model of that many layers.

    The rows leave out every field that is null, false or 0, so a field that is absent is not at its default.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    given = dict(row["peft_config"])
    kind = given.pop("peft_type")
    known = {str(getattr(name, "value", name)): cls for name, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in known:
        raise UnbuiltError(f"the installed peft has no method {kind}")
    fields = {field.name: field for field in dataclasses.fields(known[kind])}
    if unknown := sorted(set(given) - set(fields)):
        raise UnbuiltError(f"the installed peft's {kind} has no setting {', '.join(unknown)}")
    for name, value in (("num_layers", layers), ("adapter_layers", layers)):
        if given.get(name):
            given[name] = min(given[name], value)
    if isinstance(given.get("layers_to_transform"), list):
        given["layers_to_transform"] = [number for number in given["layers_to_transform"] if number < layers] or [0]
    given.setdefault("task_type", "CAUSAL_LM")
    absent = {name: _nothing(field.default) for name, field in fields.items() if name not in given and _drops(field)}
    reason: Exception | None = None
    for left_out in (absent, {}):  # where 0 is no value, the field was left out for another reason
        try:
            return known[kind](**left_out, **given)
        except (TypeError, ValueError) as error:
            reason = error
    raise UnbuiltError(f"its adapter config is refused: {_line(reason)}")


def make_optimizer(model: nn.Module, row: Row) -> torch.optim.Optimizer:
    """The row's optimizer, by torch's name or one of peft's three."""
    name, settings = row["optimizer"], dict(row["optimizer_kwargs"])
    if hasattr(torch.optim, name):
        made = getattr(torch.optim, name)(model.parameters(), **settings)
    else:
        import peft.optimizers

        functions = {"lora+": "loraplus", "lora-fa": "lorafa", "riemannian": "riemannian"}
        function = getattr(peft.optimizers, f"create_{functions.get(name, name)}_optimizer", None)
        if function is None:
            raise UnbuiltError(f"neither torch nor the installed peft has an optimizer {name}")
        if name != "lora-fa":
            settings["optimizer_cls"] = torch.optim.AdamW
        made = function(model, **settings)
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _drops(field: dataclasses.Field[Any]) -> bool:
    return isinstance(field.default, bool | int | float) and bool(field.default)


def _nothing(default: Any) -> Any:
    return type(default)(0)


def _onto_the_device(model: nn.Module) -> None:
    """Parameters that peft left on the host go where the base model is, as every trained tensor does on a card."""
    for parameter in list(model.parameters()):
        if not parameter.is_meta:
            there = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]


def _line(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
