"""A finished or interrupted run on disk: what it was, what it measured, and its model ready for use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lowmem import checkpoint
from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.loading import load_model, load_tokenizer
from lowmem.recipe import Recipe, load_recipe
from lowmem.run import Run, pick_device
from lowmem.strategy import Stage, resolve, traits
from lowmem.weights import load_adapter


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
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                found.append(dict(json.loads(line)))
            except ValueError:
                continue
        return found

    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return checkpoint.checkpoints(self.path)

    def load(self) -> tuple[nn.Module, Any]:
        """The trained model in evaluation mode, nothing trainable, and its tokenizer (None: it has none).

        A quantised base is quantised again as in training, and the adapter put on it.

        Raises:
            UserError: the run has no result, or its base model has no name.
        """
        result = self.path / "model"
        if not result.is_dir():
            raise UserError(f"{self.path}: the run has no result yet (model/ is written when training ends)")
        tokenizer = load_tokenizer_of(result, self.recipe)
        if not (result / "adapter_config.json").is_file():
            from transformers import AutoModelForCausalLM

            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                result, dtype="auto", device_map={"": pick_device(0)}
            )
        else:
            model = load_adapter(self.base_model(), result)
        return model.eval().requires_grad_(False), tokenizer

    def base_model(self) -> nn.Module:
        """The base model as training saw it: quantised, without adapters."""
        strategies = resolve(self.recipe.strategies)
        device = pick_device(0)
        run = Run(self.recipe.training, device, traits(strategies)[0])
        load = LoadConfig.of(self.recipe.model, device)
        below = [s for s in strategies if s.stage < Stage.ADAPT]
        for strategy in strategies:
            load = strategy.configure(load, run)
        model = load_model(load)
        for strategy in below:
            model = strategy.wrap_model(model, run)
        return model


def load_tokenizer_of(result: Path, recipe: Recipe) -> Any:
    """The tokenizer saved beside the result, else that of the base model."""
    from dataclasses import replace

    # what the recipe adds to the base model's tokenizer has been saved with it
    saved = replace(recipe.model, name_or_path=str(result), revision=None, add_tokens=None, chat_template=None)
    own = load_tokenizer(saved)
    return own if own is not None else load_tokenizer(recipe.model)
