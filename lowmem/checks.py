"""Checks a run makes on itself. Each ends it with one line instead of hours of useless work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.adapters import empty_adapters
from lowmem.config import TrainingConfig
from lowmem.data import TokenizedDataset
from lowmem.data.chunks import check_tokens
from lowmem.data.stream import TokenStream
from lowmem.errors import UserError
from lowmem.model import learned_positions, unwrapped
from lowmem.run import Run
from lowmem.sharded import global_norm, local
from lowmem.strategy import Strategy, Trait

_UPDATES_TO_JUDGE = 10  # a tensor that has not moved by then is worth a remark


class NonFiniteError(UserError):
    """The loss, the gradient or a weight is NaN or infinite.

    Args:
        message: one line.
        damaged: the weights in memory have been updated with it.
    """

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


def require_positions(model: nn.Module, rows: Any, max_length: int) -> None:
    """Refuse rows beyond a table of learned positions, which would end in an index out of range.

    Args:
        model: with positions of any kind.
        rows: a tokenised data set, a stream, or null.
        max_length: longest row of a stream.

    Raises:
        UserError: a row has more tokens than the model has positions for.
    """
    limit = None if rows is None else learned_positions(model)
    if limit is None:
        return
    longest = int(max(rows.lengths, default=0)) if hasattr(rows, "lengths") else max_length
    if longest > limit:
        raise UserError(
            f"training.max_length: rows have up to {longest:,} tokens, and the model has positions for {limit:,}; set "
            f"it to {limit}"
        )


def require_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of all that is trained, tied weights once.

    Raises:
        UserError: nothing is trainable, or the attention kernel has no backward on the model's device.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise UserError("model: no parameter is trainable; unfreeze some, or add the strategy lora")
    kernel = getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None)
    if kernel == "flex_attention" and any(p.device.type == "cpu" for p in trainable.values()):
        raise UserError("model.attn_implementation: flex_attention has no backward on a CPU; use sdpa or eager")
    return trainable


def require_shared_work(run: Run, strategies: Sequence[Strategy]) -> None:
    """Every process has work of its own; strategies that share work among processes have some to share it with.

    Raises:
        UserError: several processes would all do the same.
    """
    sharing = [strategy.name for strategy in strategies if Trait.SHARED in strategy.provides]
    if remark := run.world.require_use(sharing):
        run.notice(remark)


def require_eval_rows(numbers: TrainingConfig, rows: object | None) -> None:
    """What counts on evaluations has rows to evaluate (tracking the best and early stopping need `eval_steps`).

    Raises:
        UserError: `eval_steps` without rows.
    """
    if numbers.eval_steps and rows is None:
        raise UserError("training.eval_steps: there is no eval data; give data.eval (eval_dataset), or leave it out")


def require_known_tokens(model: nn.Module, rows: object) -> None:
    """Every token id has a row in the embedding: on a GPU, an id beyond it ends the process with a riddle.

    Raises:
        UserError: one has none. Those of a stream are looked at when they come.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = len(weight) if (weight := getattr(embedding, "weight", None)) is not None else None
    if vocabulary is None or rows is None:
        return
    if isinstance(rows, TokenizedDataset):
        check_tokens(rows.input_ids, rows.labels, vocabulary)
    elif isinstance(rows, TokenStream):
        rows.vocabulary = vocabulary


# -- loss and gradient ------------------------------------------------------------------------------------------------


def require_finite(run: Run, damaged: bool = False) -> None:
    """Stop before the weights are touched when the loss of the step or its gradient is NaN or infinite.

    The gradient is looked at through its norm, which is logged as `grad_norm`: by whoever has computed it, else here.
    Both numbers are read from the device at once.

    Args:
        run: `metrics` holds the loss.
        damaged: the weights have been updated already.

    Raises:
        NonFiniteError: with the step, and what to do.
    """
    if run.device.type == "meta":
        return
    gradients = run.gradients()
    if gradients and "grad_norm" not in run.metrics:
        run.log(grad_norm=global_norm(gradients, run.world))
    loss, norm = _read(run.metrics["loss"], run.metrics.get("grad_norm", 0.0), run.device)
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the gradient's norm is {norm} (loss {loss})" if math.isfinite(loss) else f"the loss is {loss}"
    raise NonFiniteError(f"step {run.global_step + 1}: {what}; {_DAMAGED if damaged else _UNTOUCHED}", damaged)


def require_finite_loss(run: Run, loss: float | Tensor) -> None:
    """Stop when a loss is NaN or infinite; its gradient must not have reached the weights yet.

    Raises:
        NonFiniteError: with the step, and what to do.
    """
    if run.device.type != "meta" and not math.isfinite(value := float(loss)):
        raise NonFiniteError(f"step {run.global_step + 1}: the loss is {value}; {_UNTOUCHED}")


