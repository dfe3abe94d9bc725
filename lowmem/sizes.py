"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from lowmem.errors import UserError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_size(text: str | int, where: str) -> int:
    """Bytes of `24GiB` (1024^3), `24GB` (1000^3), `500 MiB` or a plain number.

    Args:
        text: the size.
        where: option or key, for the message.

    Raises:
        UserError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) <= 0:
        raise UserError(f"{where}: a size such as 24GiB, 24GB or 500MiB; got {text}")
    return round(float(found[1]) * unit)
