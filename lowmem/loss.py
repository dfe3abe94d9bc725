"""The plain loss, and the count that divides it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem.model import call
from lowmem.strategy import Sample

IGNORE = -100


def next_token_cross_entropy(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Weighted sum of the cross entropy over all target tokens.

    Args:
        model: returns logits of shape (rows, length, vocabulary).
        inputs: `input_ids` and `labels` (rows, length), maybe `loss_weights`, `attention_mask`, `position_ids`.

    Returns:
        A scalar in float32 (float64 for a float64 model). Not divided by anything.
    """
    logits = call(model, inputs)
    targets, weights = shifted_targets(inputs)
    logits = logits[:, :-1].flatten(0, 1)  # (rows * (length - 1), vocabulary)
    if logits.element_size() < 4:
        logits = logits.float()
    if weights is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return (F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") * weights).sum()


def shifted_targets(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Targets and weights of positions 0 .. length-2, both flat: the label of the next token."""
    weights = inputs.get("loss_weights")
    return inputs["labels"][:, 1:].flatten(), None if weights is None else weights[:, 1:].flatten()


def count(samples: Iterable[Sample]) -> float:
    """Summed loss weight of the samples: the number of target tokens where no weights are given."""
    return float(sum(weight_of(sample) for sample in samples))


def weight_of(sample: Sample) -> float:
    """Summed loss weight of one sample. The first token of a row is nobody's target."""
    supervised = np.asarray(sample["labels"])[1:] != IGNORE
    weights = sample.get("loss_weights")
    return float(supervised.sum() if weights is None else np.asarray(weights)[1:][supervised].sum())


def num_targets(sample: Sample) -> int:
    """Target tokens of one sample."""
    return int((np.asarray(sample["labels"])[1:] != IGNORE).sum())
