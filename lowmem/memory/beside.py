"""A prediction beside a rule of thumb: category by category, with the reason for each difference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem.memory.rule_of_thumb import MemoryEstimate

if TYPE_CHECKING:
    from lowmem.memory.estimate import Estimate

# in what order categories are listed and drawn; others come after these
CATEGORIES = (
    "weights",
    "weights, frozen",
    "weights, trainable",
    "gradients",
    "optimizer state",
    "activations",
    "loss",
    "temporaries",
    "layers put together",
    "communication",
    "inside kernels",
    "workspaces",
    "allocator slack",
)
_NOT_IN_THE_RULE = {
    "loss": "logits and their gradients, as wide as the vocabulary",
    "temporaries": "copies, expanded weights, gradients of activations, for a moment",
    "layers put together": "from the parts that all cards hold, while they compute",
    "communication": "what is sent and received, for a moment",
    "inside kernels": "buffers of fused kernels",
    "workspaces": "cuBLAS has one for each thread",
    "allocator slack": "reserved, in use by no tensor",
    "paged moments": "those of one update, beside the allocator",
    "CUDA itself": "its context and kernels",
}


@dataclass(frozen=True)
class Difference:
    """One category by rule and as predicted, in bytes, and why they differ."""

    category: str
    rule_bytes: int
    predicted_bytes: int
    why: str


def ordered(categories: Iterable[str]) -> list[str]:
    """The categories in the order in which they are listed and drawn."""
    given = list(categories)
    return [name for name in CATEGORIES if name in given] + [name for name in given if name not in CATEGORIES]


def short(model: str) -> str:
    """A model's name for a heading: a path's last part."""
    path = Path(model)
    if not path.is_absolute():
        return model
    return path.parent.name if path.name == "config.json" else path.name


def rows(lengths: Sequence[int]) -> str:
    """How many rows of how many tokens."""
    shortest, longest = min(lengths), max(lengths)
    tokens = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    return f"{len(lengths)} row{'s' * (len(lengths) > 1)} of {tokens} tokens"


def operation(name: str) -> str:
    """`aten.mm.default` -> `mm`, `inside aten.x.default` -> `inside x`."""
    return re.sub(r"\b(?:aten|bitsandbytes)\.(\w+)\.\w+", r"\1", name)


def beside_the_rule(found: Estimate) -> list[Difference]:
    """An estimate beside the tutorial's rule for the model as it is trained, and the rows of one forward pass."""
    rule = found.rule
    counted = {
        "weights": rule.parameter_bytes,
        "gradients": rule.gradient_bytes,
        "optimizer state": rule.optimizer_bytes,
        "activations": rule.activation_bytes,
    }
    beside = {"paged moments": found.managed_at_once, "CUDA itself": found.context_bytes}
    predicted = {**found.ledger, **{name: size for name, size in beside.items() if size}}
    return differences(counted, predicted, rule)


def differences(rule: Mapping[str, int], predicted: Mapping[str, int], counts: MemoryEstimate) -> list[Difference]:
    """Every category that either of the two knows; frozen and trained weights are one.

    Args:
        rule, predicted: category -> bytes.
        counts: how many weights there are, and how many of them are trained.
    """
    by_rule, together = _one_row_for_weights(rule), _one_row_for_weights(predicted)
    found = []
    for category in dict.fromkeys([*by_rule, *together]):
        one, other = by_rule.get(category, 0), together.get(category, 0)
        if one or other:
            found.append(Difference(category, one, other, _why(category, one, other, counts)))
    return found


def _one_row_for_weights(ledger: Mapping[str, int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in ordered(ledger):
        category = "weights" if name.startswith("weights") else name
        sizes[category] = sizes.get(category, 0) + ledger[name]
    return sizes


def _why(category: str, rule: int, predicted: int, counts: MemoryEstimate) -> str:
    if not rule:
        return "not in the rule: " + _NOT_IN_THE_RULE.get(
            category, "what layers keep for the backward pass" if category == "activations" else "kept by a technique"
        )
    if abs(predicted - rule) <= 0.01 * rule:
        return "as the rule says"
    if category == "activations":
        return _why_activations(predicted / rule)
    if category == "weights":
        return _per_weight("weight", rule, predicted, counts.parameters)
    if category == "gradients" and predicted < rule:
        there = "none of them is" if not predicted else f"{predicted / rule:.0%} of them are"
        return f"{there} there when the peak comes"
    return _per_weight("trained weight", rule, predicted, counts.trainable_parameters)


def _why_activations(times: float) -> str:
    said = "the rule's one hidden state per layer"
    if times < 1:
        return f"{times:.2f} x {said}: not all of them are there when the peak comes, or none is kept"
    if times < 1.5:
        return f"{times:.2f} x {said}: layers are recomputed, so little else is kept"
    return f"{times:.1f} x {said}: all that backward passes of layers need is kept"


def _per_weight(what: str, rule: int, predicted: int, count: int) -> str:
    one, other = (f"{size / count:.2f}".rstrip("0").rstrip(".") for size in (rule, predicted))
    return f"{other} bytes for each {what}, not {one}"
