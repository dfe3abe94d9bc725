"""Trackers: observers that show the logged numbers to TensorBoard, Weights & Biases or trackio.

Each of them gets every number of the `log` and `evaluate` events (`train/loss`, `eval/loss`, ...), the resolved recipe
and the versions, and at the end the numbers of the result (`result/exact_match_after`, ...).
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem.errors import UserError
from lowmem.observers import Event

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

PROJECT = "lowmem"


class Tracker(ABC):
    """What trackers have in common: which numbers they get, and what happens when one of them fails.

    One that cannot start is an error: nothing has been trained yet, and the setting would have no effect. One that
    fails later (the network, a full disk) is left out of the rest of the run, with one notice that `result.json` keeps.
    """

    name = "tracker"

    def __init__(self) -> None:
        self.lost = False

    @abstractmethod
    def open(self, trainer: Trainer, step: int) -> None:
        """Begin a run, or go on with one that has done `step` steps already."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    @abstractmethod
    def close(self) -> None:
        """The run is over."""

    def __call__(self, event: Event) -> None:
        """Pass an event on.

        Raises:
            UserError: the tracker cannot start.
        """
        if event.kind == "begin":
            try:
                self.open(event.trainer, int(event.metrics["step"]))
            except Exception as error:
                raise UserError(f"{self.name} cannot start: {error}; take it out of report_to to go without") from error
        elif event.kind in ("log", "evaluate", "finish") and not self.lost:
            try:
                self._pass_on(event)
            except Exception as error:
                self.lost = True
                event.trainer.run.notice(f"{self.name} failed: {error}; the run goes on without it")

    def _pass_on(self, event: Event) -> None:
        if event.kind == "finish":
            self.log(event.trainer.run.global_step, _named("result/", event.trainer.result))
            self.close()
        elif event.kind == "evaluate":
            eval_metrics = {key.removeprefix("eval_"): value for key, value in event.metrics.items()}
            self.log(int(event.metrics["step"]), _named("eval/", eval_metrics))
        else:
            self.log(int(event.metrics["step"]), _named("train/", event.metrics))


class TensorBoard(Tracker):
    """Event files for TensorBoard; nothing leaves the machine.

    Args:
        log_dir: where they go; by default `tensorboard/` in the run folder.

    Raises:
        UserError: tensorboard is not installed.
    """

    name = "tensorboard"

    def __init__(self, log_dir: str | Path | None = None) -> None:
        super().__init__()
        self.make_writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.log_dir = log_dir

    def open(self, trainer: Trainer, step: int) -> None:
        """Make the event file; what an earlier process wrote beyond `step` is hidden."""
        folder = trainer.books.folder
        if not self.log_dir and not folder:
            raise UserError("it needs a log_dir, or a run with training.output_dir")
        place = self.log_dir or f"{folder}/tensorboard"
        self.writer = self.make_writer(str(place), purge_step=step + 1 if step else None)
        for title, facts in _facts(trainer).items():
            text = json.dumps(facts, indent=1, ensure_ascii=False, default=str)
            self.writer.add_text(title, "\n".join(f"    {line}" for line in text.splitlines()), step)
        self.writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers down at once: a run that is killed keeps them."""
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class Wandb(Tracker):
    """Weights & Biases. Sends numbers and settings to its server, unless WANDB_MODE is `offline`.

    Args:
        project: the project; by default WANDB_PROJECT, else `lowmem`.
        init: further arguments of `wandb.init`.

    Raises:
        UserError: wandb is not installed.
    """

    name = "wandb"

    def __init__(self, project: str | None = None, **init: Any) -> None:
        super().__init__()
        self.wandb = _module("wandb", "wandb", "init")
        self.project, self.init = project or os.environ.get("WANDB_PROJECT", PROJECT), init

    def open(self, trainer: Trainer, step: int) -> None:
        """Begin a run named like the folder; a resumed one goes on under its id, which the folder keeps."""
        folder = trainer.books.folder
        known: dict[str, Any] = {"name": folder.name, "dir": str(folder)} if folder else {}
        kept = folder / "wandb.json" if folder else None
        if step and kept and kept.is_file():
            known |= {"id": json.loads(kept.read_text(encoding="utf-8"))["id"], "resume": "allow"}
        self.run = self.wandb.init(**{"project": self.project, "config": _facts(trainer), **known, **self.init})
        if kept:
            kept.write_text(json.dumps({"id": self.run.id}), encoding="utf-8")
        # wandb's own step only ever grows, and a resumed run starts below what was logged last
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers over `step`."""
        self.run.log({"step": step, **metrics})

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


class Trackio(Tracker):
    """trackio. Writes to a local database, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a place elsewhere.

    Args:
        project: the project; by default TRACKIO_PROJECT, else `lowmem`.
        init: further arguments of `trackio.init`.

    Raises:
        UserError: trackio is not installed.
    """

    name = "trackio"

    def __init__(self, project: str | None = None, **init: Any) -> None:
        super().__init__()
        self.trackio = _module("trackio", "trackio", "init")
        self.project, self.init = project or os.environ.get("TRACKIO_PROJECT", PROJECT), init

    def open(self, trainer: Trainer, step: int) -> None:
        """Begin a run named like the folder; a resumed one goes on in the newest of that name."""
        folder = trainer.books.folder
        known: dict[str, Any] = {"name": folder.name, "resume": "allow" if step else "never"} if folder else {}
        self.trackio.init(**{"project": self.project, "config": _facts(trainer), **known, **self.init})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self.trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self.trackio.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def make_tracker(name: str) -> Tracker:
    """The tracker that `training.report_to` names.

    Raises:
        UserError: its package is not installed.
    """
    return TRACKERS[name]()


def _named(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the metrics, under their names in a tracker."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    return {prefix + key: value for key, value in numbers.items() if key != "step" and not isinstance(value, bool)}


def _facts(trainer: Trainer) -> dict[str, Any]:
    from lowmem.environment import versions

    return {**trainer.books.settings(), "versions": versions()}


def _module(name: str, extra: str, needed: str | None = None) -> Any:
    """Import an optional package; a folder that merely has its name (wandb makes one) is not it."""
    try:
        module = import_module(name)
    except ImportError as error:
        raise UserError(f"training.report_to: {extra} cannot be imported; pip install 'lowmem[{extra}]'") from error
    if needed and not hasattr(module, needed):
        raise UserError(f"training.report_to: {extra} is not installed; pip install 'lowmem[{extra}]'")
    return module
