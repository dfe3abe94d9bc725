"""A trained model for use: the base as training saw it, the trained weights on it, the same precision around it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowmem.answers import Prompt, Sampling, fitting, generate
from lowmem.errors import UserError
from lowmem.fetch import WEIGHTS
from lowmem.loading import load_tokenizer
from lowmem.rebuild import FORWARD, is_adapter, rebuild
from lowmem.recipe import Recipe, load_recipe
from lowmem.recipe_paths import native
from lowmem.run import Run
from lowmem.run_folder import RunFolder, holds_weights
from lowmem.strategy import Stage, Strategy
from lowmem.yaml_lines import dump_yaml


@dataclass
class LoadedRun:
    """A model in evaluation mode, nothing trainable, and what is needed to use it as training did.

    Attributes:
        model: on its device.
        tokenizer: None where the run has none.
        recipe: what the run was trained by; for a plain model, defaults.
        weights: the folder or the name that the weights came from.
        run: what strategies see.
        strategies: those that shape a forward pass, inner to outer.
        notices: one-line remarks for the user.
    """

    model: nn.Module
    tokenizer: Any
    recipe: Recipe
    weights: str
    run: Run
    strategies: list[Strategy]
    notices: list[str] = field(default_factory=list)

    def inference(self) -> AbstractContextManager[nn.Module]:
        """No gradients, and the precision of training (autocast where the recipe has it)."""

        @contextmanager
        def plain() -> Iterator[nn.Module]:
            with torch.no_grad():
                yield self.model

        wrapped: Any = plain
        for strategy in self.strategies:
            wrapped = strategy.wrap_inference(wrapped, self.run)
        inside: AbstractContextManager[nn.Module] = wrapped()
        return inside

    def evaluate(self, data: Any = None, exact_match: Any = None) -> dict[str, Any]:
        """Loss, perplexity, token accuracy and exact match (see `lowmem.evaluation.evaluate`)."""
        from lowmem.evaluation import evaluate

        return evaluate(self, data, exact_match)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        batch_size: int = 8,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Answers in the order of the prompts, greedy unless `sampling` is given.

        Args:
            prompts: texts, lists of messages, or chats with tools.
            max_new_tokens: tokens after which an answer is cut; null: 256, or fewer where the model's context ends.
            batch_size: prompts answered at once.
            sampling: how tokens are drawn.

        Raises:
            UserError: there is no tokenizer, or a prompt and its answer do not fit into the model's context.
        """
        self.require_tokenizer()
        longest = fitting(self.model, self.tokenizer, prompts, max_new_tokens)
        with self.inference() as model:
            return generate(model, self.tokenizer, prompts, longest, batch_size, sampling)

    def require_tokenizer(self) -> None:
        """Raise UserError where there is none, or where the model cannot write."""
        if self.tokenizer is None:
            raise UserError(f"{self.weights}: there is no tokenizer, so it can neither read nor write text")
        if not hasattr(self.model, "generate"):
            raise UserError(f"{type(self.model).__name__} has no generate, so it cannot write text")


