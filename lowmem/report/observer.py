"""Observer that leaves `report.html` in the run folder."""

from __future__ import annotations

from pathlib import Path

from lowmem.observers import Event


class ReportPage:
    """Writes the page when a run ends, and on `close` also after one that was cut short."""

    def __init__(self) -> None:
        self.unwritten: Path | None = None

    def __call__(self, event: Event) -> None:
        """Write at the end; a page that cannot be written must not spoil a run that has ended well."""
        self.unwritten = event.trainer.books.folder
        if event.kind == "end" and self.unwritten:
            try:
                self.close()
            except Exception as error:
                event.trainer.emit("status", text=f"report.html was not written: {error}")

    def close(self) -> None:
        """Write the page of a run that has gone on since the last one."""
        from lowmem.report.page import write_report

        folder, self.unwritten = self.unwritten, None
        if folder:
            write_report(folder)
