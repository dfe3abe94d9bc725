"""The JSON files of a run folder: `metrics.jsonl`, line by line, and those that are written at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowmem import durable


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Add a line of JSON."""
    durable.append_line(file, json.dumps(valid(line)))


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file beside its place, and rename it."""
    durable.write_text(file, json.dumps(valid(content), indent=1, ensure_ascii=False, default=str) + "\n")


def valid(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: valid(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [valid(v) for v in value]
    return value
