"""The folder of tokenised data sets: whole entries by key, unfinished work that can go on, and a bound."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from lowmem.data.store import PROGRESS, DamagedError, Progress
from lowmem.errors import UserError

MAX_BYTES = 20 << 30  # of all entries; the one used last longest ago goes first
KEEP_UNFINISHED = 7 * 24 * 3600  # seconds
SPILL = "spill"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(rf"([0-9a-f]{{64}}|{SPILL})\.partial-[0-9a-f]{{8}}")


class Work:
    """A folder that this process alone writes to, until it is published or dropped.

    A lock that ends with the process tells it from work that was left behind.

    Attributes:
        folder: where to write.
        progress: what is in it already, checked; None: nothing.
    """

    def __init__(self, folder: Path, lock: int, progress: Progress | None = None):
        self.folder, self.lock, self.progress = folder, lock, progress

    def publish(self, key: str) -> None:
        """Make it the entry of a key, whole or not at all; a bound on all entries is kept."""
        entry = self.folder.parent / key
        try:
            self.folder.rename(entry)
        except OSError:  # another process was faster, with the same arrays
            shutil.rmtree(self.folder, ignore_errors=True)
        self.leave()
        prune(entry.parent, keep=entry)

    def drop(self) -> None:
        """Delete the folder; arrays mapped from it live on."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Give up the lock; what is in the folder stays."""
        os.close(self.lock)


def cache_folder(wanted: str | None) -> Path:
    """The folder, made where it is missing.

    Raises:
        UserError: it cannot be made, or not be written to.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lowmem" / "tokenized"
    folder = (Path(wanted) if wanted else default).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    return folder


def find(folder: Path, key: str) -> Progress | None:
    """The entry of a key, its files compared with their checksums; a damaged one is deleted."""
    entry = folder / key
    if not entry.is_dir():
        return None
    try:
        progress = Progress.read(entry / PROGRESS)
        progress.check(entry, whole=True)
    except DamagedError:
        shutil.rmtree(entry, ignore_errors=True)
        return None
    with contextlib.suppress(OSError):  # a cache that may only be read is fine here
        os.utime(entry / PROGRESS)
    return progress


def begin(folder: Path, key: str = SPILL) -> Work:
    """A folder to write to: unfinished work of the same key where there is some, else a new one.

    Raises:
        UserError: it cannot be made.
    """
    for left in folder.glob(f"{key}.partial-*") if key != SPILL else ():
        lock = _claim(left)
        if lock is None:
            continue
        try:
            progress = Progress.read(left / PROGRESS)
            progress.check(left, whole=False)
        except DamagedError:
            Work(left, lock).drop()
        else:
            return Work(left, lock, progress)
    name = secrets.token_hex(4)
    hidden, new = folder / f".{name}", folder / f"{key}.partial-{name}"
    try:
        hidden.mkdir()
        lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else will claim it, either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(new)  # locked before anyone sees it
    except OSError as error:
        raise _unusable(folder, error) from None
    return Work(new, lock)


def prune(folder: Path, keep: Path | None = None) -> None:
    """Delete the entries used longest ago until all are within `MAX_BYTES`, and old unfinished work."""
    left = MAX_BYTES - (_size(keep) if keep else 0)
    for entry in sorted(_entries(folder), key=_last_used, reverse=True):
        if entry != keep:
            left -= _size(entry)
            if left < 0:
                shutil.rmtree(entry, ignore_errors=True)
    for work in folder.iterdir():
        spill = work.name.startswith(SPILL)  # nobody goes on with one
        if _UNFINISHED.fullmatch(work.name) and (spill or time.time() - _last_used(work) > KEEP_UNFINISHED):
            lock = _claim(work)
            if lock is not None:
                Work(work, lock).drop()


def _entries(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if _ENTRY.fullmatch(path.name))


def _last_used(entry: Path) -> float:
    with contextlib.suppress(OSError):
        return max(file.stat().st_mtime for file in [entry, *entry.glob("*.json")])
    return 0.0


def _size(entry: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in entry.iterdir())
    return 0


def _claim(work: Path) -> int | None:
    """The lock of a folder whose process has ended; None where it has not, or the folder is gone."""
    try:
        lock = os.open(work / "lock", os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (work / "lock").stat()):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _unusable(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder}: tokenised rows cannot be kept there ({error.strerror}); set data.cache_dir to another")
