"""The key of a tokenised data set: a digest of everything that decides what its token ids are."""

from __future__ import annotations

import datetime
import glob
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from decimal import Decimal
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lowmem.config import DataConfig, WeightedPath
from lowmem.data.chunks import read_items
from lowmem.data.read import read_rows
from lowmem.errors import UserError

CACHE_FROM = 4 << 20  # bytes of all files; below, tokenising is faster than looking
# what names the rows, or only says how the work is done; every other setting is part of the key
_NO_MATTER = ("train", "eval", "exact_match", "num_workers", "cache_dir", "streaming", "shuffle_buffer")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


class Fingerprint:
    """What a tokenised data set is known by.

    Attributes:
        key: 64 hexadecimal digits; None: this source is not cached.
    """

    def __init__(self, source: Any, tokenizer: Any, data: DataConfig, max_length: int):
        files = files_of(source)
        self.before = [_stamp(path) for _, path in files]
        self.files, self.key = files, None
        if not files and data.cache_dir is None:
            return
        if data.cache_dir is None and sum(size for size, _ in self.before) < CACHE_FROM:
            return
        model = _tokenizer_digest(tokenizer)
        if model is None and data.cache_dir is None:
            return
        if model is None:
            raise UserError(
                f"data.cache_dir: has no effect with a tokenizer of the class {type(tokenizer).__qualname__}, whose "
                "code is not transformers' own; drop it"
            )
        settings = {key: value for key, value in asdict(data).items() if key not in _NO_MATTER}
        rows = _files_digest(files) if files else _rows_digest(source, data)
        parts = [rows, model, settings, max_length, _versions(), _own_code()]
        self.key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def check(self) -> None:
        """Raises UserError where a file has changed since it was looked at."""
        for (_, path), before in zip(self.files, self.before, strict=True):
            if _stamp(path) != before:
                raise UserError(f"{path}: the file was changed while it was read; start again")


def files_of(source: Any) -> list[tuple[str, Path]]:
    """The files of a source, each with a label of what decides how it is read; empty where it has others than files."""
    parts = source if isinstance(source, list | tuple) else [source]
    found: list[tuple[str, Path]] = []
    for part in parts:
        if not isinstance(part, str | Path | WeightedPath):
            return []
        part = part if isinstance(part, WeightedPath) else WeightedPath(str(part))
        how = json.dumps({key: value for key, value in asdict(part).items() if key != "path"})
        path = Path(part.path).expanduser()
        if path.is_file():
            here = [(path.name, path)]
        elif path.is_dir():
            here = [(str(file.relative_to(path)), file) for file in sorted(path.rglob("*")) if file.is_file()]
        else:
            matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
            here = [(match, Path(match)) for match in matches if Path(match).is_file()]
        if not here:
            return []
        found += [(f"{how} {label}", file) for label, file in here]
    return found


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns


def _files_digest(files: list[tuple[str, Path]]) -> list[list[str]]:
    # the bytes themselves: a file rewritten within the clock's tick, or copied with its times, is another one
    found = []
    for label, path in files:
        try:
            with path.open("rb") as file:
                found.append([label, hashlib.file_digest(file, "sha256").hexdigest()])
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return found


def _rows_digest(source: Any, data: DataConfig) -> str:
    """The digest of rows that are not in files, read once for it."""
    if isinstance(source, Iterator):
        raise UserError("data.cache_dir: has no effect on rows that can be read only once; drop it, or give a list")
    digest = hashlib.sha256()
    for row, where in read_items(read_rows, source, data):
        try:
            text = json.dumps([where] if row is None else dict(row), default=_plain, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"data.cache_dir: {where}: the row cannot be told from others ({error}); drop it") from None
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | Decimal | datetime.date | datetime.time | datetime.timedelta):
        return [type(value).__name__, repr(value)]
    raise TypeError(f"it holds a {type(value).__name__}")


def _tokenizer_digest(tokenizer: Any) -> list[list[str]] | None:
    """The digest of all that `save_pretrained` writes, chat template included; None where code may differ, too."""
    if tokenizer is None:
        return []
    if type(tokenizer).__module__.partition(".")[0] != "transformers":
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        named = [[type(tokenizer).__qualname__]]
        return named + [[str(f.relative_to(folder)), hashlib.sha256(f.read_bytes()).hexdigest()] for f in files]


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def _own_code() -> str:
    """The digest of the code in this package: whatever changes the meaning of rows changes the key with it."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
