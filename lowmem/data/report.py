"""What became of the rows of a data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class DataReport:
    """Counts of one data set; nothing is lost without a number here.

    Attributes:
        rows_read: rows found in the source, bad ones included; a row with weight 2 counts twice.
        rows: rows kept.
        tokens: tokens in the rows kept, after cutting.
        supervised_tokens: prediction targets among them (the first token of a row is never one).
        truncated: rows kept that were cut at `max_length`.
        dropped: rows left out, by reason.
        longest: tokens of the longest row kept.
        formats: rows kept, by format.
    """

    rows_read: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    formats: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """Count a row that is left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def merge(self, other: DataReport) -> None:
        """Add the counts of rows that follow these."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, max(mine, value) if name == "longest" else mine + value)

    def reasons(self) -> str:
        """The rows left out, as `12 empty answer, 3 not JSON`, most frequent first."""
        ordered = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count:,} {reason}" for reason, count in ordered)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Two to four lines for the terminal."""
        if not self.rows_read:
            return ["a stream: rows are counted as they come"]
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        learnt = f"{self.supervised_tokens:,} supervised ({share:.0%})"
        lines = [
            f"{self.rows:,} of {self.rows_read:,} rows ({formats})",
            f"{self.tokens:,} tokens, {learnt}, longest row {self.longest:,}",
        ]
        if self.truncated:
            lines.append(f"{self.truncated:,} rows cut at max_length")
        if self.dropped:
            lines.append(f"{sum(self.dropped.values()):,} rows left out: {self.reasons()}")
        return lines
