"""Which linear layers of a model can be cut, and where: by transformers' plan of it, or by its layers' names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from lowmem.errors import UserError
from lowmem.model import blocks, linears, unwrapped

if TYPE_CHECKING:
    from lowmem.ops.cut import Side

# transformers' words -> the side that is cut, and whether the activation there is whole outside
STYLES: dict[str, tuple[Side, bool]] = {
    "colwise": ("outputs", False),
    "rowwise": ("inputs", False),
    "colwise_gather_output": ("outputs", True),
    "rowwise_split_input": ("inputs", True),
}
SUM_GRADIENTS = "replicated_with_grad_allreduce"  # a norm of single heads: whole, and each rank has its heads

_BY_NAME = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), "colwise"),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "fc2"), "rowwise"),
}
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "activation_dropout")


def tensor_plan(model: nn.Module, size: int) -> tuple[dict[str, str], bool]:
    """Names of modules in the decoder layers -> transformers' words, and whether transformers has said so.

    Embedding and head, which transformers would cut, too, stay whole: the loss, in chunks or not, wants a plain head.

    Args:
        model: peft may be around it; the names are those inside.
        size: ranks that share a layer.

    Raises:
        UserError: no plan, one that is not done here, sizes that do not divide, or dropout on what is cut.
    """
    inner: Any = unwrapped(model)
    patterns: dict[str, str] = getattr(inner, "_tp_plan", None) or {}
    inside = {id(module) for block in blocks(inner) for module in block.modules()}
    names = [name for name, module in inner.named_modules() if id(module) in inside]
    plan = {name: patterns[_pattern(name)] for name in names if _pattern(name) in patterns}
    of_parameters = {_pattern(name) for name, _ in inner.named_parameters()} & patterns.keys()
    if given := bool(plan or of_parameters):
        done = {*STYLES, SUM_GRADIENTS}
        strange = [f"{_pattern(n)}: {style}" for n, style in plan.items() if style not in done]
        if strange := [*strange, *(f"{n}: {patterns[n]}" for n in sorted(of_parameters))]:
            raise _refused(inner, f"transformers' plan has {strange[0]}, which is not done here")
    else:
        own = [name.removesuffix(".base_layer") for name in linears(inner) if ".lora_" not in name]
        plan = {name: _BY_NAME.get(name.rsplit(".", 1)[-1], "") for name in own}
        if strange := [_pattern(name) for name, style in plan.items() if not style]:
            raise _refused(inner, f"transformers has no plan for it, and nobody knows how to cut {strange[0]}")
    _require_even(inner, plan, size)
    _require_nothing_between(inner, plan)
    _require_no_dropout(inner)
    return plan, given


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _require_even(inner: Any, plan: dict[str, str], size: int) -> None:
    """Every rank must get as many heads, and as many columns, as the others."""
    config = inner.config.get_text_config() if hasattr(getattr(inner, "config", None), "get_text_config") else None
    if any(style == "colwise" and "att" in name.rpartition(".")[0].rsplit(".", 1)[-1] for name, style in plan.items()):
        for key in _HEADS:
            heads = getattr(config, key, None)
            if isinstance(heads, int) and heads % size:
                raise _refused(inner, f"its {heads} heads ({key}) are not to be shared by {size} ranks", smaller=True)
    for name, style in plan.items():
        if style in STYLES:
            side = "out_features" if STYLES[style][0] == "outputs" else "in_features"
            width = getattr(inner.get_submodule(name), side, None)
            if isinstance(width, int) and width % size:
                what = f"{side} of {_pattern(name)} ({width}) are not to be shared by {size} ranks"
                raise _refused(inner, what, smaller=True)


def _require_nothing_between(inner: Any, plan: dict[str, str]) -> None:
    """What stands beside cut layers would see this rank's part, and get its part of the gradient alone."""
    layers = {id(block) for block in blocks(inner)}
    for parent in {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}:
        module = inner.get_submodule(parent)
        if id(module) in layers:
            continue
        beside = [
            f"{parent}.{name}" for name, child in module.named_children() if any(True for _ in child.parameters())
        ]
        beside += [f"{parent}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if left := [name for name in beside if name not in plan]:
            raise _refused(inner, f"nobody knows what to do with {_pattern(left[0])}, which stands beside cut layers")


def _require_no_dropout(inner: Any) -> None:
    """Ranks draw the same numbers, as they must for what is whole, and so would they for heads of their own."""
    for key in _DROPOUTS:
        if p := getattr(getattr(inner, "config", None), key, 0):
            raise UserError(
                f"tensor_parallel: {type(inner).__name__} has {key} {p}, and every rank would drop the same places of "
                "its own heads; set it to 0 in the model's config.json, or use fsdp_2"
            )


def _refused(inner: Any, why: str, *, smaller: bool = False) -> UserError:
    hint = "set tensor_parallel.size to a number that divides them" if smaller else "use fsdp_2, which cuts any model"
    return UserError(f"tensor_parallel: {type(inner).__name__}: {why}; {hint}")
