"""What code that runs on the meta device says to those who record it: where memory lies, what stands for more."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_KEEPING: list[str] = []
_CALLED: list[str] = []
_TIMES: ContextVar[float] = ContextVar("times", default=1)


def place_now() -> str | None:
    """The kind of memory that what is made now lies in, within `keeping`."""
    return _KEEPING[-1] if _KEEPING else None


def times_now() -> float:
    """How often what runs now would run."""
    return _TIMES.get()


@contextmanager
def keeping(where: str) -> Iterator[None]:
    """Inside, what is born lies in this kind of memory, whatever device its tensor names.

    Args:
        where: as `lowmem.memory.trace.Storage.kept_on`.
    """
    _KEEPING.append(where)
    try:
        yield
    finally:
        _KEEPING.pop()


_PLACES: dict[int, str] = {}


def remember_place(buffer: Tensor, where: str) -> None:
    """Say where a buffer without data lies, for those who see it later than it was made."""
    storage = buffer.untyped_storage()  # a tensor may be given another
    _PLACES[storage._cdata] = where
    weakref.finalize(storage, _PLACES.pop, storage._cdata, None)


def known_place(tensor: Tensor) -> str | None:
    """What `remember_place` was told of a tensor's storage."""
    return _PLACES.get(tensor.untyped_storage()._cdata)


def label_now() -> str | None:
    """The category of what is made now, within `called`."""
    return _CALLED[-1] if _CALLED else None


@contextmanager
def called(label: str) -> Iterator[None]:
    """Inside, what is born belongs to this category of a ledger."""
    _CALLED.append(label)
    try:
        yield
    finally:
        _CALLED.pop()


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """Inside, what runs stands for as many times as much."""
    token = _TIMES.set(_TIMES.get() * times)
    try:
        yield
    finally:
        _TIMES.reset(token)


def starts(length: int, step: int, device: torch.device) -> Iterator[int]:
    """Where slices begin.

    Without data, equal slices show nothing new: of many, the first, the second (for all the others) and the last run.
    """
    every = range(0, length, step)
    if device.type != "meta" or len(every) < 4:
        yield from every
        return
    yield every[0]
    with repeated(len(every) - 2):
        yield every[1]
    yield every[-1]
