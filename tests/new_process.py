"""New processes in a tenth of a second: forked from one that has imported everything and computed nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
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


def completed(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`lowmem ...` in a new process, as `subprocess.run` would leave it; what it says is read as UTF-8.

    Args:
        arguments: of the command.
        cwd: the folder it stands in.
        env: all its variables; by default, those of this process. What Python and packages read of them while they
            start was read before.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKSERVER.Process(
            target=_completed, args=(arguments, cwd or Path.cwd(), env or dict(os.environ), said)
        )
        process.start()
        code = ended(process)
        return subprocess.CompletedProcess(arguments, code, *(path.read_text(encoding="utf-8") for path in said))


def _completed(arguments: tuple[str, ...], cwd: Path, env: dict[str, str], said: list[Path]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for stream, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    _run(command, arguments, None)


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
