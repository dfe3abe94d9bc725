"""Data files, read one row at a time: JSON lines and arrays, text, CSV and Parquet, plain or gzip'd."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from lowmem.errors import UserError

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Iterator[tuple[Row, str]]
ROWS_AT_ONCE = 256
# a line beyond it is a file without line breaks, or a quote that is never closed; it must not fill the memory
LONGEST_LINE = 64 * 1024**2


class BadRowError(UserError):
    """A row that cannot be used because of what stands in it.

    Attributes:
        reason: a few words under which such rows are counted.
    """

    def __init__(self, where: str, message: str, reason: str):
        # one line that can be printed, whatever the row holds
        text = f"{where}: {' '.join(message.split())}"
        super().__init__(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        self.where, self.message, self.reason = where, message, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.message, self.reason)


OnBad: TypeAlias = Callable[[BadRowError], None]


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read: `.csv` for `rows.csv.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(path: Path, on_bad: OnBad) -> Rows:
    """The rows of one file, and where each of them stands.

    Raises:
        UserError: a file of another kind, one that cannot be read as a whole, or whatever `on_bad` raises.
    """
    kind = kind_of(path)
    if kind not in READERS:
        raise UserError(f"{path}: files end in {', '.join(READERS)} (or that and .gz); got '{path.suffix}'")
    return _guarded(path, READERS[kind](path, on_bad))


def whole_text(path: Path, on_bad: OnBad) -> Rows:
    """A file of any kind as one document."""
    return _guarded(path, _whole(path, on_bad))


def row_of(value: Any, where: str, on_bad: OnBad) -> Rows:
    """A value as a row, if it is an object."""
    if isinstance(value, Mapping):
        yield value, where
    else:
        on_bad(BadRowError(where, f"a row is an object with named fields; got {type(value).__name__}", "not an object"))


def _guarded(path: Path, rows: Rows) -> Rows:
    """The same rows; what the system says against the file becomes one line."""
    try:
        yield from rows
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: no whole gzip file ({error}); pack it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _raw_lines(path: Path, on_bad: OnBad) -> Iterator[tuple[int, bytes]]:
    """Lines with their physical numbers, without a byte order mark."""
    # bytes are split at \n alone; text mode would also split at a lone \r and shift the numbers
    with _open(path) as file:
        number = 0
        while raw := file.readline(LONGEST_LINE):
            number += 1
            if number == 1:
                raw = _without_mark(path, raw)
            if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                while (more := file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
                    pass
                size = f"a line of more than {LONGEST_LINE // 1024**2} MiB"
                on_bad(BadRowError(f"{path}:{number}", f"{size}; is it one row?", "huge line"))
                continue
            yield number, raw


def _without_mark(path: Path, start: bytes) -> bytes:
    """The start of a file without the byte order mark of UTF-8."""
    for mark in (b"\xff\xfe", b"\xfe\xff"):
        if start.startswith(mark):
            raise UserError(f"{path}:1: the file is UTF-16, not UTF-8; save it as UTF-8")
    return start.removeprefix(b"\xef\xbb\xbf")


def _lines(path: Path, on_bad: OnBad) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, whatever the locale says."""
    for number, raw in _raw_lines(path, on_bad):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            on_bad(_not_utf8(path, number, error))
            continue
        if line.strip():
            yield number, line.rstrip("\r\n")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> BadRowError:
    guess = ""
    around = error.object[max(error.start - 2000, 0) : error.start + 2000]
    if any("가" <= char <= "힣" for char in around.decode("cp949", "ignore")):
        guess = ", perhaps CP949"
    message = f"the file is not UTF-8 (byte 0x{error.object[error.start]:02x}{guess}); save it as UTF-8"
    return BadRowError(f"{path}:{line}", message, "not UTF-8")


def _documents(path: Path, on_bad: OnBad) -> Rows:
    for number, line in _lines(path, on_bad):
        yield {"text": line}, f"{path}:{number}"


def _whole(path: Path, on_bad: OnBad) -> Rows:
    with _open(path) as file:
        raw = _without_mark(path, file.read())
    try:
        yield {"text": raw.decode("utf-8")}, str(path)
    except UnicodeDecodeError as error:
        on_bad(_not_utf8(path, raw[: error.start].count(b"\n") + 1, error))


