"""Knowledge of peft's methods: what each needs of a run, and which cannot be had here."""

from __future__ import annotations

import copy
import re
import typing
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.schema import nearest

# Whose training is more than gradients on a loss of tokens.
REFUSED = {
    "CPT": "it has a loss of its own, which weighs the tokens of its context",
    "MULTITASK_PROMPT_TUNING": "it wants the number of a task with every row",
    "POLY": "it wants the number of a task with every row",
    "SHADOW": "it has a second loss of its own, on a second small model",
    "XLORA": "it mixes adapters that were trained before; train those with lora, and mix them with peft",
}
_CHANGES_BASE = "it changes the base weights, which the saved adapter would then not fit"
_NEEDS_LOSS = "it adds a loss of its own, which would be left out"
_NEEDS_DATA = "it needs passes over data before training"
# setting -> value (None: any but null and false) -> reason
_REFUSED_SETTINGS: dict[str, dict[str, dict[str | None, str]]] = {
    "LORA": {
        "init_lora_weights": {
            **dict.fromkeys(("pissa", "olora", "loftq", "corda"), _CHANGES_BASE),
            **dict.fromkeys(("eva", "lora_ga"), _NEEDS_DATA),
        },
        "kasa_config": {None: _CHANGES_BASE},
        "monteclora_config": {None: _NEEDS_LOSS},
        "arrow_config": {None: "it routes between adapters that were trained before"},
        "use_qalora": {None: "it wants a base quantised by GPTQ"},
    },
    "ADAMSS": {"use_asa": {None: "what it remembers of past steps would be lost in a checkpoint"}},
    "PVERA": {"generator_seed": {None: "its random numbers would begin anew when a run is resumed; set training.seed"}},
}
_SET_BY_LOWMEM = (
    *("peft_type", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision"),
    "peft_version",
)
# Settings that tell layers apart, or count them; others do where a name holds a layer's number.
_OF_LAYERS = ("layers_to_transform", "layer_replication", "adapter_layers", "num_layers")
_LAYER_NUMBER = re.compile(r"(?<![A-Za-z_])\d|\\d")
# Tokens in front of the row: peft drops the positions that a packed row carries.
MOVES_POSITIONS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE")
# Keys and values that a layer takes out of a cache: there is none when it is run again.
IN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")

# They keep tables in float32, which their 16-bit weights would meet.
FLOAT32_TABLES = ("DELORA", "OSF", "PVERA", "TINYLORA", "UNILORA", "VERA")
# Trained weights that stand in the model's own path, where nothing casts.
IN_PATH = ("ADAPTION_PROMPT", "LN_TUNING")
# The others compute with the base's weights as they lie, which gives an error or another function (a test tries all).
_ON_BITSANDBYTES = (
    *("ADALORA", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "CARTRIDGE", "FOURIERFT", "GRALORA", "IA3", "LILY"),
    *("LN_TUNING", "LORA", "MISS", "OFT", "PREFIX_TUNING", "PROMPT_TUNING", "PVERA", "P_TUNING", "RANDLORA", "ROAD"),
    *("SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT"),
)
ON_QUANTISED = {"4bit": _ON_BITSANDBYTES, "8bit": (*_ON_BITSANDBYTES, "LOHA", "LOKR")}

# Whose layers can be merged one by one: all of a layer is in its own part of the file.
MERGED_BY_LAYER = (
    *("BOFT", "C3A", "DEFT", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR"),
    *("LORA", "MISS", "PEANUT", "ROAD", "TRAINABLE_TOKENS", "VBLORA", "WAVEFT"),
)


def method_names() -> list[str]:
    """Every method of the installed peft, by its name there."""
    import_bitsandbytes()  # before peft does
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return sorted(str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING)


def config_class(method: str) -> type[Any]:
    """peft's configuration class of a method.

    Raises:
        UserError: there is no such method, or it cannot be trained here.
    """
    names = method_names()
    if method not in names:
        near = nearest(method, names)
        hint = f"did you mean {near}?" if near else f"peft has {', '.join(names)}"
        raise UserError(f"adapter.peft_type: peft has no method {method}; {hint}")
    if method in REFUSED:
        raise UserError(f"adapter.peft_type: {method} cannot be trained here: {REFUSED[method]}")
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    found: type[Any] = next(cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind.value == method)
    return found


def require_settings(method: str, settings: Mapping[str, Any]) -> None:
    """Every setting is one that peft's class has, and one that is honoured here.

    Raises:
        UserError: which is not, and what was meant.
    """
    cls = config_class(method)
    known = [f.name for f in fields(cls) if f.init and f.name not in _SET_BY_LOWMEM]
    for name, value in settings.items():
        if name in _SET_BY_LOWMEM:
            raise UserError(f"adapter.config.{name}: is set by lowmem; leave it out")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
            raise UserError(f"adapter.config: {method} has no setting {name}; {hint}")
        for bad, reason in _REFUSED_SETTINGS.get(method, {}).get(name, {}).items():
            if (bad is None and value) or (bad and str(value).lower().startswith(bad)):
                raise UserError(f"adapter.config.{name}: {value} cannot be had here: {reason}")


def make_config(method: str, settings: Mapping[str, Any], causal: bool = True) -> Any:
    """peft's configuration.

    Args:
        method: peft's name.
        settings: the fields of its class; a mapping becomes a dataclass where peft wants one.
        causal: a model that generates.

    Raises:
        UserError: what peft says against it.
    """
    cls = config_class(method)
    hints = typing.get_type_hints(cls)
    values = {name: _nested(hints.get(name), copy.deepcopy(value)) for name, value in settings.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls(task_type="CAUSAL_LM" if causal else None, **values)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"adapter.config: {method}: {' '.join(str(error).split())}") from error
    except ImportError as error:
        raise UserError(f"adapter.peft_type: {method}: {' '.join(str(error).split())}") from error


def _nested(hint: Any, value: Any) -> Any:
    for member in (hint, *typing.get_args(hint)):
        if isinstance(value, dict) and is_dataclass(member) and isinstance(member, type):
            return member(**value)
    return value


def require_quantised(method: str, model: nn.Module) -> None:
    """A method that computes with the base's weights does so on quantised ones, too.

    Raises:
        UserError: it does not.
    """
    kind = quantised_format(model)
    if kind and method not in ON_QUANTISED[kind]:
        raise UserError(
            f"adapter.peft_type: {method} cannot be trained on {kind} weights; drop quantization, or take one of "
            f"{', '.join(ON_QUANTISED[kind])}"
        )


def quantised_format(model: nn.Module) -> str | None:
    """`4bit` or `8bit` where bitsandbytes holds weights of the model, else null."""
    for parameter in model.parameters():
        if getattr(parameter, "quant_state", None) is not None:
            return "4bit"
        if type(parameter).__name__ == "Int8Params":
            return "8bit"
    return None


def bring_home(model: nn.Module, device: Any) -> None:
    """Move what an adapter has made elsewhere to the device, tensors that several modules share once.

    peft makes some shared tensors and tables on the CPU and leaves them there.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == device.type:
                    continue
                if id(tensor) not in moved:
                    new = tensor.data.to(device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = (tensor, new)
                held[name] = moved[id(tensor)][1]  # type: ignore[assignment]


def names_layers(settings: Mapping[str, Any]) -> bool:
    """Whether some layers are adapted and others not, or otherwise.

    A number that ends a word (`w1`, `fc2`) is no layer's.
    """
    if any(settings.get(key) is not None for key in _OF_LAYERS):
        return True
    names = (value for key, value in settings.items() if key.endswith(("_modules", "_pattern")))
    texts = (text for value in names if value for text in ([value] if isinstance(value, str) else value))
    return any(_LAYER_NUMBER.search(text) for text in texts)
