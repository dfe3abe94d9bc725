"""Observers look at a run and change nothing: plain callables that take an `Event`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `begin` (before the first step), `step` (after every optimizer step), `log` (every `logging_steps`),
            `evaluate`, `save`, `finish` (trained, `result.json` not yet written), `end`, `notice`, or `ledger`.
        trainer: the run it happened in.
        metrics: plain numbers and strings. `begin`: step, total_steps, epochs. `step`: step, loss, learning_rate, epoch, tokens,
            supervised_tokens, seconds, and what strategies logged (grad_norm, skipped, loss_scale). `log`: the same, loss averaged
            over the interval, plus tokens_per_second. `evaluate`: step, eval_loss, eval_tokens, eval_seconds. `save`: step, path.
            `end`: step, train_loss, seconds, tokens. `notice`: text.
    """

    kind: Literal["begin", "step", "log", "evaluate", "save", "finish", "end", "notice", "ledger"]
    trainer: Trainer
    metrics: Mapping[str, Any]


Observer: TypeAlias = Callable[[Event], None]
