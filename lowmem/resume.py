"""Where a run goes on: its folder, the checkpoints that may be taken, and what lies after the one that was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem import durable
from lowmem.checkpoint import numbered, step_of
from lowmem.errors import UserError

_CHECKPOINT = re.compile(r"checkpoint-\d+")
_OR_REPLACED = re.compile(r"checkpoint-\d+(\.replaced-\d+)?")  # a kill between two renames; `sweep` puts it back


@dataclass
class Source:
    """What `resume_from` means.

    Attributes:
        folder: the run folder that goes on.
        named: the checkpoint that was asked for by name; null: the newest whole one of the folder.
        notices: what to tell the user.
    """

    folder: Path
    named: Path | None = None
    notices: list[str] = field(default_factory=list)


def fresh_folder(wanted: Path) -> tuple[Path, durable.Lock]:
    """`wanted`, or with a number behind it where a run already lies there (nothing is overwritten); and its lock."""
    folder, number = wanted, 1
    if wanted.exists() and not wanted.is_dir():
        raise UserError(f"training.output_dir: {wanted.absolute()} is a file, not a folder")
    with durable.disk_errors(folder):
        while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
    return folder, durable.Lock(folder)


def find(resume_from: str | Path | bool, wanted: Path | None) -> Source:
    """The run that goes on: a checkpoint's, the one named, or (true) the newest that was to be written to `wanted`.

    Raises:
        UserError: there is no checkpoint.
    """
    if resume_from is True:
        return _newest_run(wanted)
    place = Path(str(resume_from)).expanduser()
    if not place.is_dir():
        raise UserError(f"resume: there is no folder {place.absolute()}")
    if _CHECKPOINT.fullmatch(place.absolute().name) or (place / "trainer.json").is_file():
        return Source(place.absolute().parent if place.parent == place else place.parent, place)
    if not _has_checkpoints(place):
        raise UserError(f"resume: {place.absolute()} is no checkpoint, and no run folder with checkpoints")
    return Source(place)


def _newest_run(wanted: Path | None) -> Source:
    if wanted is None:
        raise UserError("resume: training.output_dir is not set, so there is no newest checkpoint")
    name = re.compile(rf"{re.escape(wanted.name)}(?:-(\d+))?")
    runs = {int(found[1] or 1): p for p in wanted.parent.glob("*") if (found := name.fullmatch(p.name)) and p.is_dir()}
    for number in sorted(runs, reverse=True):
        if _has_checkpoints(runs[number]):
            source, newest = Source(runs[number]), runs[max(runs)]
            if newest != source.folder:
                source.notices.append(f"resume: {newest} has no checkpoint; the run in {source.folder} goes on")
            return source
    raise UserError(f"resume: there is no checkpoint in {wanted.absolute()} (set training.save_steps to write some)")


def load(source: Source, load_checkpoint: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that was taken, and its record; a damaged one is passed over with a notice, unless it was named.

    Raises:
        DamagedError: the one that was named is damaged.
        UserError: none is whole.
    """
    if source.named:
        return source.named, load_checkpoint(source.named)
    damages = []
    for path in reversed(numbered(source.folder)):
        try:
            record = load_checkpoint(path)
        except durable.DamagedError as damage:
            damages.append(str(damage))
            continue
        source.notices += [f"resume: {damage}; {path.name} is taken instead" for damage in damages]
        return path, record
    raise UserError(
        f"resume: no checkpoint in {source.folder.absolute()} is whole: {'; '.join(damages) or 'none left'}"
    )


def set_aside(folder: Path, step: int) -> list[str]:
    """Rename the checkpoints after `step`, damaged or of a course that is given up: they no longer count.

    Returns:
        A notice for each.
    """
    notices = []
    for path in numbered(folder):
        if step_of(path) > step:
            place, number = path.with_name(f"{path.name}.aside"), 1
            while place.exists():
                number += 1
                place = path.with_name(f"{path.name}.aside-{number}")
            path.rename(place)
            notices.append(
                f"resume: {path.name} lies after step {step}; it is kept as {place.name} and no longer counts"
            )
    return notices


def trim_metrics(file: Path, step: int) -> None:
    """Drop the lines after `step`, which are about to be written again, and one that a kill has cut."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    durable.write_text(file, "".join(kept))


def _has_checkpoints(folder: Path) -> bool:
    return any(_OR_REPLACED.fullmatch(p.name) for p in folder.glob("checkpoint-*"))
