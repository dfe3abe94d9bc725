"""Sizes as people write them: `24GiB`, `24GB`, `7.5 GiB`, bytes."""

from __future__ import annotations

import re

from lowmem.errors import UserError

GIB = 1024**3
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}


def parse_size(text: int | str, option: str) -> int:
    """Bytes of a text: GiB count 1024s, GB 1000s; a bare number is bytes.

    Raises:
        UserError: it is no size; the message begins with `option`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size < 1:
        raise UserError(f"{option}: a size such as 24GiB (1024s), 24GB (1000s) or bytes; got {text}")
    return size


def gib(size: float | None) -> str:
    """Bytes in GiB, small sizes in MiB."""
    if size is None:
        return "-"
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 1024**2:,.2f} MiB"
