"""What pages and tables say about a run, as plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from lowmem.config import TrainingConfig
from lowmem.errors import UserError
from lowmem.json_schema import plain
from lowmem.report.read import RunRecord
from lowmem.schema import InvalidValueError, build


@dataclass(frozen=True)
class StrategyRow:
    """One strategy of a run.

    Attributes:
        name: its key in a recipe.
        exact: whether the weights are those of the plain loop; null where this cannot be told.
        settings: defaults included.
        added: by the trainer, not by the recipe.
        saves: what it saves, in a line.
    """

    name: str
    exact: bool | None
    settings: dict[str, Any]
    added: bool = False
    saves: str = ""


def strategy_rows(record: RunRecord) -> list[StrategyRow]:
    """The strategies, inner to outer where all of them are lowmem's own.

    A class of the user's is not imported for this; whether it is exact is taken from the newest checkpoint.
    """
    from lowmem.strategies import STRATEGIES, with_defaults
    from lowmem.strategy import resolve

    given = record.settings.get("strategies")
    given = given if isinstance(given, dict) else {}
    noted = list(record.checkpoints.values())[-1].get("strategies", {}) if record.checkpoints else {}
    others = [
        StrategyRow(name, noted.get(name, {}).get("exact"), settings or {})
        for name, settings in given.items()
        if name not in STRATEGIES
    ]
    try:
        ours = [build(STRATEGIES[name], settings or {}) for name, settings in given.items() if name in STRATEGIES]
        training = build(TrainingConfig, record.settings.get("training") or {})
        ordered = resolve(with_defaults(ours, training)) if not others else with_defaults(ours, training)
    except (InvalidValueError, UserError):  # a recipe of another version
        return [StrategyRow(name, None, settings or {}) for name, settings in given.items()]
    rows = [StrategyRow(s.name, s.exact, plain(s.settings()), s.name not in given, s.saves) for s in ordered]
    return rows + others


def measured(record: RunRecord) -> dict[str, float | int | None]:
    """Results by name; None where nothing was measured. Losses in nats per token, bytes, seconds."""
    result = record.result if record.state != "unfinished" else {}
    losses, evaluations = record.series("log", "loss"), record.series("evaluate", "eval_loss")
    speeds = [y for _, y in record.series("log", "tokens_per_second") if math.isfinite(y)]
    seconds = [x for x, _ in record.series("log", "loss", over="seconds")]
    tokens = [x for x, _ in record.series("log", "loss", over="tokens")]
    finite = [y for _, y in evaluations if math.isfinite(y)]
    return {
        "steps": record.last_step,
        "tokens": result.get("tokens") or (int(tokens[-1]) if tokens else None),
        "train seconds": seconds[-1] if seconds else result.get("train_seconds"),
        "tokens/s (median)": median(speeds) if speeds else None,
        "train loss (last logged)": losses[-1][1] if losses else None,
        "train loss (mean of the run)": result.get("train_loss"),
        "eval loss (last)": evaluations[-1][1] if evaluations else None,
        "eval loss (best)": min(finite) if finite else None,
        "exact match before": result.get("exact_match_before"),
        "exact match after": result.get("exact_match_after"),
        "peak resident bytes": result.get("peak_rss_bytes") or _largest(record, "rss_bytes"),
        "peak GPU bytes": result.get("peak_allocated_bytes") or _largest(record, "gpu_peak_bytes"),
        "peak live bytes of a step": result.get("peak_live_bytes"),
    }


def _largest(record: RunRecord, key: str) -> int | None:
    return int(max((y for _, y in record.series("log", key)), default=0)) or None


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def setting_text(value: Any) -> str:
    """A setting as a recipe would say it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def duration(seconds: float | None) -> str:
    """`4.2 s`, `3:05 min`, `2:03:05 h`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def percent(share: float | None) -> str:
    """A share as `92.5 %`."""
    return "-" if share is None else f"{100 * share:.1f} %"
