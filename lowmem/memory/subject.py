"""What a prediction is made of: a model without data, the numbers of the run, and its strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lowmem.config import DataConfig, LoadConfig, ModelConfig, TrainingConfig
from lowmem.data import prompts_and_answers
from lowmem.embeddings import resize_embeddings
from lowmem.errors import UserError
from lowmem.loading import is_gguf, load_tokenizer, model_without_data
from lowmem.memory.load import META, load_without_data
from lowmem.memory.meta import Device
from lowmem.memory.phases import Answers, Around, largest_batch
from lowmem.memory.predict import record
from lowmem.memory.shapes import find_config
from lowmem.memory.trace import Trace
from lowmem.memory.twin import pattern_of, with_layers, without_data
from lowmem.memory.work import Work
from lowmem.model import blocks
from lowmem.run import Run
from lowmem.strategies import with_defaults
from lowmem.strategy import Stage, Strategy, resolve, traits
from lowmem.world import World

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
        source: what the recipe says of the model; null where it is given in memory.
        load: a new model as it comes from its files (layers, strategies, device); null where it is given in memory.
        data: what is evaluated and answered beside training; null: nothing.
        evaluation: tokens of each row of the largest evaluation batch; none: `eval_batch_size` rows of `max_length`,
            where `data` names rows to evaluate.
        answers: the prompts that are answered; null: what `data` names, where it can be read here.
        gpus: cards that share the run, each with a process (rank) of its own.
        rank: which of them is traced.
    """

    name: str
    make_model: Callable[[int | None], nn.Module]
    layers: int
    pattern: int | None
    vocabulary: int
    training: TrainingConfig
    strategies: Sequence[Strategy]
    source: ModelConfig | None = None
    load: Callable[[int | None, Sequence[Strategy], Device], nn.Module] | None = None
    data: DataConfig | None = None
    answers: Answers | None = None
    evaluation: tuple[int, ...] = ()
    gpus: int = 1
    rank: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> Subject:
        """A recipe's run. No weights are read; of the data only prompts, where they and the tokenizer lie here.

        Raises:
            UserError: the architecture is not to be had.
        """
        subject = cls.of_config(model_config(recipe.model), recipe.model, recipe.training, recipe.strategies)
        return replace(subject, data=recipe.data)

    @classmethod
    def of_config(
        cls, config: Any, model: ModelConfig, training: TrainingConfig, strategies: Sequence[Strategy]
    ) -> Subject:
        """A run of the architecture that a transformers configuration describes."""
        text = config.get_text_config()
        rows = int(text.vocab_size) + len(model.add_tokens or ())

        def plain(layers: int | None, config: Any = config) -> nn.Module:
            made: nn.Module = model_without_data(config if layers is None else with_layers(config, layers))
            return made

        def make(layers: int | None) -> nn.Module:
            return _grown(plain(layers), rows if model.add_tokens else 0)

        def load(layers: int | None, strategies: Sequence[Strategy], device: Device) -> nn.Module:
            wanted = load_config(model, training, strategies)
            on_host = device == "cuda" and is_gguf(model) and any(s.stage is Stage.QUANTIZE for s in strategies)
            on_host = on_host or wanted.on_host
            stored = config
            if model.dtype != "auto":
                stored = copy.deepcopy(config)
                stored.dtype = find_config(replace(model, dtype="auto")).dtype
            loaded = load_without_data(lambda: plain(layers, stored), wanted, "host" if on_host else "device")
            return _grown(loaded, rows if model.add_tokens else 0)

        return cls(
            model.name_or_path,
            make,
            int(text.num_hidden_layers),
            pattern_of(text),
            rows,
            training,
            strategies,
            model,
            load,
        )

    @classmethod
    def of_module(cls, module: nn.Module, training: TrainingConfig, strategies: Sequence[Strategy]) -> Subject:
        """A run of a model in memory. Its data are not copied; its depth cannot be changed.

        Args:
            module: as it is handed to a trainer: no strategy has touched it.
        """
        twin = without_data(module)
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            layers = len(blocks(module))
        except UserError:
            layers = 0
        return cls(
            type(module).__name__,
            lambda _: copy.deepcopy(twin),
            layers,
            None,
            int(getattr(text, "vocab_size", 0) or 0),
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
        whole: bool = False,
    ) -> Trace:
        """Two optimizer steps on rows of these lengths; see `predict.record`.

        Args:
            lengths: tokens of each row of the optimizer batch.
            device: what the run is to be like.
            layers: of the model; null: all.
            look: is shown the trainer.
            work: is shown every operation.
            whole: with what comes before and after the steps.
        """
        strategies = copy.deepcopy(list(self.strategies))
        if not whole:
            model = self.make_model(layers)
            return record(model, self.training, strategies, device, lengths, look, work, None, self.gpus, self.rank)
        load = self.load
        loaded = self.make_model(layers) if load is None else lambda: load(layers, self.strategies, device)
        return record(loaded, self.training, strategies, device, lengths, look, work, self.around, self.gpus, self.rank)

    @property
    def ranks(self) -> list[int]:
        """Those that must be looked at to find the one that needs most."""
        found = {rank for strategy in self.strategies for rank in strategy.ranks_apart(self.gpus, self.layers)}
        return sorted(found | {0})

    @property
    def around(self) -> Around:
        """What the run does beside its steps."""
        numbers = self.training
        evaluates = self.data is not None and self.data.eval is not None
        whole = (numbers.max_length,) * numbers.eval_batch_size if evaluates else ()
        saves = numbers.output_dir is not None
        return Around(
            self.evaluation or whole,
            self._answered,
            checkpoints=saves and numbers.save_steps is not None,
            result=saves,
        )

    @cached_property
    def _answered(self) -> Answers | None:
        if self.answers is not None or self.data is None or self.source is None:
            return self.answers
        return known_answers(self.source, self.data)

    @property
    def left_out(self) -> list[str]:
        """Parts of the run that cannot be followed, in words."""
        if self.data is None or self.data.exact_match is None or self._answered is not None:
            return []
        return ["answers to data.exact_match: its rows, or the tokenizer, are not on this machine"]

    @property
    def period(self) -> int | None:
        """After how many layers all repeats, also what strategies do to them; null where none stands for another."""
        periods = [self.pattern, *(strategy.period for strategy in self.strategies)]
        known = [period for period in periods if period is not None]
        return lcm(*known) if len(known) == len(periods) else None

    @property
    def shallow(self) -> int | None:
        """The fewest layers in which every kind of layer, and a repetition, occurs; null where all count."""
        fewest = None if self.period is None else self.period + 1
        return fewest if fewest is not None and fewest < self.layers else None


