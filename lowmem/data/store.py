"""Flat arrays that grow chunk by chunk: in memory while they are small, else in files that are mapped when done."""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lowmem.data.chunks import Chunk
from lowmem.data.report import DataReport
from lowmem.errors import UserError

COLUMNS: dict[str, type[np.generic]] = {
    "input_ids": np.int32,
    "labels": np.int32,
    "offsets": np.int64,
    "loss_weights": np.float32,
    "weight_offsets": np.int64,
}
PROGRESS = "progress.json"
COMMIT_EVERY = 5.0  # seconds
_PIECE = 1 << 22  # bytes read at once, so that a check does not need a file in memory


class DamagedError(Exception):
    """Files that are not what was written."""


@dataclass
class Progress:
    """What is in the columns so far.

    Attributes:
        items: rows of the source that have been looked at.
        report: their counts.
        borderless: where the first row stands whose answer cannot be told from its prompt.
        sizes: bytes of each column.
        checksums: CRC-32 of each column.
    """

    items: int = 0
    report: DataReport = field(default_factory=DataReport)
    borderless: str = ""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    checksums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))

    def write(self, path: Path) -> None:
        """Write it so that `path` is either the old one or the new one."""
        body = json.dumps(asdict(self))
        partial = path.with_name(f"{path.name}.new")
        partial.write_bytes(f"{zlib.crc32(body.encode()):08x}\n{body}\n".encode())
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Raises DamagedError where it is not whole."""
        try:
            checksum, _, body = path.read_bytes().partition(b"\n")
            if int(checksum, 16) != zlib.crc32(body.strip()):
                raise DamagedError(f"{path}: checksum")
            values = json.loads(body)
            return cls(**{**values, "report": DataReport(**values["report"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"{path}: {error}") from None

    def check(self, folder: Path, *, whole: bool) -> None:
        """Compare the columns in a folder with what was written.

        Args:
            folder: where they lie.
            whole: nothing may follow what was written.

        Raises:
            DamagedError: they differ.
        """
        for name, size in self.sizes.items():
            try:
                with (folder / name).open("rb") as file:
                    if whole and os.fstat(file.fileno()).st_size != size:
                        raise DamagedError(f"{folder / name}: size")
                    found, left = 0, size
                    while left and (piece := file.read(min(left, _PIECE))):
                        found, left = zlib.crc32(piece, found), left - len(piece)
            except OSError as error:
                raise DamagedError(f"{folder / name}: {error}") from None
            if left or found != self.checksums[name]:
                raise DamagedError(f"{folder / name}: checksum")


class Store:
    """Appends chunks to columns, and remembers how far they are whole.

    Args:
        folder: where the columns lie; None keeps them in memory.
        progress: what is in the folder already.
    """

    def __init__(self, folder: Path | None = None, progress: Progress | None = None):
        self.folder, self.progress = folder, progress or Progress()
        self.committed = time.monotonic()
        self.columns: dict[str, BinaryIO] = {name: self._open(name) for name in COLUMNS}
        self.last = {name: self._last(name) for name in ("offsets", "weight_offsets")}
        if not self.progress.sizes["offsets"]:
            zero = np.zeros(1, np.int64)
            self._append(Chunk(0), {"offsets": zero, "weight_offsets": zero})

    def append(self, chunk: Chunk) -> None:
        """Add the rows of a chunk.

        Raises:
            UserError: they cannot be written.
            Exception: what stopped the work in this chunk.
        """
        if chunk.error is not None:
            raise chunk.error
        arrays = {name: getattr(chunk, name) for name in ("input_ids", "labels", "loss_weights")}
        arrays["offsets"] = self.last["offsets"] + np.cumsum(chunk.lengths)
        arrays["weight_offsets"] = self.last["weight_offsets"] + np.cumsum(chunk.weight_lengths)
        self._append(chunk, arrays)
        if len(chunk.lengths):
            self.last = {name: int(arrays[name][-1]) for name in self.last}

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.progress.sizes.values())

    def move_to(self, folder: Path) -> None:
        """From memory into files."""
        assert self.folder is None
        memory, self.folder = self.columns, folder
        self.columns = {name: (folder / name).open("w+b") for name in COLUMNS}
        for name, column in memory.items():
            assert isinstance(column, io.BytesIO)
            self._write([(name, column.getbuffer())])

    def commit(self) -> None:
        """Write down how far the columns are whole, so that this work need not be done again."""
        folder = self.folder
        assert folder is not None
        self._guarded(lambda: [column.flush() for column in self.columns.values()])
        self._guarded(lambda: self.progress.write(folder / PROGRESS))
        self.committed = time.monotonic()

    def commit_now_and_then(self) -> None:
        """`commit`, every few seconds: after a kill, too, little is lost."""
        if time.monotonic() - self.committed > COMMIT_EVERY:
            self.commit()

    def finish(self) -> dict[str, NDArray[Any]]:
        """The columns as arrays; those in files are mapped, not read."""
        if self.folder is None:
            return {
                name: np.frombuffer(column.getbuffer(), COLUMNS[name])
                for name, column in self.columns.items()
                if isinstance(column, io.BytesIO)
            }
        self.close()
        return mapped(self.folder)

    def close(self) -> None:
        """Close the files."""
        self._guarded(lambda: [column.close() for column in self.columns.values()])

    def _append(self, chunk: Chunk, arrays: dict[str, NDArray[Any]]) -> None:
        before = self.progress
        sizes, checksums = dict(before.sizes), dict(before.checksums)
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array, COLUMNS[name]).data.cast("B") if array.size else b""
            self._write([(name, raw)])
            sizes[name] += len(raw)
            checksums[name] = zlib.crc32(raw, checksums[name])
        report = DataReport(**asdict(before.report))
        report.merge(chunk.report)
        borderless = before.borderless or chunk.borderless
        # one assignment: whenever the work is interrupted, `progress` fits a state of the columns
        self.progress = Progress(before.items + chunk.num_items, report, borderless, sizes, checksums)

    def _write(self, pieces: Iterable[tuple[str, Any]]) -> None:
        self._guarded(lambda: [self.columns[name].write(piece) for name, piece in pieces])

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except OSError as error:
            raise UserError(
                f"tokenised rows cannot be written to {self.folder}: {error.strerror}; make room there, or set "
                "data.cache_dir to another folder"
            ) from None

    def _open(self, name: str) -> BinaryIO:
        if self.folder is None:
            return io.BytesIO()
        size = self.progress.sizes[name]
        file = (self.folder / name).open("r+b" if size else "w+b")
        file.truncate(size)
        file.seek(size)
        return file

    def _last(self, name: str) -> int:
        size = self.progress.sizes[name]
        if not size:
            return 0
        column = self.columns[name]
        column.seek(size - 8)
        return int(np.frombuffer(column.read(8), np.int64)[0])


def mapped(folder: Path) -> dict[str, NDArray[Any]]:
    """The columns in a folder as read-only arrays; their pages are read when they are used."""
    found: dict[str, NDArray[Any]] = {}
    for name, dtype in COLUMNS.items():
        empty = (folder / name).stat().st_size == 0
        # a plain view: the memmap class would slow every slice down
        found[name] = np.empty(0, dtype) if empty else np.asarray(np.memmap(folder / name, dtype, mode="r"))
    return found
