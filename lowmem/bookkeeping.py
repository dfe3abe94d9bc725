"""What a run writes down, and when it logs, evaluates and saves."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowmem import checkpoint
from lowmem.errors import UserError
from lowmem.json_schema import plain
from lowmem.memory.now import memory_metrics
from lowmem.model import unwrapped
from lowmem.yaml_lines import dump_yaml

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


class Bookkeeping:
    """Logs, evaluates and saves when due; keeps the run folder, where there is one.

    The folder holds `recipe.yaml` (resolved), `versions.json`, `metrics.jsonl`, `checkpoint-*`, `model/` (the result)
    and `result.json`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.numbers = trainer.training
        self.folder: Path | None = None
        self.losses: list[float] = []
        self.loss_sum, self.loss_count = 0.0, 0
        self.last_log = (0.0, 0)  # seconds, tokens
        self.best: tuple[float, int] | None = None  # evaluation loss, step
        self.last_eval: tuple[int, float] | None = None  # step, evaluation loss

    # -- the three moments --------------------------------------------------------------------------------------------

    def open(self, resume_from: str | Path | bool | None) -> None:
        """Make or find the run folder; restore a checkpoint.

        Raises:
            UserError: there is nothing to resume from.
        """
        torch.manual_seed(self.numbers.seed)
        wanted = Path(self.numbers.output_dir) if self.numbers.output_dir else None
        if resume_from:
            source = self._checkpoint(wanted, resume_from)
            self._restore(self.trainer.load_checkpoint(source))
            self.folder = source.parent if wanted else None
        elif wanted:
            self.folder = checkpoint.fresh_folder(wanted)
        if self.folder:
            (self.folder / "recipe.yaml").write_text(dump_yaml(self.settings()), encoding="utf-8")
            self._write("versions.json", versions())
        self._report_data()

    def after_step(self, metrics: dict[str, Any]) -> None:
        """Log, evaluate and save when due."""
        step = metrics["step"]
        if not metrics.get("skipped"):  # the loss of a step that was not taken may be infinite
            self.losses.append(metrics["loss"])
            self.loss_sum, self.loss_count = self.loss_sum + metrics["loss"], self.loss_count + 1
        last = step == self.trainer.total_steps
        if _due(step, self.numbers.logging_steps) or last:
            self._log(metrics)
        if self.trainer.eval_dataset is not None and (_due(step, self.numbers.eval_steps) or last):
            self._evaluate(step, saved=_due(step, self.numbers.save_steps) or last)
        if self.folder and self.numbers.save_steps and (_due(step, self.numbers.save_steps) or last):
            self._save(self.folder, step)

    def finish(self, seconds: float) -> None:
        """Take the best weights where asked, save the result, write `result.json`."""
        trainer = self.trainer
        if self.numbers.load_best_model_at_end and self.folder and self.best:
            trainer.load_model(self.folder / f"checkpoint-{self.best[1]:06d}")
            self.last_eval = (self.best[1], self.best[0])
        trainer.result.update(
            train_loss=self.loss_sum / self.loss_count if self.loss_count else None,
            steps=trainer.run.global_step,
            tokens=trainer.tokens,
            supervised_tokens=trainer.supervised_tokens,
            train_seconds=seconds,
            seed=self.numbers.seed,
            notices=trainer.run.all_notices,
            **peak_bytes(),
        )
        if self.last_eval:
            trainer.result["eval_loss"] = self.last_eval[1]
        if self.folder:
            trainer.result["output_dir"] = str(self.folder)
            trainer.save_model(self.folder / "model")
        trainer.emit("finish")
        trainer.result["seconds"] = time.perf_counter() - trainer.started
        if self.folder:
            self._write("result.json", trainer.result)
        trainer.emit("end", step=trainer.run.global_step, **trainer.result)

    # -- what a checkpoint remembers ----------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Plain values for `trainer.json`."""
        return {
            "training": asdict(self.numbers),
            "best": self.best,
            "losses": [self.loss_sum, self.loss_count],
            "versions": versions(),
        }

    def settings(self) -> dict[str, Any]:
        """The resolved recipe, defaults included; `lowmem train` takes it where the model has a name."""
        trainer = self.trainer
        model = asdict(trainer.source) if trainer.source else {"name_or_path": type(unwrapped(trainer.model)).__name__}
        return {
            "model": model,
            "data": plain(trainer.data),
            "training": plain(self.numbers),
            "strategies": {s.name: plain(s.settings()) for s in trainer.given},
        }

    def _report_data(self) -> None:
        """What became of the rows, shown before the first step and kept in the result."""
        for split in ("train", "eval"):
            dataset = getattr(self.trainer, f"{split}_dataset")
            if dataset is not None:
                self.trainer.result[f"{split}_data"] = dataset.report.as_dict()
                self.trainer.emit("data", split=split, lines=dataset.report.lines())

    def _restore(self, record: dict[str, Any]) -> None:
        self.loss_sum, self.loss_count = record["losses"]
        if (before := record["cursor"]["rows"]) != self.trainer.cursor.num_rows:
            self.trainer.run.notice(
                f"resume: the training set had {before:,} rows and has {self.trainer.cursor.num_rows:,}; "
                "the order of rows is another one from here on"
            )
        self.last_log = (0.0, self.trainer.tokens)
        self.best = tuple(record["best"]) if record["best"] else None
        now = asdict(self.numbers)
        for key, old in record["training"].items():
            if key in now and now[key] != old:
                self.trainer.run.notice(f"resume: training.{key} was {old} and is {now[key]} from here on")

    def _checkpoint(self, wanted: Path | None, resume_from: str | Path | bool) -> Path:
        if resume_from is not True:
            return Path(str(resume_from))
        if wanted is None:
            raise UserError("resume: training.output_dir is not set, so there is no newest checkpoint")
        return checkpoint.newest(wanted)

    # -- the three duties ---------------------------------------------------------------------------------------------

    def _log(self, metrics: dict[str, Any]) -> None:
        seconds, tokens = metrics["seconds"] - self.last_log[0], metrics["tokens"] - self.last_log[1]
        mean = sum(self.losses) / len(self.losses) if self.losses else metrics["loss"]
        line = {**metrics, "loss": mean, "tokens_per_second": tokens / seconds if seconds else 0.0} | memory_metrics()
        self.losses, self.last_log = [], (metrics["seconds"], metrics["tokens"])
        self._append("log", line)
        self.trainer.emit("log", **line)

    def _evaluate(self, step: int, saved: bool) -> None:
        line = {"step": step, **self.trainer.evaluate()}
        loss = line["eval_loss"]
        self.last_eval = (step, loss)
        if saved and (self.best is None or loss < self.best[0]):  # the best is a checkpoint, not only a number
            self.best = (loss, step)
        self._append("evaluate", line)
        self.trainer.emit("evaluate", **line)

    def _save(self, folder: Path, step: int) -> None:
        path = folder / f"checkpoint-{step:06d}"
        self.trainer.save_checkpoint(path)
        if self.numbers.save_total_limit:
            tracked = self.best and (self.numbers.load_best_model_at_end or self.numbers.metric_for_best_model)
            best = folder / f"checkpoint-{self.best[1]:06d}" if tracked and self.best else None
            checkpoint.rotate(folder, self.numbers.save_total_limit, best)
        self._append("save", {"step": step, "path": str(path)})
        self.trainer.emit("save", step=step, path=str(path))

    def _append(self, kind: str, line: dict[str, Any]) -> None:
        if self.folder:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": kind, **_valid(line)}) + "\n")

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self.folder is not None
        partial = self.folder / f"{name}.partial"
        partial.write_text(
            json.dumps(_valid(content), indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
        )
        os.replace(partial, self.folder / name)


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {name: _version(name) for name in ("lowmem", "torch", "transformers", "peft", "bitsandbytes", "datasets")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {**found, "python": platform.python_version(), "device": device, "threads": str(torch.get_num_threads())}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def peak_bytes() -> dict[str, int]:
    """The most memory this process has used: resident bytes, and on CUDA what its allocator held."""
    peak = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        peak["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return peak


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _valid(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _valid(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(v) for v in value]
    return value
