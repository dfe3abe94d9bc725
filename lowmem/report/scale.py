"""Axes: from values to places, and the numbers written beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """The stretch of values that a chart shows.

    Attributes:
        low: value at place 0.
        high: value at place 1; above `low`.
        log: equal factors take equal room; `low` is above 0 then.
    """

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], *, zero: bool = False, log: bool = False) -> Axis:
        """The finite values with a little room above and below; with `zero`, from 0 on."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if log:
            room = (high / low) ** 0.05 if high > low else 2.0
            return cls(low / room, high * room, log=True)
        if zero and low >= 0:
            return cls(0.0, high * 1.05 or 1.0)
        room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        """The place of a value, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values on the axis, at most `most` of them."""
        if self.log:
            return self._log_ticks(most)
        step = _round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in ((1, 2, 5), (1,)):
            found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) <= most:
                break
        return found[:: math.ceil(len(found) / most)] if found else []


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def tick_texts(ticks: Sequence[float], log: bool = False) -> list[str]:
    """Ticks as text: `0.0`, `0.5`, `1.0`; `10k`, `20k`; `1e-4`, `2e-4`; on a logarithmic axis `0.1`, `1`, `10`."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if log:
        return [f"{tick:g}" if 1e-3 <= tick < 1e4 else _scientific(tick, 1) for tick in ticks]
    if largest and (largest < 1e-3 or largest >= 1e9):
        places = next((p for p in range(9) if all(_is_near(float(_scientific(t, p)), t, largest) for t in ticks)), 9)
        return [_scientific(tick, places) if abs(tick) > 1e-9 * largest else "0" for tick in ticks]
    unit, letter = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    scaled = [tick / unit for tick in ticks]
    decimals = next((d for d in range(9) if all(_is_near(round(v, d), v, largest / unit) for v in scaled)), 9)
    return [f"{value:.{decimals}f}{letter}" if abs(value) > 1e-12 else "0" for value in scaled]


def _is_near(one: float, other: float, size: float) -> bool:
    return abs(one - other) < 1e-6 * size


def _scientific(value: float, places: int) -> str:
    mantissa, exponent = f"{value:.{places}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def number(value: float | None, digits: int = 4) -> str:
    """A value for a table: `1,234`, `0.1235`, `2.0e-05`, `NaN`; nothing measured is `-`."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    if isinstance(value, int) or (abs(value) >= 1000 and digits <= 4):
        return f"{value:,.0f}"
    if value and abs(value) < 10.0 ** -(digits - 1):
        return f"{value:.2g}"
    return f"{value:.{digits}f}"
