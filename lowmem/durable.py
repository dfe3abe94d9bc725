"""Files and folders that are whole or not there, whatever happens to the process or the disk that writes them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowmem.errors import UserError

MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>partial|replaced)-(?P<process>\d+)$")


class DamagedError(UserError):
    """A folder does not hold what its manifest says."""


@contextmanager
def new_folder(folder: Path, needed: int | None = None, sealed: bool = False) -> Iterator[Path]:
    """An empty folder to write into; on leaving it is synced and takes the place of `folder`, also of one that exists.

    Args:
        folder: where the result is to lie.
        needed: bytes that will be written, for the message of a full disk.
        sealed: list every file with size and checksum in a manifest, which `verify` reads.

    Raises:
        UserError: the disk is full or refuses; nothing is left behind, and what lay in `folder` still does.
    """
    partial = _beside(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    with disk_errors(folder, needed):
        try:
            partial.mkdir(parents=True)
            yield partial
            if sealed:
                seal(partial)
            for file in partial.rglob("*"):
                sync(file)
            sync(partial)
            _put(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file, in UTF-8, at once.

    Raises:
        UserError: the disk is full or refuses; what lay there still does.
    """
    partial = _beside(path, "partial")
    with disk_errors(path, len(text)):
        try:
            partial.write_text(text, encoding="utf-8")
            sync(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file; a kill may cut it, a later line never joins it on the same line.

    Raises:
        UserError: the disk is full or refuses.
    """
    with disk_errors(path, len(line)), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """What the operating system says about a write that failed, as one line for the user.

    Raises:
        UserError: in place of an `OSError`, and of what torch and safetensors raise in its place.
    """
    try:
        yield
    except Exception as error:
        if (number := _errno(error)) is None:
            raise
        text = f"{path.absolute()} could not be written: {os.strerror(number)}"
        if number not in _FULL:
            raise UserError(text) from error
        there = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        sizes = f"{shutil.disk_usage(there).free:,} bytes are free"
        if needed is not None:
            sizes = f"it needs {needed:,} bytes, {sizes}"
        raise UserError(
            f"{text} ({sizes}). What was saved before is whole: make room, or lower training.save_total_limit, and go "
            "on with --resume"
        ) from error


# the disk, the quota, or the largest size of a file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _errno(error: BaseException | None) -> int | None:
    """The number the system gave; torch hides it in the context of a RuntimeError, safetensors in its text."""
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ == "SafetensorError" and (found := re.search(r"os error (\d+)", str(error))):
        return int(found[1])
    return _errno(error.__context__) if type(error) is RuntimeError else None


# -- manifests --------------------------------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Write the manifest: size in bytes and SHA-256 of every file that lies there now."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    listed = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps({"files": listed}, indent=1) + "\n", encoding="utf-8")


def verify(folder: Path, contents: bool = True) -> None:
    """Compare a folder with its manifest.

    Args:
        folder: one that was sealed.
        contents: read every file and compare checksums; otherwise only sizes.

    Raises:
        DamagedError: which file is missing or differs.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in listed.items()}
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{MANIFEST} cannot be read") from None
    for name, (size, checksum) in expected.items():
        try:
            found = (folder / name).stat().st_size
            same = not contents or found != size or _sha256(folder / name) == checksum
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from None
        if found != size:
            raise DamagedError(f"{name} has {found:,} bytes instead of {size:,}")
        if not same:
            raise DamagedError(f"{name} does not match its checksum")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- leftovers --------------------------------------------------------------------------------------------------------


def sweep(folder: Path) -> list[str]:
    """Take away what killed processes left half-made, and put back what they were about to replace.

    Returns:
        What was done, a sentence each.
    """
    done = []
    for path in sorted(folder.iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or _is_alive(int(found["process"])):
            continue
        place = folder / found["name"]
        with disk_errors(path):
            if found["kind"] == "replaced" and not place.exists():
                path.rename(place)
                done.append(f"{place.name} was about to be replaced by a process that is gone; it is back in its place")
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            done.append(f"{path.name} was left half-made by a process that is gone; it is removed")
    return done


def remove(folder: Path) -> None:
    """Delete a folder; killed on the way, it leaves a name that does not count."""
    doomed = _beside(folder, "partial")
    with disk_errors(folder):
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _put(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        sync(folder.parent)
        return
    old = _beside(folder, "replaced")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        if not folder.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{os.getpid()}")


def _is_alive(process: int) -> bool:
    if process == os.getpid():  # who sweeps is writing nothing: another process had this number before
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- one writer -------------------------------------------------------------------------------------------------------


class Lock:
    """One process at a time writes to a folder; the system lets go of the lock when the process ends, however it ends.

    Attributes:
        notice: what to tell the user where the file system has no locks; else null.

    Raises:
        UserError: another process (or another trainer of this one) holds it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self.notice: str | None = None
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                self.notice = (
                    f"{folder.absolute()}: its file system has no locks ({error.strerror}); nothing keeps a second "
                    "process from training in this folder"
                )
                return
            holder = os.read(self._handle, 200).decode("utf-8", "replace").strip()
            os.close(self._handle)
            raise UserError(
                f"{folder.absolute()}: {holder or 'another process'} is training in this folder; wait for its end, "
                "or stop it"
            ) from None
        with suppress(OSError):  # only who holds it is told here, and a full disk must not hide its own message
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Let others in."""
        os.close(self._handle)
