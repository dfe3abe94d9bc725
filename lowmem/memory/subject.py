"""What a prediction is made of: a model without data, the numbers of the run, and its strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lowmem.config import ModelConfig, TrainingConfig
from lowmem.loading import model_without_data
from lowmem.memory.meta import Device
from lowmem.memory.predict import record
from lowmem.memory.shapes import find_config
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work
from lowmem.model import resize_embeddings
from lowmem.strategy import Strategy

if TYPE_CHECKING:
    from lowmem.recipe import Recipe
    from lowmem.trainer import Trainer


@dataclass(frozen=True)
class Subject:
    """A run to be predicted.

    Attributes:
        name: of the model, for people.
        make_model: a new model on the meta device with so many decoder layers (null: all).
        layers: how many it has in all.
        pattern: after how many layers their kinds repeat (1: all are alike); null: depth cannot be changed.
        vocabulary: width of the logits.
        training: the numbers of the run.
        strategies: copied before they are used.
    """

    name: str
    make_model: Callable[[int | None], nn.Module]
    layers: int
    pattern: int | None
    vocabulary: int
    training: TrainingConfig
    strategies: Sequence[Strategy]

    @classmethod
    def of(cls, recipe: Recipe) -> Subject:
        """A recipe's run. Neither weights nor rows are read.

        Raises:
            UserError: the architecture is not to be had.
        """
        return cls.of_config(model_config(recipe.model), recipe.model, recipe.training, recipe.strategies)

    @classmethod
    def of_config(
        cls, config: Any, model: ModelConfig, training: TrainingConfig, strategies: Sequence[Strategy]
    ) -> Subject:
        """A run of the architecture that a transformers configuration describes."""
        text = config.get_text_config()

        def make(layers: int | None) -> nn.Module:
            made: nn.Module = model_without_data(config if layers is None else with_layers(config, layers))
            if model.add_tokens:
                resize_embeddings(made, text.vocab_size + len(model.add_tokens))
            return made

        return cls(
            model.name_or_path,
            make,
            int(text.num_hidden_layers),
            _pattern(text),
            int(text.vocab_size) + len(model.add_tokens or ()),
            training,
            strategies,
        )

    def with_strategies(self, strategies: Sequence[Strategy]) -> Subject:
        """The same run with other strategies."""
        return replace(self, strategies=strategies)

    def trace(
        self,
        lengths: Sequence[int],
        device: Device = "cuda",
        layers: int | None = None,
        look: Callable[[Trainer], None] | None = None,
        work: Work | None = None,
    ) -> Trace:
        """Two optimizer steps on rows of these lengths; see `predict.record`."""
        return record(
            self.make_model(layers), self.training, copy.deepcopy(list(self.strategies)), device, lengths, look, work
        )

    @property
    def shallow(self) -> int | None:
        """The fewest layers in which every kind of layer, and a repetition, occurs; null where depth is fixed."""
        fewest = None if self.pattern is None else max(2, self.pattern + 1)
        return fewest if fewest is not None and fewest < self.layers else None


def read_subject(
    name: str, overrides: Sequence[str] = (), max_length: int | None = None, batch_size: int | None = None
) -> Subject:
    """What a command is asked about: a recipe, or a model alone, which is trained fully with AdamW.

    Args:
        name: a recipe file, the name of a shipped recipe, or a model.
        overrides: `section.key=value`.
        max_length, batch_size: instead of the recipe's.

    Raises:
        UserError: neither a recipe nor a model can be made of it.
    """
    from lowmem.recipe import load_recipe, recipe_from_overrides

    numbers = {"max_length": max_length, "batch_size": batch_size}
    more = [*overrides, *(f"training.{key}={value}" for key, value in numbers.items() if value is not None)]
    if _is_recipe(name):
        return Subject.of(load_recipe(name, more, check_files=False))
    return Subject.of(recipe_from_overrides([f"model.name_or_path={name}", *more]))


def _is_recipe(name: str) -> bool:
    from lowmem.recipe_paths import shipped_recipes

    return name.endswith((".yaml", ".yml")) or name in shipped_recipes()


def model_config(model: ModelConfig) -> Any:
    """The transformers configuration a model will be loaded with, its dtype as loading would set it."""
    config = copy.deepcopy(find_config(model))
    if model.attn_implementation:
        config._attn_implementation = model.attn_implementation
    return config


def with_layers(config: Any, layers: int) -> Any:
    """The configuration with fewer (or more) layers; lists with one entry per layer are cut or continued."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = int(text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, [value[i % before] for i in range(layers)])
    text.num_hidden_layers = layers
    return config


def _pattern(text: Any) -> int | None:
    """After how many layers the kinds repeat, by the configuration's lists with one entry per layer."""
    layers = int(text.num_hidden_layers)
    lists = [v for v in vars(text).values() if isinstance(v, list) and len(v) == layers]
    for period in range(1, layers):
        if all(v[i] == v[i % period] for v in lists for i in range(layers)):
            return period
    return None
