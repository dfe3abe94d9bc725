"""Independent searches side by side, one process each, where the system can fork."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def can_fork() -> bool:
    """Whether a copy of this process can go on calculating: Linux, one thread of Python, CUDA untouched, two CPUs."""
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all tasks, in their order; each runs in a copy of this process.

    Raises:
        Exception: what the first failing task raised.
    """
    context = multiprocessing.get_context("fork")
    running = []
    for task in tasks:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    try:
        answers = [_answer(ours) for _, ours in running]
    finally:
        for process, _ in running:
            process.terminate()
            process.join()
    for failed, answer in answers:
        if failed:
            raise answer
    return [answer for _, answer in answers]


def _run(task: Callable[[], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        answer = False, task()
    except Exception as error:
        answer = True, error
    pipe.send(answer)


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return True, RuntimeError("plan: a process that searched was ended from outside")