def read_subject(
    name: str, overrides: Sequence[str] = (), max_length: int | None = None, batch_size: int | None = None
) -> Subject:
    """The run of `read_recipe`."""
    return Subject.of(read_recipe(name, overrides, max_length, batch_size))


def read_recipe(
    name: str,
    overrides: Sequence[str] = (),
    max_length: int | None = None,
    batch_size: int | None = None,
    *,
    check_files: bool = False,
) -> Recipe:
    """What a command is asked about: a recipe, or a model alone, which is trained fully with AdamW.

    Args:
        name: a recipe file, the name of a shipped recipe, or a model.
        overrides: `section.key=value`.
        max_length, batch_size: instead of the recipe's.
        check_files: data that are not there are an error.

    Raises:
        UserError: neither a recipe nor a model can be made of it.
    """
    from lowmem.recipe import load_recipe, recipe_from_overrides

    numbers = {"max_length": max_length, "batch_size": batch_size}
    more = [*overrides, *(f"training.{key}={value}" for key, value in numbers.items() if value is not None)]
    if _is_recipe(name):
        return load_recipe(name, more, check_files=check_files)
    return recipe_from_overrides([f"model.name_or_path={name}", *more])


def load_config(model: ModelConfig, training: TrainingConfig, strategies: Sequence[Strategy]) -> LoadConfig:
    """How a model is loaded for a run, on the meta device."""
    ordered = resolve(with_defaults(copy.deepcopy(list(strategies)), training))
    run = Run(training, META, traits(ordered)[0], World.start(META))
    load = LoadConfig.of(model, META)
    for strategy in ordered:
        load = strategy.configure(load, run)
    return load


def known_answers(model: ModelConfig, data: DataConfig) -> Answers | None:
    """The largest batch of held-out prompts, where they and the tokenizer lie on this machine."""
    if data.exact_match is None or not _is_here(model):
        return None
    try:
        tokenizer = load_tokenizer(model)
        return None if tokenizer is None else largest_batch(tokenizer, prompts_and_answers(data.exact_match, data))
    except UserError:
        return None  # the run itself says what is wrong with it


def _is_here(model: ModelConfig) -> bool:
    """Whether a model's tokenizer can be had without a network."""
    from huggingface_hub import try_to_load_from_cache

    from lowmem.fetch import resolve_model

    name = resolve_model(model.name_or_path)
    return Path(name).exists() or isinstance(
        try_to_load_from_cache(name, "tokenizer_config.json", revision=model.revision), str
    )


def _grown(model: nn.Module, rows: int) -> nn.Module:
    if rows:
        resize_embeddings(model, rows)
    return model


def _is_recipe(name: str) -> bool:
    from lowmem.recipe_paths import shipped_recipes

    return name.endswith((".yaml", ".yml")) or name in shipped_recipes()


def model_config(model: ModelConfig) -> Any:
    """The transformers configuration a model will be loaded with, its dtype as loading would set it."""
    config = copy.deepcopy(find_config(model))
    if model.attn_implementation:
        config._attn_implementation = model.attn_implementation
    return config
