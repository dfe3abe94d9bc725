"""A run as its folder tells it. Nothing is imported or executed that the folder names."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem.errors import UserError
from lowmem.memory.timeline import COMPARISON
from lowmem.memory.timeline import FILE as TIMELINE
from lowmem.report.thin import Point
from lowmem.run_folder import RunFolder
from lowmem.yaml_lines import parse_yaml


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds, whatever state the run is in.

    Attributes:
        path: the folder.
        settings: the resolved recipe.
        versions: of what computed.
        lines: what was logged, in order; what a resumed run has done again is there once.
        resumed_at: the steps after which a resumed process went on.
        result: `result.json`; empty while there is none.
        timeline: `memory_timeline.json`; empty where no step was measured.
        memory: `memory.json`, measured beside predicted; empty where nothing was compared.
        answers: held-out prompts with the answers before and after.
        checkpoints: folder name -> `trainer.json`.
        has_model: the result is there.
    """

    path: Path
    settings: dict[str, Any]
    versions: dict[str, Any]
    lines: list[dict[str, Any]]
    resumed_at: list[int]
    result: dict[str, Any]
    timeline: dict[str, Any]
    answers: list[dict[str, Any]]
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    has_model: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.absolute().name

    @property
    def last_step(self) -> int:
        """The last step that anything was written about."""
        return max([int(self.lines[-1]["step"]) if self.lines else 0, int(self.result.get("steps") or 0)])

    @property
    def state(self) -> str:
        """`finished`, `stopped` (early, and whole), or `unfinished` (going on, or cut off)."""
        if not self.result or int(self.result.get("steps") or 0) < self.last_step:
            return "unfinished"
        return "stopped" if self.result.get("stopped") else "finished"

    def series(self, event: str, key: str, over: str = "step") -> list[Point]:
        """The points of one number; `over` may be `step`, `tokens` or `seconds`."""
        lines = [line for line in self.lines if line["event"] == event and key in line and over in line]
        return [(_value(line[over]), _value(line[key])) for line in lines if _is_number(line[key])]


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder, finished or not.

    Raises:
        UserError: it is none, or one of its files is damaged.
    """
    folder = RunFolder.open(path)
    file = folder.path / "recipe.yaml"
    settings = parse_yaml(file.read_bytes().decode("utf-8", "surrogateescape"), str(file)).value
    lines, resumed_at = _joined(folder.metrics())
    result = _json(folder.path / "result.json")
    return RunRecord(
        path=folder.path,
        settings=settings if isinstance(settings, dict) else {},
        versions=_json(folder.path / "versions.json"),
        lines=lines,
        resumed_at=resumed_at,
        result=result,
        timeline=_json(folder.path / TIMELINE),
        answers=_answers(folder.path / "answers.jsonl") or list(result.get("samples") or []),
        checkpoints={c.name: _json(c / "trainer.json") for c in folder.checkpoints()},
        memory=_json(folder.path / COMPARISON),
        has_model=(folder.path / "model").is_dir(),
    )


def _joined(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """One history: a step that a resumed process has done again replaces what was written first; seconds add up."""
    kept: list[dict[str, Any]] = []
    resumed_at: list[int] = []
    before, last = 0.0, 0.0  # seconds of earlier processes, of this one so far
    for line in lines:
        if not isinstance(line.get("step"), int) or "event" not in line:
            continue
        step = line["step"]
        seconds = line.get("seconds")
        restarted = isinstance(seconds, int | float) and seconds < last
        if kept and (restarted or step < kept[-1]["step"]):
            while kept and kept[-1]["step"] >= step:
                kept.pop()
            resumed_at.append(kept[-1]["step"] if kept else 0)
            before = max((float(k["seconds"]) for k in kept if "seconds" in k), default=0.0)
            last = 0.0
        if isinstance(seconds, int | float):
            last = float(seconds)
            line = {**line, "seconds": before + last}
        kept.append(line)
    return kept, sorted(set(resumed_at))


def _answers(file: Path, most: int = 2000) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    found = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line, _ in zip(lines, range(most), strict=False):
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError):  # cut off by a crash
                continue
    return found


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: is no mapping")
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _value(value: Any) -> float:
    """A logged value; NaN and infinities were written as text."""
    try:
        return float(value)
    except ValueError:
        return math.nan
