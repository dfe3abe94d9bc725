"""The console observer: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lowmem.memory.now import memory_now

if TYPE_CHECKING:
    from rich.progress import TaskID

    from lowmem.observers import Event

GIB = 1024**3
_PROMPT_CHARACTERS = 120
_ANSWER_CHARACTERS = 300


class Console:
    """Shows a run as it goes.

    On a terminal, a bar with loss, tokens per second, memory and the time left. Elsewhere one line per `log` event, no
    redraws and no control characters, so that a log file stays readable.

    Args:
        file: where to write; standard output by default.
        terminal: force the bar on or off; by default as `file` says itself.
    """

    def __init__(self, file: IO[str] | None = None, terminal: bool | None = None) -> None:
        self._out = RichConsole(file=file or sys.stdout, force_terminal=terminal, highlight=False, markup=False)
        self._live = self._out.is_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._first = 0  # steps done before this process
        self._base: tuple[float, int] | None = None  # seconds and tokens at its first step

    def __call__(self, event: Event) -> None:
        """Show one event; kinds that have nothing to show are passed over."""
        show = getattr(self, f"_on_{event.kind}", None)
        if show:
            show(event.metrics)

    def close(self) -> None:
        """Take the bar down, also after an error; the terminal is left as it was."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    # -- events -------------------------------------------------------------------------------------------------------

    def _on_ledger(self, metrics: Mapping[str, Any]) -> None:
        rows = metrics.get("rows", metrics.get("ledger", {}))
        self._ledger(rows.items() if isinstance(rows, Mapping) else rows)

    def _on_begin(self, metrics: Mapping[str, Any]) -> None:
        if "ledger" in metrics:
            self._on_ledger(metrics)
        self._total = int(metrics.get("total_steps", 0))
        step = self._first = int(metrics.get("step", 0))
        if not self._live:
            self._line(f"training: step {step} of {self._total}" if step else f"training: {self._total} steps")
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._out,
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task("", total=self._total, completed=step, facts="")
        self._progress.start()

    def _on_step(self, metrics: Mapping[str, Any]) -> None:
        if self._progress and self._task is not None:
            seconds, tokens = metrics.get("seconds", 0.0), metrics.get("tokens", 0)
            self._base = self._base or (seconds, tokens)
            since = seconds - self._base[0]
            speed = (tokens - self._base[1]) / since if since > 0 else None
            facts = _facts(metrics.get("loss"), speed)
            self._progress.update(self._task, completed=int(metrics["step"]), facts=facts)

    def _on_log(self, metrics: Mapping[str, Any]) -> None:
        if self._progress:
            return
        step = int(metrics["step"])
        parts = [f"step {step}/{self._total}", _facts(metrics.get("loss"), metrics.get("tokens_per_second"))]
        if metrics.get("learning_rate") is not None:
            parts.append(f"lr {metrics['learning_rate']:.3g}")
        if metrics.get("grad_norm") is not None:
            parts.append(f"grad norm {metrics['grad_norm']:.3g}")
        seconds = metrics.get("seconds")
        if seconds and step > self._first:
            parts.append(f"ETA {_clock(seconds / (step - self._first) * max(0, self._total - step))}")
        self._line("  ".join(parts))

    def _on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        known = {"step": "", "eval_loss": "loss {:.4f}", "eval_tokens": "{} tokens", "eval_seconds": "{:.1f} s"}
        parts = [form.format(metrics[key]) for key, form in known.items() if form and key in metrics]
        parts += [f"{key} {value}" for key, value in metrics.items() if key not in known]
        self._line(f"step {metrics.get('step', '?')}  evaluation: {', '.join(parts)}")

    def _on_save(self, metrics: Mapping[str, Any]) -> None:
        self._line(f"step {metrics.get('step', '?')}  saved: {metrics.get('path')}")

    def _on_notice(self, metrics: Mapping[str, Any]) -> None:
        self._line(f"notice: {metrics.get('text', '')}")

    def _on_status(self, metrics: Mapping[str, Any]) -> None:
        self._line(str(metrics.get("text", "")))

    def _on_data(self, metrics: Mapping[str, Any]) -> None:
        for line in metrics.get("lines", ()):
            self._line(f"{metrics.get('split', 'data')}: {line}")

    def _on_end(self, metrics: Mapping[str, Any]) -> None:
        self.close()
        self._line(_summary(metrics))
        before, after = metrics.get("exact_match_before"), metrics.get("exact_match_after")
        if before is not None or after is not None:
            self._line(f"exact match: {_percent(before)} before, {_percent(after)} after")
        for number, sample in enumerate(list(metrics.get("samples") or [])[:3], start=1):
            self._line(f"sample {number}")
            self._line(f"  prompt:    {_last_part(str(sample.get('prompt', '')))}")
            for key in ("reference", "before", "after"):
                if sample.get(key) is not None:
                    self._line(f"  {key + ':':<10} {_one_line(str(sample[key]), _ANSWER_CHARACTERS)}")
        if metrics.get("output_dir"):
            self._line(f"run: {metrics['output_dir']}")

    # -- writing ------------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        if self._live:
            self._out.print(Text(text))
        else:
            # rich would wrap at 80 columns where there is no terminal
            print(text, file=self._out.file, flush=True)

    def _ledger(self, rows: Iterable[tuple[str, int]]) -> None:
        rows = list(rows)
        total = sum(size for _, size in rows)
        if not self._live:
            width = max((len(name) for name, _ in rows), default=5)
            self._line("memory (GiB = 1024^3 bytes)")
            for name, size in [*rows, ("total", total)]:
                self._line(f"  {name:<{max(width, 5)}}  {size / GIB:8.3f} GiB")
            return
        self._line("memory (GiB = 1024^3 bytes)")
        table = Table()
        table.add_column("category")
        table.add_column("GiB", justify="right")
        for name, size in rows:
            table.add_row(Text(name), f"{size / GIB:.3f}")
        table.add_section()
        table.add_row("total", f"{total / GIB:.3f}")
        self._out.print(table)


def _facts(loss: Any, tokens_per_second: float | None) -> str:
    name, size = memory_now()
    parts = [f"loss {float(loss):.4f}"] if loss is not None else []
    if tokens_per_second is not None:
        parts.append(f"{tokens_per_second:,.0f} tokens/s")
    return "  ".join([*parts, f"{name} {size / GIB:.2f} GiB"])


def _summary(metrics: Mapping[str, Any]) -> str:
    seconds = metrics.get("seconds", metrics.get("train_seconds"))
    parts = [
        f"{'stopped' if metrics.get('stopped') else 'done'}: {metrics.get('step', metrics.get('steps', '?'))} steps"
    ]
    if seconds is not None:
        parts.append(f"in {_clock(seconds)}")
    if metrics.get("train_loss") is not None:
        parts.append(f"train loss {metrics['train_loss']:.4f}")
    if metrics.get("eval_loss") is not None:
        parts.append(f"eval loss {metrics['eval_loss']:.4f}")
    for key, name in (
        ("peak_bytes", "peak"),
        ("peak_reserved_bytes", "peak GPU"),
        ("peak_rss_bytes", "peak RSS"),
    ):
        if metrics.get(key):
            parts.append(f"{name} {metrics[key] / GIB:.2f} GiB")
    return ", ".join(
        [" ".join(parts[:2]) if seconds is not None else parts[0], *parts[2 if seconds is not None else 1 :]]
    )


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _one_line(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


def _last_part(prompt: str) -> str:
    flat = " ".join(prompt.split())
    return flat if len(flat) <= _PROMPT_CHARACTERS else f"...{flat[-_PROMPT_CHARACTERS:]}"
