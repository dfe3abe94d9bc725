"""All knowledge of how a Hugging Face model is loaded and laid out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lowmem.config import LoadConfig, ModelConfig
from lowmem.errors import UserError

# what a tokenizer leaves in a folder
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")

# -- loading ----------------------------------------------------------------------------------------------------------


def load_model(load: LoadConfig) -> nn.Module:
    """The model a `LoadConfig` describes, on its device.

    Raises:
        UserError: it is neither a folder, nor a GGUF file, nor to be had from the hub.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    assert load.model is not None
    options: dict[str, Any] = dict(load.from_pretrained)
    if load.attn_implementation:
        options["attn_implementation"] = load.attn_implementation
    name, gguf = _locate(load.model)
    if gguf and hasattr(transformers, "GgufConfig"):
        # From 5.24 on transformers keeps the file's blocks packed, in layers that can be neither trained nor saved.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _hub_errors(load.model.name_or_path, load.attn_implementation):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=load.dtype,
            revision=load.model.revision or "main",
            trust_remote_code=load.model.trust_remote_code,
            device_map={"": load.device},
            **gguf,
            **options,
        )
    if gguf:
        _forget_gguf(model)
    return model


def _forget_gguf(model: Any) -> None:
    """The weights were unpacked; what is left of the file's format would keep transformers from saving the model."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that lies beside the weights; none where a folder has none (rows of token ids need none)."""
    from transformers import AutoTokenizer

    name, gguf = _locate(config)
    if not gguf and Path(name).is_dir() and not any(any(Path(name).glob(p)) for p in _TOKENIZER_FILES):
        return None
    with _hub_errors(config.name_or_path):
        return AutoTokenizer.from_pretrained(
            name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **gguf
        )


def load_model_config(config: ModelConfig) -> Any:
    """The architecture alone (no weights are read)."""
    from transformers import AutoConfig

    name, gguf = _locate(config)
    with _hub_errors(config.name_or_path):
        return AutoConfig.from_pretrained(
            name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **gguf
        )


