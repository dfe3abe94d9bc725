"""What code that runs on the meta device says to those who record it: where memory lies, what stands for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_PLACE: ContextVar[str] = ContextVar("place", default="device")
_TIMES: ContextVar[int] = ContextVar("times", default=1)


def place_now() -> str:
    """`device`, or within `host_memory` the kind of the host's memory."""
    return _PLACE.get()


def times_now() -> int:
    """How often what runs now would run."""
    return _TIMES.get()


@contextmanager
def host_memory(kind: str) -> Iterator[None]:
    """Inside, tensors that are made on the meta device stand for the host's memory.

    Args:
        kind: `host` or `pinned`.
    """
    token = _PLACE.set(kind)
    try:
        yield
    finally:
        _PLACE.reset(token)


def starts(length: int, step: int, device: torch.device) -> Iterator[int]:
    """Where slices begin.

    Without data, equal slices show nothing new: of many, the first, the second (for all the others) and the last run.
    """
    every = range(0, length, step)
    if device.type != "meta" or len(every) < 4:
        yield from every
        return
    yield every[0]
    token = _TIMES.set(_TIMES.get() * (len(every) - 2))
    try:
        yield every[1]
    finally:
        _TIMES.reset(token)
    yield every[-1]
