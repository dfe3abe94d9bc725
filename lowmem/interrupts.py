"""Ctrl-C and SIGTERM: the step at hand is finished and saved before the run ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from lowmem.run import Run


class Interrupted(KeyboardInterrupt):
    """Ctrl-C (SIGINT); the message says what was saved and how to go on."""


class Terminated(SystemExit):
    """SIGTERM, exit code 143; the message says what was saved and how to go on."""

    def __init__(self, message: str = "terminated before the first step") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


class CutShort(BaseException):
    """Ends an evaluation inside a run that is to be saved now. No `Exception`, lest somebody's `except` swallows it."""


class Interrupts:
    """Context of the loop: the first signal ends the run after its step, a second one at once.

    Handlers are installed in the main thread only (Python allows no other), not for a signal that the process was
    started to ignore, and the old ones are put back on leaving. On leaving after a signal, `Interrupted` or
    `Terminated` is raised.

    Attributes:
        signal: the first signal that came; null before, and after the context.
        message: what the exception will say.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.signal: signal.Signals | None = None
        self.message = ""
        self._before: dict[signal.Signals, Any] = {}
        self._cuttable = False

    def __enter__(self) -> Interrupts:
        self.signal, self.message, self._before = None, "", {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before is not None and before != signal.SIG_IGN:  # None: not ours to put back
                    self._before[number] = before
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self.signal is not None and error is None:
            raise _exception(
                self.signal, self.message or f"{self.signal.name} came while the run ended: it is complete"
            )

    @property
    def ended_the_run(self) -> bool:
        """Whether the loop ends because of a signal (and for no other reason)."""
        return self.signal is not None and self.run.stopped == _reason(self.signal)

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Inside, `check` raises `CutShort` once a signal has come."""
        self._cuttable = True
        try:
            self.check()
            yield
        finally:
            self._cuttable = False

    def check(self) -> None:
        """A place where what is cuttable may end: nothing is half done here."""
        if self._cuttable:
            self.agree()
            if self.signal is not None:
                raise CutShort

    def agree(self) -> None:
        """A signal that has come to one rank has come to all: they end after the same step."""
        number = int(self.run.world.highest(self.signal or 0))
        if number:
            self.signal = signal.Signals(number)
            self.run.stopped = self.run.stopped or _reason(self.signal)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and self.signal != number and self.run.world.size > 1:
            return  # the launcher passes on in its own way what the terminal has told everybody
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)  # a third one does not wait for Python
            raise _exception(
                signal.Signals(number),
                "stopped at once; --resume (in Python: resume_from=True) goes on from the last checkpoint, if any",
            )
        self.signal = signal.Signals(number)
        if self.run.world.size == 1:  # else when all ranks know
            self.run.stopped = _reason(self.signal)
        # Not print(): the signal may have come in the middle of one.
        os.write(2, f"\n{self.signal.name}: finishing this step, then saving; a second one stops at once\n".encode())


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that bars are taken down and locks released."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reason(number: signal.Signals) -> str:
    return f"interrupted by {number.name}"


def _exception(number: signal.Signals, message: str) -> BaseException:
    return Interrupted(message) if number == signal.SIGINT else Terminated(message)