def _json(path: Path, on_bad: OnBad) -> Rows:
    """JSON lines, or one array."""
    with _open(path) as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    yield from _array(path, on_bad) if head.startswith(b"[") else _json_lines(path, on_bad)


def _json_lines(path: Path, on_bad: OnBad) -> Rows:
    for number, line in _lines(path, on_bad):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            on_bad(BadRowError(where, f"not JSON ({error}); one object per line is expected", "not JSON"))
            continue
        yield from row_of(row, where, on_bad)


def _array(path: Path, on_bad: OnBad) -> Rows:
    with _open(path) as file:
        raw = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        rows = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(str(_not_utf8(path, raw[: error.start].count(b"\n") + 1, error))) from None
    except (ValueError, RecursionError) as error:
        # no row of a broken array can be told from the next, so there is nothing to skip
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(f"{path}:{line}: not JSON ({error}); the whole array is unreadable") from None
    for index, row in enumerate(rows):
        yield from row_of(row, f"{path}[{index}]", on_bad)


def _table(path: Path, on_bad: OnBad) -> Rows:
    """CSV (or TSV) with a header; `where` is the line on which a row starts. An empty field is null."""
    numbers: list[int] = []  # of the lines that make up the row at hand

    def lines() -> Iterator[str]:
        for number, raw in _raw_lines(path, on_bad):
            numbers.append(number)
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError as error:
                # the reader must not lose its place, so the row is read with the bytes kept as half characters
                broken.append(_not_utf8(path, number, error))
                yield raw.decode("utf-8", "surrogateescape")

    broken: list[BadRowError] = []
    csv.field_size_limit(LONGEST_LINE)  # Python's own limit of 128 KiB is a global of the module
    reader = csv.reader(lines(), delimiter="\t" if kind_of(path) == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    while True:
        numbers.clear()
        broken.clear()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            where = f"{path}:{numbers[0] if numbers else 1}"
            if "unexpected end of data" in str(error):
                raise UserError(f"{where}: a quote opens in this row and is never closed") from None
            bad = BadRowError(where, f"not CSV ({error})", "not CSV")
            if header is None:
                raise UserError(str(bad)) from None
            on_bad(bad)
            continue
        if fields is None:
            return
        if not fields:
            continue
        where = f"{path}:{numbers[0]}"
        if header is None:
            header = _header(fields, where, broken)
        elif broken:
            on_bad(broken[0])
        elif len(fields) != len(header):
            message = f"{len(fields)} fields, and the header has {len(header)} columns"
            on_bad(BadRowError(where, message, "wrong number of fields"))
        else:
            yield {name: field or None for name, field in zip(header, fields, strict=True)}, where


def _header(fields: list[str], where: str, broken: list[BadRowError]) -> list[str]:
    if broken:
        raise UserError(str(broken[0]))
    twice = [name for name in fields if fields.count(name) > 1]
    if twice:
        raise UserError(f"{where}: the column '{twice[0]}' stands twice in the header")
    return fields


def _parquet(path: Path, on_bad: OnBad) -> Rows:
    """Batch by batch; `where` counts rows from 0."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    with tempfile.TemporaryFile() as unpacked:
        if path.suffix.lower() == ".gz":  # a Parquet file is read from its end
            with _open(path) as packed:
                shutil.copyfileobj(packed, unpacked)
        try:
            file = ParquetFile(unpacked if path.suffix.lower() == ".gz" else path)
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError):
                    rows = [_row_alone(batch, index) for index in range(batch.num_rows)]
                for row in rows:
                    where = f"{path}[{number}]"
                    number += 1
                    if isinstance(row, Exception):
                        reason = "not UTF-8" if isinstance(row, UnicodeDecodeError) else "unreadable value"
                        on_bad(BadRowError(where, f"a value cannot be read ({row})", reason))
                    else:
                        yield row, where
        except pyarrow.ArrowException as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{path}: cannot be read as Parquet: {first}") from None


def _row_alone(batch: Any, index: int) -> Any:
    """One row, or why it cannot be read: text that is not UTF-8, or a date beyond the calendar."""
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


READERS: dict[str, Callable[[Path, OnBad], Rows]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".txt": _documents,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
