"""Packing: several samples in one row, instead of padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.loss import IGNORE
from lowmem.model import takes_one_row
from lowmem.ops.attention_proof import prove_packed_attention
from lowmem.run import Run
from lowmem.strategy import ForwardBackward, Loss, Sample, Stage, Strategy, Trait


@dataclass
class Packing(Strategy):
    """Puts the samples of one optimizer batch into rows of up to `max_length` tokens, best fit, longest first.

    Every sample stays whole, sees only itself (positions restart, and transformers builds the mask from them), and the
    batch stays the same, so the weights do, too. Two proofs come before the first step: an attention kernel that is not
    torch's own is compared with plain attention on a packed row, and what stands before a sample must not change its
    loss.
    """

    stage: ClassVar[Stage] = Stage.PACK
    slot: ClassVar[str | None] = "pack"
    saves: ClassVar[str] = "padding: activations and time of tokens that are none"
    costs: ClassVar[str] = "a (length x length) mask per row with sdpa or eager attention"
    period = 1

    _checked: bool = field(default=False, init=False, repr=False)

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.POSITIONS})

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        def flattened(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            if takes_one_row(model):
                # Every row starts with an unlabelled token and position 0, so that rows may stand behind one another.
                inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
            return loss(model, inputs)

        return flattened

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        if run.model is not None:  # a preview of the batches has none
            prove_packed_attention(run.model, run.device)

        def packed(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            if not self._checked:
                self._checked = True
                _prove_isolation(forward_backward, micro_batches[0][0], run)
            return forward_backward([pack(batch, run.config.max_length) for batch in micro_batches], divisor)

        return packed


def pack(samples: list[Sample], max_length: int) -> list[Sample]:
    """Rows of at most `max_length` tokens (a longer sample has a row of its own); no sample is cut or lost."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: -len(s["input_ids"])):
        length = len(sample["input_ids"])
        fits = [i for i, left in enumerate(room) if left >= length]
        if fits:
            best = min(fits, key=lambda i: room[i])
            rows[best].append(sample)
            room[best] -= length
        else:
            rows.append([sample])
            room.append(max_length - length)
    return [join(row) for row in rows]


def join(samples: list[Sample]) -> Sample:
    """One row from several samples: positions restart, and no sample's first token is a target of the one before."""
    row: dict[str, Any] = {
        "input_ids": np.concatenate([np.asarray(s["input_ids"]) for s in samples]),
        "labels": np.concatenate([_without_first(np.asarray(s["labels"])) for s in samples]),
        "position_ids": np.concatenate([np.arange(len(s["input_ids"])) for s in samples]),
    }
    if any("loss_weights" in s for s in samples):
        row["loss_weights"] = np.concatenate([s.get("loss_weights", np.ones(len(s["labels"]))) for s in samples])
    return row


def _without_first(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([[IGNORE], labels[1:]])


@torch.no_grad()
def _prove_isolation(forward_backward: ForwardBackward, sample: Sample, run: Run) -> None:
    """The loss of a sample behind two different neighbours must be the same: masked positions weigh exactly nothing."""
    if run.device.type == "meta":
        return
    assert run.model is not None
    ids = np.resize(np.asarray(sample["input_ids"]), 8)
    probe: Sample = {"input_ids": ids, "labels": ids}
    silent = np.full_like(ids, IGNORE)
    # Two rows: some kernels keep samples apart in a batch of one, and no longer in a batch of two.
    batches = [[join([{"input_ids": np.full_like(ids, n), "labels": silent}, probe])] * 2 for n in (0, 1)]
    training = run.model.training
    run.model.eval()
    try:
        losses = [float(forward_backward([batch], 1.0)) for batch in batches]
    finally:
        run.model.train(training)
    if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[0]):
        raise UserError(
            f"packing: a sample's loss depends on its neighbour in the row ({losses[0]:.6f} or {losses[1]:.6f}); this "
            "model or attention kernel does not keep packed samples apart, so drop packing"
        )