def _locate(config: ModelConfig) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` wants: a name, and for a GGUF file its folder and file name."""
    from lowmem.fetch import resolve_model

    path = Path(resolve_model(config.name_or_path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model.name_or_path: there is no file {path.absolute()}")
        return str(path.parent), {"gguf_file": path.name}
    return str(path) if path.exists() else config.name_or_path, {}


@contextmanager
def _hub_errors(name: str, attention: str | None = None) -> Iterator[None]:
    """The long errors of loading as one line."""
    try:
        yield
    except (ImportError, ValueError) as error:
        text = str(error).splitlines()[0]
        if attention and "att" in text.lower():  # a kernel that is unknown, or not there on this machine
            raise UserError(
                f"model.attn_implementation: {attention}: {text}; use sdpa or eager, or leave it out"
            ) from error
        raise UserError(f"model.name_or_path: {name}: {text}") from error
    except SafetensorError as error:
        raise UserError(f"model.name_or_path: {name}: a file of weights is damaged ({error})") from error
    except OSError as error:
        if Path(name).exists():
            raise UserError(f"model.name_or_path: {name}: {str(error).splitlines()[0]}") from error
        raise UserError(
            f"model.name_or_path: {name} is no local folder or file ({Path(name).absolute()}), and the hub does not "
            "give it: check the spelling and the connection, and for a gated model log in with `hf auth login`"
        ) from error


def raise_trainable_dtype(model: nn.Module, dtype: str | None) -> None:
    """Raise 16-bit trainable weights to `dtype`, so that small updates are not rounded away.

    Args:
        model: changed in place; frozen weights keep their dtype.
        dtype: `float32`, or null to leave all weights alone.
    """
    if dtype is None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(getattr(torch, dtype))


# -- layout -----------------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside peft's wrapper; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order.

    Raises:
        UserError: no list of like layers is found.
    """
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and _is_layer(m[0])]
    if not lists:
        raise UserError(f"{type(unwrapped(model)).__name__}: no list of decoder layers found")
    return max(lists, key=len)


def _is_layer(module: nn.Module) -> bool:
    # A layer holds several modules with weights of their own; lists of experts or of plain linears are not meant.
    return sum(1 for child in module.children() if any(True for _ in child.parameters())) >= 2


def head(model: nn.Module) -> nn.Linear:
    """The linear layer that makes logits.

    Raises:
        UserError: there is none, or it is not a plain linear layer.
    """
    inner = unwrapped(model)
    find = getattr(inner, "get_output_embeddings", None)
    module = find() if find else getattr(inner, "lm_head", None)
    saved = getattr(module, "modules_to_save", None)
    if saved is not None:  # peft keeps a trainable copy beside the frozen original
        module = saved[module.active_adapter]  # type: ignore[union-attr,index]
    if module is None or type(module).forward is not nn.Linear.forward:
        raise UserError(
            f"{type(inner).__name__}: its head is {type(module).__name__}, not a plain linear layer; "
            "leave the head out of target_modules, or drop chunked_cross_entropy"
        )
    assert isinstance(module, nn.Linear)
    return module


@contextmanager
def without_head(model: nn.Module) -> Iterator[None]:
    """Inside, the model returns hidden states where it returned logits, and applies no final soft cap.

    A linear factor on the logits (Cohere, Granite) still acts, on the hidden states, which is the same.
    """
    linear: Any = head(model)
    config = _text_config(model)
    cap = getattr(config, "final_logit_softcapping", None)
    linear.forward = lambda hidden: hidden
    if cap:
        config.final_logit_softcapping = None
    try:
        yield
    finally:
        del linear.forward
        if cap:
            config.final_logit_softcapping = cap


def final_softcap(model: nn.Module) -> float | None:
    """c in logits = c * tanh(logits / c), where the model has it (Gemma 2 and later)."""
    cap = getattr(_text_config(model), "final_logit_softcapping", None)
    return float(cap) if cap else None


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: nn.Module) -> int | None:
    """The most tokens the model takes at once, where its config says so."""
    length = getattr(_text_config(model), "max_position_embeddings", None)
    return int(length) if length else None


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers inside the decoder layers by their full names, without those that route to experts."""
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, _linear_classes()) and not _routes(name, module, model)
    }


def adaptable(model: nn.Module) -> list[str]:
    """Names that pick out `linears(model)`, for peft: their last parts where those are unambiguous, else full names."""
    wanted = linears(model)
    others = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if name not in wanted}
    last_parts = {name.rsplit(".", 1)[-1] for name in wanted}
    return sorted(last_parts) if not last_parts & others else sorted(wanted)


def as_plain_linear(module: nn.Module) -> nn.Linear | None:
    """The module as `nn.Linear`, with its weights (GPT-2's Conv1D keeps them transposed); None if it is neither."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module
    if type(module) is not Conv1D:
        return None
    conv: Any = module
    with torch.device("meta"):  # no memory for weights that are replaced at once
        linear = nn.Linear(conv.weight.shape[0], conv.nf)
    linear.weight = nn.Parameter(conv.weight.data.T.contiguous(), requires_grad=conv.weight.requires_grad)
    linear.bias = conv.bias
    return linear.train(module.training)


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds `name`, and the attribute it is held under."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of embedding layers (a head tied to one is the same tensor)."""
    return [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and isinstance(m.weight, nn.Parameter)]


def is_gguf(config: ModelConfig) -> bool:
    """Whether the name leads to a GGUF file."""
    return "gguf_file" in _locate(config)[1]


def _linear_classes() -> tuple[type[nn.Module], ...]:
    from transformers.pytorch_utils import Conv1D

    return (nn.Linear, Conv1D)


def _routes(name: str, module: nn.Module, model: nn.Module) -> bool:
    config = _text_config(model)
    experts = [getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")]
    parts, outputs = name.split("."), getattr(module, "out_features", None)
    # one output: the gate of a shared expert
    return "router" in parts or outputs == 1 or ("gate" in parts and outputs is not None and outputs in experts)


def fused_experts(model: nn.Module) -> int:
    """Weights of experts that share one 3-D parameter and so are no linear layers."""
    return sum(
        parameter.numel()
        for block in blocks(model)
        for module in block.modules()
        if not hasattr(module, "kernel_size")  # a convolution
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    )


def takes_one_row(model: nn.Module) -> bool:
    """Whether packed samples must stand in one row: for flash attention, transformers finds their borders only so."""
    return "flash" in str(getattr(_text_config(model), "_attn_implementation", ""))


def wrap_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's forward by `make(forward)`. Parameter names stay as they are."""
    module.forward = make(module.forward)


def call(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of shape (rows, length, vocabulary) for a collated micro-batch.

    Raises:
        UserError: the model's forward cannot take the inputs, or returns no logits without labels.
    """
    inner = unwrapped(model)
    named = inspect.signature(inner.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in named.values())
    given: dict[str, Any] = {k: v for k, v in inputs.items() if k not in ("labels", "loss_weights")}
    for name in given:
        if name not in named and not takes_any:
            raise UserError(f"{type(inner).__name__}.forward takes no {name}, which this run needs")
    if "use_cache" in named or (takes_any and hasattr(getattr(inner, "config", None), "use_cache")):
        given["use_cache"] = False
    try:
        output = model(**given)
    except TypeError as error:
        if "labels" in str(error):
            raise UserError(f"{type(inner).__name__}.forward must return logits without labels: {error}") from error
        raise
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise UserError(f"{type(inner).__name__}.forward returns {type(output).__name__}, in which there are no logits")
    return logits