_UNTOUCHED = (
    "the weights were not updated. Lower the learning rate, look at the rows of this batch, or resume from the last "
    "checkpoint"
)
_DAMAGED = (
    "the weights were updated inside backward, before that could be known, and are damaged. The last checkpoint is "
    "good: resume from it with a lower learning rate, or look at the rows of this batch"
)


def _read(loss: float | Tensor, norm: float | Tensor, device: torch.device) -> list[float]:
    values = [torch.as_tensor(value, device=device).detach().float() for value in (loss, norm)]
    return torch.stack(values).tolist()  # type: ignore[no-any-return]


# -- weights ----------------------------------------------------------------------------------------------------------


class SelfChecks:
    """What a run looks at beside its numbers: that weights move, stay finite, and that an adapter does something."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first_update: FirstUpdate | None = None

    def begin(self) -> FirstUpdate:
        """Take note of the weights before the first step."""
        self.first_update = FirstUpdate(self.run)
        return self.first_update

    def before_saving(self) -> None:
        """Before weights are evaluated or saved.

        Raises:
            NonFiniteError: a trained weight is NaN or infinite.
            UserError: an update was made, and all adapters are empty.
        """
        if self.run.device.type == "meta":
            return
        require_finite_weights(self.run)
        if self.first_update and self.first_update.updates and self.run.model is not None:
            empty, number = empty_adapters(self.run.model)
            if self.run.world.any(number > 0) and not self.run.world.any(number > len(empty)):
                raise UserError(
                    f"step {self.run.global_step}: all {number} adapters are empty (their second matrix is still "
                    "zero), so no gradient reaches them; nothing was saved. Two strategies do not work together "
                    "(please report it), or the loss does not depend on the adapted layers"
                )

    def at_end(self) -> None:
        """Before the result is saved: the same, and a notice that names tensors which never moved."""
        self.before_saving()
        if self.first_update and (still := self.first_update.unmoved()):
            self.run.notice(
                f"{len(still)} of {len(self.run.trainable)} trained tensors are as they were {self.run.global_step} "
                f"steps ago ({', '.join(still[:3])}{', ...' if len(still) > 3 else ''}): no gradient reaches them, or "
                "their updates are too small for their dtype"
            )


@torch.no_grad()
def require_finite_weights(run: Run) -> None:
    """Every trained weight is finite. One reduction over all of them, and one number read from the device.

    Raises:
        NonFiniteError: with the names.
    """
    parts = {name: local(p) for name, p in run.trainable.items() if local(p).numel()}
    # The largest absolute value: unlike a sum of squares, it does not overflow in 16 bits.
    largest = torch.stack([m.float() for m in torch._foreach_norm(list(parts.values()), math.inf)])
    finite = largest.isfinite()
    if not run.world.any(not bool(finite.all())):
        return
    here = [name for name, good in zip(parts, finite.tolist(), strict=True) if not good]
    bad = list(dict.fromkeys(name for names in run.world.from_all(here) for name in names))
    raise NonFiniteError(
        f"step {run.global_step}: NaN or infinite weights in {len(bad)} trained tensors "
        f"({', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''}); nothing was saved. Lower the learning rate, and "
        "resume from the last checkpoint, which is good",
        damaged=True,
    )


class FirstUpdate:
    """After the first step with a learning rate above 0, some trainable weight must have moved.

    Every tensor is summed in float64 before and after; nothing is copied.

    Attributes:
        before: the sums at the start; null on the meta device.
        updates: steps taken with a learning rate above 0.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before: list[float] | None = None if run.device.type == "meta" else _sums(run)
        self.updates = 0

    def check(self) -> None:
        """Look after a step; once a weight has moved, never again.

        Raises:
            UserError: the step was taken, and no weight has changed.
        """
        if not self.run.metrics["learning_rate"] or self.run.metrics.get("skipped"):
            return
        self.updates += 1
        if self.updates == 1 and self.before is not None and not self.run.world.any(self.before != _sums(self.run)):
            raise UserError(
                f"step {self.run.global_step}: no trainable weight has moved; the learning rate is too small for the "
                "weights' dtype, no gradient reaches them, or two strategies do not work together (please report it)"
            )

    def unmoved(self) -> list[str]:
        """The tensors whose sums are still those of the start; none as long as it is too early to tell."""
        if self.before is None or self.updates < _UPDATES_TO_JUDGE:
            return []
        now = zip(self.run.trainable, self.before, _sums(self.run), strict=True)
        on_ranks = self.run.world.from_all({name: before == after for name, before, after in now})
        moved = {name for still in on_ranks for name, here in still.items() if not here}
        return list(dict.fromkeys(name for still in on_ranks for name in still if name not in moved))


@torch.no_grad()
def _sums(run: Run) -> list[float]:
    parts = map(local, run.trainable.values())
    return torch.stack([part.sum(dtype=torch.float64) for part in parts]).tolist()  # type: ignore[no-any-return]
