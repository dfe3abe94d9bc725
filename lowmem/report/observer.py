"""Observer that leaves `report.html` in the run folder."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

from lowmem.observers import Event


class ReportPage:
    """Writes the page when a run ends; a run that was cut short gets its page when the process exits.

    A page that cannot be written is said in one line: it must not spoil the run.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None

    def __call__(self, event: Event) -> None:
        """Remember the folder at the beginning, write at the end."""
        if event.kind == "begin":
            self.folder = event.trainer.books.folder
            atexit.register(self._at_exit)
        elif event.kind == "end" and self.folder:
            atexit.unregister(self._at_exit)
            if problem := self._write(self.folder):
                event.trainer.emit("status", text=problem)

    def _write(self, folder: Path) -> str | None:
        from lowmem.report.page import write_report

        try:
            write_report(folder)
        except Exception as error:
            return f"report.html was not written: {error}"
        return None

    def _at_exit(self) -> None:
        if self.folder and self.folder.is_dir() and (problem := self._write(self.folder)):
            print(problem, file=sys.stderr)