def load_run(
    name: str | Path,
    checkpoint: str | int | Path | None = None,
    base: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> LoadedRun:
    """Load a trained model, or a plain one to compare with.

    Args:
        name: a run folder, one of its checkpoints, its `model/`, an adapter, or a model (folder, GGUF file, hub id).
        checkpoint: of a run folder: the step, `best`, or a checkpoint's folder; null takes the result.
        base: the base model of an adapter, where it has moved or was given in memory.
        overrides: of the recipe, such as `training.eval_batch_size=4`; only those that a forward pass heeds.

    Raises:
        UserError: nothing of that name, no such checkpoint, no base model, or a setting without effect.
    """
    path = native(str(name)).expanduser()
    run_folder, which = (None, None) if str(name) in WEIGHTS else _run_of(path)
    if checkpoint is not None and (run_folder is None or which is not None):
        raise UserError(f"{name} is no run folder, so there is no checkpoint {checkpoint} in it")
    if run_folder is None:
        return _without_run(str(name), path, base, overrides)
    weights, notice = run_folder.weights(checkpoint if which is None else which)
    recipe = load_recipe(run_folder.path / "recipe.yaml", overrides, check_files=False)
    tokenizers = [weights, run_folder.path / "model"]
    saved = any((folder / "tokenizer_config.json").is_file() for folder in tokenizers)
    _check_overrides(overrides, recipe, adapter=is_adapter(weights), tokenizer=saved)
    return _load(recipe, weights, base, tokenizers, [notice] if notice else [])


def _run_of(path: Path) -> tuple[RunFolder | None, str | None]:
    """The run that a folder is, or is part of, and the checkpoint of it that the folder is."""
    if (path / "recipe.yaml").is_file():
        return RunFolder.open(path), None
    parent = path.absolute().parent
    if not (parent / "recipe.yaml").is_file():
        return None, None
    if (path / "trainer.json").is_file():
        return RunFolder.open(parent), str(path)
    if path.name == "model" and holds_weights(path):
        return RunFolder.open(parent), None
    return None, None


def _without_run(name: str, path: Path, base: str | Path | None, overrides: Sequence[str]) -> LoadedRun:
    """An adapter or a model that lies in no run folder."""
    if not path.exists() and not _may_be_hub_id(name):
        raise UserError(f"{path.absolute()}: there is no such run, checkpoint or model")
    if (
        path.is_dir()
        and name not in WEIGHTS
        and not any((path / f"{p}config.json").is_file() for p in ("", "adapter_"))
    ):
        raise UserError(
            f"{path.absolute()}: no run (recipe.yaml), no checkpoint and no model (config.json or adapter_config.json)"
        )
    adapter = is_adapter(path)
    if adapter:
        written = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        name = str(base or written.get("base_model_name_or_path") or "")
        if not name:
            raise UserError(f"{path}: the adapter does not say what its base model is; give --base PATH")
    recipe = _plain_recipe(name, overrides)
    _check_overrides(overrides, recipe, adapter=True)
    if adapter:
        return _load(recipe, path, base, [path], [])
    if base is not None:
        raise UserError(f"base: {name} is no adapter, so a base model has no effect")
    try:
        return _load(recipe, None, None, [], [])
    except UserError as error:
        if path.exists() or name in WEIGHTS:
            raise
        raise UserError(f"{name}: there is no run folder {path.absolute()}, and no model: {error}") from error


def _plain_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    """Defaults for a model without a recipe."""
    here = native(name).expanduser()
    model = str(here.absolute()) if here.exists() and name not in WEIGHTS else name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.yaml")
        file.write_bytes(dump_yaml({"model": {"name_or_path": model}}).encode("utf-8", "surrogateescape"))
        return replace(load_recipe(file, overrides, check_files=False), path=None)


def _may_be_hub_id(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and Path(name).suffix != ".gguf"


def _check_overrides(overrides: Sequence[str], recipe: Recipe, adapter: bool, tokenizer: bool = False) -> None:
    """A setting that a forward pass does not heed would have no effect; nor has one of a tokenizer that was saved."""
    from lowmem.strategies import STRATEGIES

    stages = {strategy.name: strategy.stage for strategy in recipe.strategies}
    stages |= {name: cls.stage for name, cls in STRATEGIES.items() if cls.stage is Stage.ADAPT}  # also one taken out
    for text in overrides:
        key = text.partition("=")[0].strip()
        section, _, rest = key.partition(".")
        idle = [stage for name, stage in stages.items() if rest == name or rest.startswith(f"{name}.")]
        if (
            (section == "training" and rest not in ("eval_batch_size", "max_length"))
            or key in ("data.train", "model.name_or_path")
            or (key == "model.dtype" and not adapter)
            or (key in ("model.chat_template", "model.add_tokens") and tokenizer)
            # an adapter is read from its files, whatever is written about it
            or (section == "strategies" and idle and (idle[0] is Stage.ADAPT or idle[0] not in FORWARD))
        ):
            raise UserError(f"override '{text}': {key} has no effect on a model that has been trained")


def _load(
    recipe: Recipe, weights: Path | None, base: str | Path | None, tokenizers: Sequence[Path], notices: list[str]
) -> LoadedRun:
    """Args: weights: null for the base model as it is; tokenizers: folders that may hold one, before the base's."""
    if base is not None:
        if weights is None or not is_adapter(weights):
            raise UserError(f"base: {weights} holds a whole model, so a base model has no effect")
        name = str(native(str(base)).expanduser())
        recipe = replace(recipe, model=replace(recipe.model, name_or_path=name, revision=None))
    model, run, strategies = rebuild(recipe, weights, named=base is not None or weights is None)
    tokenizer = _tokenizer(recipe, tokenizers, weights)
    shown = recipe.model.name_or_path if weights is None else str(weights)
    return LoadedRun(model, tokenizer, recipe, shown, run, strategies, [*notices, *run.take_notices()])


def _tokenizer(recipe: Recipe, folders: Sequence[Path], weights: Path | None) -> Any:
    """The tokenizer saved beside the weights, else that of the base model."""
    for folder in folders:
        # what the recipe adds to the base model's tokenizer has been saved with it
        saved = replace(recipe.model, name_or_path=str(folder), revision=None, add_tokens=None, chat_template=None)
        if folder.is_dir() and (own := load_tokenizer(saved)) is not None:
            return own
    whole = weights is not None and not is_adapter(weights)
    try:
        return load_tokenizer(recipe.model)
    except UserError:
        if not whole:
            raise
        return None  # the base has gone, and the whole model does not need it
