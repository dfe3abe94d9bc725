"""Observers look at a run and change nothing: plain callables that take an `Event`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from lowmem.config import TrainingConfig
    from lowmem.trainer import Trainer
    from lowmem.world import World


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: what happened; `metrics` then holds:
            `begin` (before the first step): step, total_steps.
            `step` (after every optimizer step): step, epoch, loss, learning_rate, tokens, supervised_tokens, seconds,
            and what strategies logged (grad_norm; loss_scale and skipped under float16).
            `log` (every `logging_steps`): the same, with loss averaged over the interval, tokens_per_second,
            rss_bytes, and on CUDA gpu_allocated_bytes and gpu_peak_bytes.
            `evaluate`: step, eval_loss, eval_tokens, eval_seconds.
            `save`: step, path.
            `ledger` (after the second step, where it is measured): rows (category -> bytes), peak_bytes.
            `data` (before the first step): split, lines (what became of the rows).
            `notice`, `status`: text.
            `finish` (trained and saved, `result.json` not yet written): nothing.
            `end`: step, and all that `result.json` holds.
        trainer: the run it happened in.
        metrics: plain numbers and strings.
    """

    kind: Literal["begin", "step", "log", "evaluate", "save", "finish", "end", "notice", "status", "data", "ledger"]
    trainer: Trainer
    metrics: Mapping[str, Any]


Observer: TypeAlias = Callable[[Event], None]


def heard_here(observers: Sequence[Observer], world: World) -> list[Observer]:
    """Those that see this rank's events: all on rank 0; elsewhere those that take part in what all ranks do together.

    These have an attribute `on_every_rank` that is true.
    """
    return [o for o in observers if world.is_main or getattr(o, "on_every_rank", False)]


def built_in_observers(training: TrainingConfig, world: World) -> list[Observer]:
    """Those that the numbers of a run ask for: the trackers of `report_to`, and the page of a run with a folder.

    Raises:
        UserError: a tracker's package is not installed.
    """
    if not world.is_main:
        return []
    from lowmem.report.observer import ReportPage
    from lowmem.trackers import make_tracker

    page: list[Observer] = [ReportPage()] if training.output_dir else []
    return [*map(make_tracker, training.report_to), *page]
