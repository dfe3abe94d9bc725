"""All knowledge of how a Hugging Face model is laid out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.errors import UserError


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside peft's wrapper; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order.

    Raises:
        UserError: no list of like layers is found.
    """
    # any: of a stage of a pipeline the first layers may be elsewhere
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and any(map(_is_layer, m))]
    if not lists:
        raise UserError(f"{type(unwrapped(model)).__name__}: no list of decoder layers found")
    return max(lists, key=len)


def _is_layer(module: nn.Module) -> bool:
    # A layer holds several modules with weights of their own; lists of experts or of plain linears are not meant.
    return sum(1 for child in module.children() if any(True for _ in child.parameters())) >= 2


def norms_beside(model: nn.Module) -> list[nn.Module]:
    """Norms that stand beside the list of decoder layers, such as the one after the last."""
    return [child for child in decoder(model).children() if "norm" in type(child).__name__.lower()]


def decoder(model: nn.Module) -> nn.Module:
    """The module that holds the list of decoder layers, and calls them."""
    first = blocks(model)[0]
    for module in model.modules():
        if any(isinstance(child, nn.ModuleList) and len(child) and child[0] is first for child in module.children()):
            return module
    raise AssertionError("blocks are in a list of some module")


def feed_forward(block: nn.Module) -> nn.Module | None:
    """The MLP of a decoder layer (or its experts): a module that works on every token alone; None where it has none."""
    found = (getattr(block, name, None) for name in ("mlp", "feed_forward", "ffn"))
    return next((module for module in found if isinstance(module, nn.Module)), None)


def head(model: nn.Module) -> nn.Module:
    """The module that makes logits as a plain linear layer does; `head_weights` are its weights.

    Raises:
        UserError: there is none, or it does something else.
    """
    inner = unwrapped(model)
    find = getattr(inner, "get_output_embeddings", None)
    module = find() if find else getattr(inner, "lm_head", None)
    saved = getattr(module, "modules_to_save", None)
    if saved is not None:  # peft keeps a trainable copy beside the frozen original
        module = saved[module.active_adapter]  # type: ignore[union-attr,index]
    tokens = getattr(module, "token_adapter", None)  # peft trains some rows and puts them in at every pass
    linear = module if tokens is None else tokens.base_layer
    if linear is None or type(linear).forward is not nn.Linear.forward:
        raise UserError(
            f"{type(inner).__name__}: its head is {type(module).__name__}, not a plain linear layer; "
            "leave the head out of target_modules, or drop chunked_cross_entropy"
        )
    assert isinstance(module, nn.Module)
    return module


def head_weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (vocabulary, width) and bias (vocabulary,) of the head; gradients reach what is trained of them."""
    module: Any = head(model)
    return module.weight, getattr(module, "bias", None)


@contextmanager
def without_head(model: nn.Module) -> Iterator[None]:
    """Inside, the model returns hidden states where it returned logits, and applies no final soft cap.

    A linear factor on the logits (Cohere, Granite) still acts, on the hidden states, which is the same.
    """
    linear: Any = head(model)
    config = text_config(model)
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
    cap = getattr(text_config(model), "final_logit_softcapping", None)
    return float(cap) if cap else None


def text_config(model: nn.Module) -> Any:
    """The config with the numbers of the decoder (part of the whole one where a model sees pictures, too)."""
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: nn.Module) -> int | None:
    """The most tokens the model takes at once, where its config says so."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return int(length) if length else None


def learned_positions(model: nn.Module) -> int | None:
    """The most tokens for which the model has learned positions (GPT-2, OPT); None where positions are computed."""
    length, inner = context_length(model), unwrapped(model)
    if length is None or not hasattr(inner, "get_input_embeddings"):
        return None
    words = {id(module) for module in inner.get_input_embeddings().modules()}  # type: ignore[operator]
    tables = (m for m in inner.modules() if isinstance(m, nn.Embedding) and id(m) not in words)
    # OPT's table has two rows more
    return length if any(length <= table.num_embeddings <= length + 2 for table in tables) else None


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


def origin(model: nn.Module) -> dict[str, Any]:
    """What is known of where a model in memory came from, as the `model` block of a recipe: else its class."""
    inner: Any = unwrapped(model)
    name = getattr(getattr(inner, "config", None), "_name_or_path", None)
    if not name:
        return {"name_or_path": type(inner).__name__}
    dtypes = {str(p.dtype).removeprefix("torch.") for p in embedding_parameters(inner)}
    dtype = dtypes.pop() if len(dtypes) == 1 else "auto"
    place = Path(name).absolute() if Path(name).exists() else name
    return {"name_or_path": str(place), "dtype": dtype if dtype in ("float32", "bfloat16", "float16") else "auto"}


def _linear_classes() -> tuple[type[nn.Module], ...]:
    from transformers.pytorch_utils import Conv1D

    return (nn.Linear, Conv1D)


def _routes(name: str, module: nn.Module, model: nn.Module) -> bool:
    config = text_config(model)
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
    return "flash" in str(getattr(text_config(model), "_attn_implementation", ""))


def wrap_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's forward by `make(forward)`. Parameter names stay as they are."""
    module.forward = make(module.forward)


def call(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of shape (rows, length, vocabulary) for a collated micro-batch.

    Raises:
        UserError: the model's forward cannot take the inputs, or returns no logits without labels.
    """
    inner = unwrapped(model)
    given = _arguments(inner, inputs)
    try:
        output = model(**given)
    except TypeError as error:
        if "labels" in str(error):
            raise UserError(f"{type(inner).__name__}.forward must return logits without labels: {error}") from error
        raise
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise UserError(f"{type(inner).__name__}.forward returns {type(output).__name__}, in which there are no logits")
    in_front = logits.shape[1] - inputs["input_ids"].shape[1]  # a prompt that an adapter puts before every row
    return logits[:, in_front:] if in_front > 0 else logits


def hidden_states(layers: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the `decoder` of a model makes of a collated micro-batch, (rows, length, width)."""
    output = layers(**_arguments(layers, inputs))
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def _arguments(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    named = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in named.values())
    given: dict[str, Any] = {k: v for k, v in inputs.items() if k not in ("labels", "loss_weights")}
    for name in given:
        if name not in named and not takes_any:
            raise UserError(f"{type(module).__name__}.forward takes no {name}, which this run needs")
    if "use_cache" in named or (takes_any and hasattr(getattr(module, "config", None), "use_cache")):
        given["use_cache"] = False
    return given
