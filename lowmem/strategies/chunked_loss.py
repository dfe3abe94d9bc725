"""Chunked cross entropy: the logits of all tokens never exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.loss import IGNORE, shifted_targets
from lowmem.model import call, final_softcap, head, head_weights, without_head
from lowmem.ops.cross_entropy import linear_cross_entropy
from lowmem.run import Run
from lowmem.strategy import Loss, Stage, Strategy


@dataclass
class ChunkedCrossEntropy(Strategy):
    """Head and loss over chunks of tokens; tokens without a label never meet the head.

    The model is called with its head as the identity, so every other wrapper still sees the call. A final soft cap
    (Gemma) moves into the loss; a linear factor (Cohere, Granite) acts on the hidden states. The first call compares
    itself with the plain loss on a few tokens.

    Attributes:
        chunk_size: tokens whose logits exist at once; null: as many as make 64 MiB of float32
            logits on a card, 16 MiB on a CPU.
    """

    stage: ClassVar[Stage] = Stage.KERNEL
    slot: ClassVar[str | None] = "loss"
    saves: ClassVar[str] = "logits: vocabulary x tokens x about 8 bytes shrink to one chunk"
    costs: ClassVar[str] = "a float32 gradient of the supervised hidden states"
    period = 1

    chunk_size: int | None = None
    _checked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise UserError("chunked_cross_entropy.chunk_size: counts from 1")

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        head(model)  # refuses a model without a plain head before anything runs
        return model

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        def chunked(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            if not self._checked:
                self._checked = True
                _compare(model, inputs, loss, chunked)
            with without_head(model):
                hidden = call(model, inputs)[:, :-1].flatten(0, 1)  # (rows * (length - 1), width)
            targets, weights = shifted_targets(inputs)
            rows = _supervised(targets)
            weight, bias = head_weights(model)
            return linear_cross_entropy(
                hidden[rows],
                weight,
                bias,
                targets[rows],
                None if weights is None else weights[rows],
                self.chunk_size,
                final_softcap(model),
            )

        return chunked


def _supervised(targets: Tensor) -> Tensor:
    """Positions that have a target; on the meta device, where labels have no values, all of them."""
    return torch.arange(len(targets), device="meta") if targets.is_meta else torch.nonzero(targets != IGNORE).squeeze(1)


@torch.no_grad()
def _compare(model: nn.Module, inputs: dict[str, Tensor], plain: Loss, chunked: Loss) -> None:
    """The chunked loss of a few tokens against the plain one: a head with more to it is refused, not mistrained."""
    if inputs["input_ids"].is_meta:
        return
    few = {"input_ids": inputs["input_ids"][:1, :8].clone(), "labels": inputs["input_ids"][:1, :8].clone()}
    training = model.training
    model.eval()
    try:
        expected, got = float(plain(model, few)), float(chunked(model, few))
    finally:
        model.train(training)
        # Under autocast torch 2.10 would go on with the casts made here, without gradients (2.13 does not).
        torch.clear_autocast_cache()
    if abs(expected - got) > 0.02 * abs(expected) + 1e-3:
        raise UserError(
            f"chunked_cross_entropy: on a few tokens its loss is {got:.4f}, the model's own {expected:.4f}; this model "
            "does more to its logits than a linear layer and a soft cap, so drop chunked_cross_entropy"
        )
