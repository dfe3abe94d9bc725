"""What a run writes down, and when it logs, evaluates and saves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem import checkpoint, durable, resume, run_log
from lowmem.checks import SelfChecks
from lowmem.early_stopping import EarlyStopping
from lowmem.environment import peak_bytes, seed_everything, versions
from lowmem.interrupts import CutShort
from lowmem.json_schema import plain
from lowmem.memory.dry_step import longest_batch_first
from lowmem.memory.flat import MemoryWatch
from lowmem.memory.now import memory_metrics
from lowmem.memory.out_of_memory import explained
from lowmem.model import origin
from lowmem.yaml_lines import dump_yaml

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


class Bookkeeping:
    """Logs, evaluates and saves when due; keeps the run folder, where there is one.

    The folder holds `recipe.yaml` (resolved), `versions.json`, `metrics.jsonl`, `checkpoint-*`, `model/` (the result)
    `result.json`, and the `lock` of the process that writes there.
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
        self.cut_evaluation = False  # whether a signal kept this step's evaluation from its end
        self.last_save: Path | None = None
        self.checks, self.memory = SelfChecks(trainer.run), MemoryWatch(trainer.run)
        self.early = EarlyStopping(self.numbers.early_stopping_patience, self.numbers.early_stopping_threshold)

    # -- the three moments --------------------------------------------------------------------------------------------

    @contextmanager
    def open(self, resume_from: str | Path | bool | None) -> Iterator[None]:
        """Make or find the run folder and lock it while the context lasts; restore a checkpoint.

        Raises:
            UserError: there is nothing to resume from, another process trains in the folder, or memory has run out.
        """
        world = self.trainer.world
        seed_everything(self.numbers.seed + world.place("data"))  # other rows, other dropout
        self.trainer.run.stopped, self.cut_evaluation, lock = None, False, None
        wanted = Path(self.numbers.output_dir) if self.numbers.output_dir else None
        source = resume.find(resume_from, wanted) if resume_from else None
        self.folder = source.folder if wanted and source else None
        world.wait()  # until all have looked, and nothing new lies there
        if world.is_main and self.folder:
            lock = durable.Lock(self.folder)
        elif world.is_main and wanted:
            self.folder, lock = resume.fresh_folder(wanted)
        self.folder = world.from_main(self.folder)
        try:
            if lock and lock.notice:
                self.trainer.run.notice(lock.notice)
            with explained(self.trainer):
                if source:
                    self._resume(source)
                if self.folder and world.is_main:
                    durable.write_text(self.folder / "recipe.yaml", dump_yaml(self.settings()))
                    self._write("versions.json", versions())
                self._report_data()
                longest_batch_first(self.trainer)
                if self.cut_evaluation:
                    self._evaluate_unless_cut(self.trainer.run.global_step)
                yield
        finally:
            if lock:
                lock.release()

    def after_step(self, metrics: dict[str, Any]) -> None:
        """Log, evaluate and save when due."""
        step = metrics["step"]
        if not metrics.get("skipped"):  # the loss of a step that was not taken may be infinite
            self.losses.append(metrics["loss"])
            self.loss_sum, self.loss_count = self.loss_sum + metrics["loss"], self.loss_count + 1
        if metrics.get("nonfinite"):  # at once: the line of the interval shows its last step only
            self._append("nonfinite", metrics)
        last = step == self.trainer.total_steps
        if _due(step, self.numbers.logging_steps) or last:
            self._log(metrics)
            self.memory.look(step)
        evaluates, saves = self._evaluates(step), _due(step, self.numbers.save_steps) or last
        if evaluates or saves:
            self.checks.before_saving()
        if evaluates:
            self._evaluate_unless_cut(step)
        if self.folder and self.numbers.save_steps and (saves or self.trainer.run.stopped):
            self._save(self.folder, step)

    def finish(self, seconds: float) -> None:
        """Take the best weights where asked, save the result, write `result.json`; or leave after an interruption."""
        trainer = self.trainer
        interrupted = trainer.interrupts.ended_the_run and trainer.run.global_step < trainer.total_steps
        if interrupted:
            trainer.interrupts.message = self._save_interrupted()
        else:
            self.checks.at_end()
        if not interrupted and self.numbers.load_best_model_at_end and self.folder and self.best:
            self._load_best(self.folder, *self.best)
        trainer.result.update(
            train_loss=self.loss_sum / self.loss_count if self.loss_count else None,
            steps=trainer.run.global_step,
            tokens=trainer.tokens,
            supervised_tokens=trainer.supervised_tokens,
            train_seconds=seconds,
            seed=self.numbers.seed,
            stopped=trainer.run.stopped if trainer.run.global_step < trainer.total_steps else None,
            notices=trainer.run.all_notices,
            **trainer.run.counters,
            **peak_bytes(),
        )
        if trainer.train_dataset is not None:
            trainer.result["train_data"] = trainer.train_dataset.report.as_dict()  # a stream has counted meanwhile
        if self.last_eval:
            trainer.result["eval_loss"] = self.last_eval[1]
        if self.folder:
            trainer.result["output_dir"] = str(self.folder)
        if self.folder and not interrupted:
            self._save_result(self.folder / "model")
        if not interrupted:
            trainer.emit("finish")
        trainer.result["seconds"] = time.perf_counter() - trainer.started
        if self.folder and trainer.world.is_main:
            self._write("result.json", trainer.result)
        trainer.emit("end", step=trainer.run.global_step, **trainer.result)

    def _save_result(self, place: Path) -> None:
        needed = sum(p.nbytes for p in self.trainer.run.trainable.values())
        if not self.trainer.world.is_main:
            self.trainer.save_model(place)  # gives rank 0 what is here, and writes nothing
            return
        with durable.new_folder(place, needed) as partial:
            self.trainer.save_model(partial)

    def _load_best(self, folder: Path, loss: float, step: int) -> None:
        try:
            self.trainer.load_model(folder / f"checkpoint-{step:06d}")
            self.last_eval = (step, loss)
        except durable.DamagedError as damage:
            self.trainer.run.notice(f"load_best_model_at_end: {damage}; the weights of the last step are the result")

    def _save_interrupted(self) -> str:
        """Save what the run has, unless it has just been saved; what to tell the user."""
        step, total = self.trainer.run.global_step, self.trainer.total_steps
        where = f"interrupted at step {step} of {total}"
        if self.folder is None:
            return f"{where}; nothing is saved, as training.output_dir is null"
        path = self.folder / f"checkpoint-{step:06d}"
        if step and path != self.last_save:
            self.checks.before_saving()
            self._save(self.folder, step)
        saved = f"saved {path}; go on with --resume (in Python: train(resume_from=True))"
        return f"{where}; {saved}" if step else f"{where}; there is nothing to save yet"

    # -- what a checkpoint remembers ----------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Plain values for `trainer.json`."""
        return {
            "training": asdict(self.numbers),
            "best": self.best,
            "last_eval": self.last_eval,
            "cut_evaluation": self.cut_evaluation,
            "losses": [self.loss_sum, self.loss_count],
            "losses_to_log": self.losses,
            "early_stopping": self.early.state_dict(),
            "counters": self.trainer.run.counters,
            "versions": versions(),
        }

    def settings(self) -> dict[str, Any]:
        """The resolved recipe, defaults included; `lowmem train` takes it where the model has a name."""
        trainer = self.trainer
        model = asdict(trainer.source) if trainer.source else origin(trainer.model)
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

    def _resume(self, source: resume.Source) -> None:
        world = self.trainer.world
        if self.folder and world.is_main:
            for text in durable.sweep(self.folder):
                self.trainer.emit("status", text=f"resume: {text}")
        world.wait()
        path, record = resume.load(source, self.trainer.load_checkpoint)
        self._restore(record)
        self.last_save = path if self.folder else None
        world.wait()
        if self.folder and world.is_main:
            source.notices += resume.set_aside(self.folder, record["step"])
            resume.trim_metrics(self.folder / "metrics.jsonl", record["step"])
            self._rotate(self.folder)  # which a kill may have prevented
        for notice in source.notices:
            self.trainer.run.notice(notice)

    def _restore(self, record: dict[str, Any]) -> None:
        self.loss_sum, self.loss_count = record["losses"]
        self.losses, self.cut_evaluation = record["losses_to_log"], record["cut_evaluation"]
        self.last_eval = tuple(record["last_eval"]) if record["last_eval"] else None
        before, here = record["cursor"], self.trainer.cursor.state_dict()
        if before["rows"] == here["rows"] and before.get("digest") != here.get("digest"):
            self.trainer.run.notice("resume: the training rows are others than before, though as many")
        if before["rows"] != self.trainer.cursor.num_rows:
            self.trainer.run.notice(
                f"resume: the training set had {before['rows']:,} rows and has {self.trainer.cursor.num_rows:,}; "
                "the order of rows is another one from here on"
            )
        self.last_log = (0.0, self.trainer.tokens)
        self.best = tuple(record["best"]) if record["best"] else None
        if self.folder and self.best and self._tracks_best and not self._best_checkpoint(self.best).is_dir():
            self.trainer.run.notice(
                f"resume: {self._best_checkpoint(self.best)}, the best, is gone; the best counts from here on"
            )
            self.best = None
        self.trainer.run.counters.update(record["counters"])
        self.early.load_state_dict(record["early_stopping"])
        self.trainer.run.stopped = self.early.reason()
        now = asdict(self.numbers)
        for key, old in record["training"].items():
            if key in now and now[key] != old:
                self.trainer.run.notice(f"resume: training.{key} was {old} and is {now[key]} from here on")

    # -- the three duties ---------------------------------------------------------------------------------------------

    def _log(self, metrics: dict[str, Any]) -> None:
        seconds, tokens = metrics["seconds"] - self.last_log[0], metrics["tokens"] - self.last_log[1]
        mean = sum(self.losses) / len(self.losses) if self.losses else metrics["loss"]
        line = {**metrics, "loss": mean, "tokens_per_second": tokens / seconds if seconds else 0.0} | memory_metrics()
        self.losses, self.last_log = [], (metrics["seconds"], metrics["tokens"])
        self._append("log", line)
        self.trainer.emit("log", **line)

    def _evaluates(self, step: int) -> bool:
        last = step == self.trainer.total_steps
        return self.trainer.eval_dataset is not None and (_due(step, self.numbers.eval_steps) or last)

    def _evaluate_unless_cut(self, step: int) -> None:
        try:
            self._evaluate(step, saved=_due(step, self.numbers.save_steps) or step == self.trainer.total_steps)
            self.cut_evaluation = False
        except CutShort:
            self.cut_evaluation = True  # made up for when the run goes on

    def _evaluate(self, step: int, saved: bool) -> None:
        with self.trainer.interrupts.cuttable():
            line = {"step": step, **self.trainer.evaluate()}
        loss, run = line["eval_loss"], self.trainer.run
        self.last_eval = (step, loss)
        enough = self.early.after_evaluation(loss, step)
        if enough and step < self.trainer.total_steps:
            run.stopped = run.stopped or enough
        if not math.isfinite(loss):
            run.notice(f"step {step}: the evaluation loss is {loss}, though all weights are finite; look at its rows")
        # The best is a checkpoint, not only a number; a step that ends the run is saved.
        elif (saved or run.stopped) and (self.best is None or loss < self.best[0]):
            self.best = (loss, step)
        self._append("evaluate", line)
        self.trainer.emit("evaluate", **line)

    def _save(self, folder: Path, step: int) -> None:
        path = folder / f"checkpoint-{step:06d}"
        self.trainer.save_checkpoint(path)
        self.last_save = path
        if self.trainer.world.is_main:
            self._rotate(folder)
        self._append("save", {"step": step, "path": str(path)})
        self.trainer.emit("save", step=step, path=str(path))

    def _rotate(self, folder: Path) -> None:
        if self.numbers.save_total_limit:
            best = self._best_checkpoint(self.best) if self.best and self._tracks_best else None
            checkpoint.rotate(folder, self.numbers.save_total_limit, best)

    @property
    def _tracks_best(self) -> bool:
        return self.numbers.load_best_model_at_end or self.numbers.metric_for_best_model is not None

    def _best_checkpoint(self, best: tuple[float, int]) -> Path:
        assert self.folder is not None
        return self.folder / f"checkpoint-{best[1]:06d}"

    def _append(self, kind: str, line: dict[str, Any]) -> None:
        if self.folder and self.trainer.world.is_main:
            run_log.append(self.folder / "metrics.jsonl", {"event": kind, **line})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self.folder is not None
        run_log.write(self.folder / name, content)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
