"""A finished or interrupted run on disk: what it was, what it measured, and its model ready for use."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lowmem import checkpoint
from lowmem.durable import DamagedError
from lowmem.errors import UserError
from lowmem.loading import load_tokenizer
from lowmem.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class RunFolder:
    """What `training.output_dir` of a run holds.

    Attributes:
        path: the folder.
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Raises UserError where no run lies."""
        folder = Path(path).expanduser()
        if not (folder / "recipe.yaml").is_file():
            raise UserError(f"{folder.absolute()} is no run folder (it has no recipe.yaml)")
        return cls(folder)

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe; its data files may be gone."""
        return load_recipe(self.path / "recipe.yaml", check_files=False)

    @cached_property
    def result(self) -> dict[str, Any]:
        """What `result.json` says; empty for a run that has not ended."""
        file = self.path / "result.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, in order; a line cut off by a crash is left out."""
        file = self.path / "metrics.jsonl"
        found = []
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return checkpoint.checkpoints(self.path)

    def _went_on(self) -> bool:
        """Whether the run went on after `model/` was written, and has not ended since."""
        saved = self.checkpoints()
        interrupted = str(self.result.get("stopped") or "").startswith("interrupted")
        later = bool(saved) and checkpoint.step_of(saved[-1]) > int(self.result.get("steps") or 0)
        return interrupted or later

    def weights(self, which: str | int | Path | None = None) -> tuple[Path, str | None]:
        """The folder that holds the weights asked for.

        Args:
            which: null for the result; else a checkpoint: its step, its name, `best`, or its folder.

        Returns:
            The folder, and a notice where it is not what `which` names: a run that has not ended has no result, so
            its newest checkpoint is taken.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or there is neither a result nor a whole checkpoint.
        """
        if which is not None:
            folder = self._checkpoint(str(which))
            checkpoint.verify_checkpoint(folder)
            return folder, None
        result, saved = self.path / "model", self.checkpoints()
        if holds_weights(result) and (not saved or (self.result and not self._went_on())):
            return result, None
        damages = []
        for folder in reversed(saved):
            try:
                checkpoint.verify_checkpoint(folder)
            except DamagedError as damage:
                damages.append(f"{damage}; ")
                continue
            return (
                folder,
                f"{''.join(damages)}{self.path}: the run has not ended; these are the weights of {folder.name}",
            )
        raise UserError(
            f"{self.path.absolute()}: the run has no result (model/ is written when training ends), and no whole "
            f"checkpoint{': ' if damages else ''}{''.join(damages).removesuffix('; ')}"
        )

    def load(self, which: str | int | Path | None = None, base: str | Path | None = None) -> tuple[nn.Module, Any]:
        """The trained model in evaluation mode, nothing trainable, and its tokenizer (None: it has none).

        A quantised base is quantised again as in training, and the adapter put on it. `lowmem.load_run` gives the
        same model together with the precision it was trained in.

        Args:
            which: as in `weights`.
            base: the base model, where it has moved or was given in memory.

        Raises:
            UserError: the run has no such weights, or its base model cannot be had.
        """
        from lowmem.loaded import load_run

        loaded = load_run(self.path, which, base)
        return loaded.model, loaded.tokenizer

    def base_model(self) -> nn.Module:
        """The base model as training saw it: quantised, without adapters."""
        from lowmem.rebuild import base_model

        return base_model(self.recipe)

    def _checkpoint(self, which: str) -> Path:
        saved = self.checkpoints()
        steps = {checkpoint.step_of(folder): folder for folder in saved}
        there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        if which == "best":
            which = str(self._best_step(saved))
        if which.isdigit():
            if int(which) not in steps:
                raise UserError(f"{self.path}: there is no checkpoint of step {which}; {there}")
            return steps[int(which)]
        own = self.path / which
        folder = own if own.is_dir() else Path(which).expanduser()
        if not (folder / "trainer.json").is_file():
            raise UserError(f"{folder.absolute()} is no checkpoint; name a step ({there}), best, or a folder")
        return folder

    def _best_step(self, saved: list[Path]) -> int:
        record = json.loads((saved[-1] / "trainer.json").read_text(encoding="utf-8")) if saved else {}
        if not record.get("best"):
            raise UserError(
                f"{self.path}: no checkpoint is known as the best (that takes data.eval and training.save_steps)"
            )
        return int(record["best"][1])


def holds_weights(folder: Path) -> bool:
    """Whether weights lie there, in peft's or transformers' format."""
    return any(folder.glob("*.safetensors"))


def load_tokenizer_of(result: Path, recipe: Recipe) -> Any:
    """The tokenizer saved beside the result, else that of the base model; None where there is none.

    Raises:
        UserError: there is no result yet, and the base model has gone.
    """
    if not result.is_dir():
        return load_tokenizer(recipe.model)
    # what the recipe adds to the base model's tokenizer has been saved with it
    saved = replace(recipe.model, name_or_path=str(result), revision=None, add_tokens=None, chat_template=None)
    own = load_tokenizer(saved)
    if own is not None:
        return own
    try:
        return load_tokenizer(recipe.model)
    except UserError:
        return None  # the base has gone; a run with a tokenizer has saved it with its result
