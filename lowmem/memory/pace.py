"""How long an optimizer step of a run would take on a card, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowmem.memory.cards import Card
from lowmem.memory.subject import Subject
from lowmem.memory.work import Work

_PASSES = ("forward", "backward")


def step_seconds(subject: Subject, lengths: Sequence[int], card: Card) -> float:
    """Seconds of an optimizer step by a roofline over its operations, as if the card had memory enough.

    Work is linear in depth, so two shallow traces tell that of all layers.

    Args:
        subject: the run.
        lengths: tokens of each row of the optimizer batch.
        card: whose speed counts.
    """
    shallow, period = subject.shallow, subject.pattern
    if shallow is None or period is None or shallow + period >= subject.layers:
        return sum(_work(subject, lengths, None).seconds(card).values())
    few, more = (_work(subject, lengths, layers) for layers in (shallow, shallow + period))
    whole = few + (more - few) * ((subject.layers - shallow) / period)
    return sum(whole.seconds(card).values())


def _work(subject: Subject, lengths: Sequence[int], layers: int | None) -> Work:
    """What one optimizer step does: half of two steps, with the micro-batches that were left out of them."""
    work, seen, passes = Work(), [], 0

    def look(trainer: Any) -> None:
        inner = trainer.loss

        def counted(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            return inner(*arguments)

        trainer.loss = counted
        seen.append(trainer)

    subject.trace(lengths, layers=layers, look=look, work=work)
    return work.scaled(dict.fromkeys(_PASSES, 2 * seen[0].micro_batches / passes)) * 0.5
