"""Runs a function of a test module in several processes that speak through gloo, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

_SECONDS = 300


def in_processes(
    function: Callable[..., Any], *arguments: Any, number: int = 2, seconds: float = _SECONDS
) -> list[Any]:
    """What the function returns on every rank, in their order.

    Args:
        function: at the top of a module; it finds the variables of torchrun in its environment.
        arguments: can be pickled.
        number: processes.
        seconds: that they may take.

    Raises:
        AssertionError: one of them failed, or takes too long; with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [
        context.Process(target=_work, args=(function, arguments, rank, number, port, results, sys.path), daemon=True)
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
