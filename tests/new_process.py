"""New processes in a tenth of a second: forked from one that has imported everything and computed nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["torch", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "lowmem.trainer", "lowmem.cli"]
)
SECONDS = 240


def start(job: Callable[..., Any], *arguments: Any, log: Path | None = None) -> BaseProcess:
    """A job of a module that can be imported, in a new process; its output goes to `log`."""
    process = FORKSERVER.Process(target=_run, args=(job, arguments, log))
    process.start()
    return process


def ended(process: BaseProcess) -> int:
    """The exit code; a signal's number, negative."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("the process hangs")
    return process.exitcode


def run(job: Callable[..., Any], *arguments: Any, log: Path | None = None) -> int:
    """The exit code of a job in a new process."""
    return ended(start(job, *arguments, log=log))


def command(*arguments: str) -> None:
    """A job: the `lowmem` command."""
    from lowmem.cli import main

    sys.argv = ["lowmem", *arguments]
    main()


def with_peak(file: Path, job: Callable[..., Any], *arguments: Any) -> None:
    """A job that leaves the peak of its resident bytes in a file."""
    job(*arguments)
    file.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def _run(job: Callable[..., Any], arguments: tuple[Any, ...], log: Path | None) -> None:
    # A test run that was started in the background ignores Ctrl-C, and the fork server does so always.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if log:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)
    job(*arguments)
