"""What a rank that trains really holds: the ruler for predictions per rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from lowmem import Trainer
from lowmem.memory.meta import _random_states as random_states_are_seen
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.predict import without_collections
from lowmem.memory.trace import Trace

TRIES = 2  # gloo's threads may hold what was sent for a moment longer; the run does not need it


def is_held(predicted: int, measured: Callable[[int], int], within: float) -> bool:
    """Whether one of the tries comes within the bound; a later one is made only where the earlier ones do not.

    Args:
        predicted: bytes.
        measured: the bytes that the try of a number found.
        within: part of what was measured.
    """
    return any(abs(predicted / measured(number) - 1) <= within for number in range(TRIES))


def rows_of(lengths: Sequence[int], below: int = 499) -> list[dict[str, list[int]]]:
    """Rows of so many token ids, all smaller than `below`."""
    return [{"input_ids": [(7 * i + 3 * j * j) % below for j in range(n)]} for i, n in enumerate(lengths)]


def most_held(trainer: Trainer, check: Callable[[Trace], Any] = lambda _: None) -> int:
    """The most bytes that live at once while it trains; every storage counts with its size.

    Args:
        trainer: a new one.
        check: is shown what was recorded.
    """
    gc.collect()
    with without_collections(), random_states_are_seen(), Trace("cpu") as trace:
        for _, tensors in tensors_by_category(trainer):
            for tensor in tensors:
                trace.see(tensor)
        trainer.train()
    check(trace)
    return trace.peak()[0]
