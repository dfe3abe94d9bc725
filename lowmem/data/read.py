"""Sources of rows: files, weighted lists of files, data sets, plain lists and hub ids, read one row at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from lowmem.config import WeightedPath
from lowmem.errors import UserError

Row: TypeAlias = Mapping[str, Any]
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt",)
END = object()


class BadRowError(UserError):
    """A row that cannot be used because of what stands in it.

    Attributes:
        reason: a few words under which such rows are counted.
    """

    def __init__(self, where: str, message: str, reason: str):
        super().__init__(f"{where}: {message}")
        self.reason = reason


OnBad: TypeAlias = Callable[[BadRowError], None]


def stop(error: BadRowError) -> None:
    """Stop at a bad row (the default)."""
    raise error


def read_rows(source: Any, on_bad: OnBad = stop) -> Iterator[tuple[Row, str]]:
    """Yield every row of a source, and where it stands.

    Args:
        source: a path (`.jsonl`, `.json`, `.txt`), a list of paths and `WeightedPath`s, a `datasets.Dataset`, any
            iterable of dicts, or a hub id (its split `train`).
        on_bad: called with a row that is no JSON object; it raises, or returns to go on with the next row.

    Yields:
        (row, where): `where` is `file:line` (physical line), `file[index]` (JSON array) or `row N` (anything else).

    Raises:
        UserError: no such source, a file that is not UTF-8, or whatever `on_bad` raises.
    """
    if isinstance(source, str | Path | WeightedPath):
        yield from _weighted(source, on_bad)
        return
    if isinstance(source, Mapping):
        splits = ", ".join(map(str, source))
        raise UserError(f"a mapping is no list of rows; choose one of its parts (data['train']); it has: {splits}")
    try:
        rows = iter(source)
    except TypeError:
        raise UserError(f"rows come from a path, a list or a data set; got {type(source).__name__}") from None
    first = next(rows, END)
    if isinstance(first, str | Path | WeightedPath):
        for part in chain([first], rows):
            if not isinstance(part, str | Path | WeightedPath):
                raise UserError(f"a list of files holds paths only; got {type(part).__name__} among them")
            yield from _weighted(part, on_bad)
    elif first is not END:
        for number, row in enumerate(chain([first], rows)):
            yield from _object(row, f"row {number}", on_bad)


def _weighted(part: str | Path | WeightedPath, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    """All passes over one file: the whole ones, then an evenly spaced part."""
    path, weight = (part.path, part.weight) if isinstance(part, WeightedPath) else (part, 1.0)
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"{path}: a weight is a number above 0; got {weight}")
    # the decimal the user wrote, not its binary neighbour: 0.7 of 10 rows are 7
    share = Fraction(str(weight)).limit_denominator(10**6)
    passes, share = divmod(share, 1)
    for _ in range(int(passes)):
        yield from _one_source(path, on_bad)
    if share:
        for number, found in enumerate(_one_source(path, on_bad)):
            if math.floor((number + 1) * share) > math.floor(number * share):
                yield found


def _one_source(name: str | Path, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    path = Path(name).expanduser()
    if path.is_file():
        return _file(path, on_bad)
    if path.is_dir():
        return _saved(path, on_bad)
    suffix = path.suffix.lower()
    looks_like_id = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if not looks_like_id or suffix in (*JSON_SUFFIXES, *TEXT_SUFFIXES, ".csv", ".parquet"):
        raise UserError(f"{name}: no such file ({path.absolute()})")
    return _hub(str(name), on_bad)


def _file(path: Path, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return _documents(path)
    if suffix not in JSON_SUFFIXES:
        raise UserError(f"{path}: files end in {', '.join((*JSON_SUFFIXES, *TEXT_SUFFIXES))}; got '{path.suffix}'")
    return _array(path, on_bad) if _starts_array(path) else _json_lines(path, on_bad)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their physical numbers, whatever the locale says."""
    # bytes are split at \n alone; text mode would also split at a lone \r and shift the numbers
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from None
            if line.strip():
                yield number, line.rstrip("\r\n")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    byte = error.object[error.start]
    return UserError(f"{path}:{line}: the file is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8")


def _documents(path: Path) -> Iterator[tuple[Row, str]]:
    for number, line in _lines(path):
        yield {"text": line}, f"{path}:{number}"


def _json_lines(path: Path, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            on_bad(BadRowError(where, f"not JSON ({error}); one object per line is expected", "not JSON"))
            continue
        yield from _object(row, where, on_bad)


def _starts_array(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[")


def _array(path: Path, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    raw = path.read_bytes()
    try:
        rows = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.object[: error.start].count(b"\n") + 1, error) from None
    except json.JSONDecodeError as error:
        # no row of a broken array can be told from the next, so there is nothing to skip
        raise UserError(f"{path}:{error.lineno}: not JSON ({error}); the whole array is unreadable") from None
    for index, row in enumerate(rows):
        yield from _object(row, f"{path}[{index}]", on_bad)


def _object(row: Any, where: str, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    if isinstance(row, Mapping):
        yield row, where
    else:
        on_bad(BadRowError(where, f"a row is an object with named fields; got {type(row).__name__}", "not an object"))


def _saved(path: Path, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    """A folder written by `Dataset.save_to_disk`."""
    if not (path / "dataset_info.json").is_file():
        raise UserError(f"{path}: a folder without a saved data set; name the files in it")
    import datasets

    return read_rows(datasets.load_from_disk(str(path)), on_bad)


def _hub(name: str, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    import datasets

    try:
        data = datasets.load_dataset(name, split="train")
    except Exception as error:  # the loader raises whatever its many back ends raise
        tried = f"{name}: not found locally ({Path(name).absolute()}) and "
        said = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, ConnectionError | TimeoutError) or "offline" in said.lower():
            raise UserError(f"{tried}the hub cannot be reached (offline?): {said}") from None
        raise UserError(f"{tried}not on the hub: {said}") from None
    return read_rows(data, on_bad)
