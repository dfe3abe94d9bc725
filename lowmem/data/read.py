"""Sources of rows: files, folders, patterns, weighted lists, data sets, plain lists and hub ids, a row at a time."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from lowmem.config import WeightedPath
from lowmem.data.files import READERS, BadRowError, OnBad, Row, Rows, kind_of, read_file, row_of, whole_text
from lowmem.errors import UserError

__all__ = ["BadRowError", "OnBad", "Row", "data_files", "read_rows", "stop"]
END = object()


def stop(error: BadRowError) -> None:
    """Stop at a bad row (the default)."""
    raise error


def read_rows(source: Any, on_bad: OnBad = stop) -> Rows:
    """Yield every row of a source, and where it stands.

    Args:
        source: a file, a folder, a pattern (`data/*.jsonl`), a hub id, a `WeightedPath` with more about one of them, a
            list of those, a `datasets.Dataset` or `IterableDataset`, or any iterable of dicts.
        on_bad: called with a row that cannot be read; it raises, or returns to go on with the next row.

    Yields:
        (row, where): `where` is `file:line` (physical line), `file[index]` (JSON array, Parquet), the file itself (a
        whole file as one document) or `row N` (anything else).

    Raises:
        UserError: no such source, a file that cannot be read as a whole, or whatever `on_bad` raises.
    """
    if isinstance(source, str | Path | WeightedPath):
        yield from _weighted(source, on_bad)
        return
    if isinstance(source, Mapping):
        splits = ", ".join(map(str, source))
        raise UserError(f"a mapping is no list of rows; choose one of its parts (data['train']); it has: {splits}")
    try:
        # by number: a data set of torch need not say where it ends
        numbered = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not hasattr(source, "__iter__")
        rows = map(source.__getitem__, range(len(source))) if numbered else iter(source)
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
            yield from row_of(row, f"row {number}", on_bad)


def data_files(path: Path) -> list[Path]:
    """The data files in a folder and in those below it, sorted by name; hidden ones (`.x`, `_x`) are left out.

    Raises:
        UserError: there are none.
    """
    inside = sorted(path.rglob("*"))
    found = [
        file
        for file in inside
        if kind_of(file) in READERS
        and file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    ]
    if not found:
        raise UserError(f"{path}: a folder without a saved data set and without data files ({', '.join(READERS)})")
    return found


def _weighted(part: str | Path | WeightedPath, on_bad: OnBad) -> Rows:
    """All passes over one source: the whole ones, then an evenly spaced part."""
    part = part if isinstance(part, WeightedPath) else WeightedPath(str(part))
    # the decimal the user wrote, not its binary neighbour: 0.7 of 10 rows are 7
    share = Fraction(str(part.weight)).limit_denominator(10**6)
    passes, share = divmod(share, 1)
    for _ in range(int(passes)):
        yield from _one_source(part, on_bad)
    if share:
        number = 0
        for number, found in enumerate(_one_source(part, on_bad), 1):
            if math.floor(number * share) > math.floor((number - 1) * share):
                yield found
        if number and not passes and number * share < 1:
            raise UserError(f"{part.path}: weight {part.weight} of its {number} rows is not one row; raise it")


def _one_source(part: WeightedPath, on_bad: OnBad) -> Rows:
    try:
        path = Path(part.path).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{part.path[:60]}: cannot be a path ({getattr(error, 'strerror', None) or error})") from None
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved(path, part, on_bad)
    files = _files(part.path, path)
    if files is None:
        if part.whole_file:
            raise UserError(f"{part.path}: whole_file is for files; this would be a data set of the hub")
        return _hub(part, on_bad)
    for name in ("revision", "name", "split"):
        if getattr(part, name) is not None:
            raise UserError(f"{part.path}: '{name}' is for data sets of the hub, and this is a file or folder")
    read = whole_text if part.whole_file else read_file
    return chain.from_iterable(read(file, on_bad) for file in files)


def is_hub(part: WeightedPath) -> bool:
    """Whether a source is a data set of the hub: no file, no folder, no pattern.

    Raises:
        UserError: nothing is there, and it is no hub id.
    """
    path = Path(part.path).expanduser()
    return not path.is_dir() and _files(part.path, path) is None


def _files(name: str, path: Path) -> list[Path] | None:
    """What a path or pattern stands for; None: it can only be a hub id.

    Raises:
        UserError: nothing is there, and it is no hub id.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        return data_files(path)
    if glob.has_magic(str(path)):
        found = [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]
        if not found:
            raise UserError(f"{name}: no file matches ({path.absolute()})")
        return found
    if kind_of(path) in READERS or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(f"{name}: no such file ({path.absolute()})")
    return None


def _saved(path: Path, part: WeightedPath, on_bad: OnBad) -> Rows:
    """A folder written by `save_to_disk`; `split` chooses from several data sets."""
    import datasets

    for name in ("revision", "name", "whole_file"):
        if getattr(part, name):
            raise UserError(f"{path}: '{name}' has no effect on a saved data set")
    data = datasets.load_from_disk(str(path))
    if part.split is not None:
        if not isinstance(data, Mapping) or part.split not in data:
            known = ", ".join(data) if isinstance(data, Mapping) else "no splits"
            raise UserError(f"{path}: no split '{part.split}'; it has {known}")
        data = data[part.split]
    elif isinstance(data, Mapping):
        raise UserError(f"{path}: choose a split: {{path: ..., split: {next(iter(data))}}}; it has {', '.join(data)}")
    return read_rows(data, on_bad)


def _hub(part: WeightedPath, on_bad: OnBad) -> Rows:
    import datasets

    given = {"name": part.name, "revision": part.revision}
    try:
        chosen = {key: value for key, value in given.items() if value is not None}
        data = datasets.load_dataset(part.path, split=part.split or "train", **chosen)
    except Exception as error:  # the loader raises whatever its many back ends raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        tried = f"{part.path}: not found locally ({Path(part.path).absolute()}) and "
        if isinstance(error, ConnectionError | TimeoutError) or "offline" in said.lower():
            raise UserError(f"{tried}the hub cannot be reached (offline?): {said}") from None
        if isinstance(error, ValueError):  # a configuration or split that is not there
            raise UserError(f"{part.path}: {said}") from None
        raise UserError(f"{tried}not on the hub: {said}") from None
    return read_rows(data, on_bad)
