"""Runs a function of a test module in several processes that speak through gloo, as torchrun would start them.

Such runs take long, and several workers of pytest may want the same: whoever comes first computes it for all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from new_process import FORKSERVER

SHARED = "LOWMEM_TESTS_SHARED"  # a folder of all workers of this run of pytest
_SECONDS = 300


def once(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns (it can be pickled), made by one worker of pytest for all of them."""
    place = Path(os.environ[SHARED]) / hashlib.sha256(name.encode()).hexdigest()
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            value = pickle.dumps(make())
            place.write_bytes(value)
    return pickle.loads(place.read_bytes())


def marked(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those that the quick tests leave out are marked slow."""
    return [
        pytest.param(
            case, id=case if isinstance(case, str) else " ".join(case), marks=[pytest.mark.slow] * (case in slow)
        )
        for case in cases
    ]


def beside(case: Any, cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """The cases that run in the same processes as this one: the quick ones, or the slow ones."""
    return [other for other in cases if (other in slow) == (case in slow)]


def in_processes(
    function: Callable[..., Any], *arguments: Any, number: int = 2, seconds: float = _SECONDS
) -> list[Any]:
    """What the function returns on every rank, in their order; the same call is made once.

    Args:
        function: at the top of a module; it finds the variables of torchrun in its environment.
        arguments: can be pickled.
        number: processes.
        seconds: that they may take.

    Raises:
        AssertionError: one of them failed, or takes too long; with its traceback.
    """
    name = f"{function.__module__}.{function.__qualname__} {arguments!r} on {number}"
    found: list[Any] = once(name, lambda: _in_processes(function, arguments, number, seconds))
    return found


def _in_processes(function: Callable[..., Any], arguments: Any, number: int, seconds: float) -> list[Any]:
    results: Any = FORKSERVER.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        FORKSERVER.Process(target=_work, args=(function, arguments, rank, number, port, results, sys.path), daemon=True)
        for rank in range(number)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    latest = time.monotonic() + seconds
    try:
        while len(found) < number:
            assert time.monotonic() < latest, f"only ranks {sorted(found)} of {number} came to an end"
            if results.empty():
                time.sleep(0.02)
                continue
            rank, good, value = results.get()
            assert good, f"rank {rank}:\n{value}"
            found[rank] = value
    finally:
        for worker in workers:
            worker.kill()
    return [found[rank] for rank in range(number)]


def _work(
    function: Callable[..., Any], arguments: Any, rank: int, size: int, port: int, results: Any, path: list[str]
) -> None:
    sys.path[:] = path
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOWMEM_TIMEOUT="60", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        value = function(*arguments)
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
