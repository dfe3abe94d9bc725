"""Recipes: YAML 1.2 in, checked dataclasses out.

A recipe has the blocks `model`, `data`, `training` and `strategies`; their keys are the fields of `ModelConfig`,
`DataConfig`, `TrainingConfig` and of the strategies' own dataclasses. `lora: {}` and `lora:` both mean defaults; a key
with a dot (`my_package.MyStrategy`) imports a class of the user's, from what is installed or from the recipe's folder.

Relative paths under `model` and `data` start from the recipe's folder, so that a recipe and its data travel together.
Paths typed in overrides start from the current directory, and so does `training.output_dir`: results belong to who runs
the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from lowmem import recipe_paths
from lowmem.config import DataConfig, ModelConfig, TrainingConfig
from lowmem.json_schema import json_schema, plain
from lowmem.overrides import apply_override
from lowmem.recipe_paths import find_recipe
from lowmem.recipe_source import Source
from lowmem.schema import InvalidValueError, build, field_types, nearest, shown, unknown_key
from lowmem.strategy import Strategy
from lowmem.yaml_lines import RecipeError, dump_yaml, parse_yaml, short

__all__ = ["Recipe", "RecipeError", "find_recipe", "json_schema", "load_recipe"]

T = TypeVar("T")
_BLOCKS: dict[str, type[Any]] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig}


@dataclass
class Recipe:
    """A checked recipe.

    Attributes:
        model: which model.
        data: which rows.
        training: the numbers of the run.
        strategies: instances, in the order of the file.
        path: the file it came from; null for one built in Python.
    """

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategies: list[Strategy] = field(default_factory=list)
    path: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """The recipe with every default filled in and every path absolute, as plain values."""
        blocks = {name: plain(getattr(self, name)) for name in _BLOCKS}
        return blocks | {"strategies": {item.name: plain(item.settings()) for item in self.strategies}}

    def dump(self, path: str | Path) -> None:
        """Write `as_dict()` as YAML that `load_recipe` reads back to the same values."""
        # surrogateescape: file names that are no valid text keep their bytes
        Path(path).write_bytes(dump_yaml(self.as_dict()).encode("utf-8", "surrogateescape"))


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> Recipe:
    """Read a recipe and check all of it; nothing is loaded or downloaded.

    Args:
        path: a file, or the name of a shipped recipe (`quickstart`).
        overrides: `section.key=value`, the value being YAML: `training.learning_rate=1e-4`, `strategies.lora.r=8`,
            `strategies.packing={}`. `strategies.NAME=null` takes a strategy out.
        check_files: a data file, or the model's, that is not there is an error.

    Raises:
        RecipeError: one line with file, line and key (or the override), what is wrong and what is accepted.
    """
    file = find_recipe(path)
    document = parse_yaml(_read(file), str(file))
    origins = {keys: f"{file}:{line}" for keys, line in document.lines.items()}
    source = Source(str(file), {} if document.value is None else document.value, origins)
    if not isinstance(source.tree, dict):
        raise RecipeError(f"{file}:1: a recipe is a mapping of {', '.join([*_BLOCKS, 'strategies'])}")
    return _checked(source, overrides, file, check_files)


def recipe_from_overrides(overrides: Sequence[str]) -> Recipe:
    """A recipe without a file, from overrides alone; relative paths start from the current directory.

    Raises:
        RecipeError: as `load_recipe`.
    """
    return _checked(Source("overrides", {}, {}), overrides, None, True)


def _checked(source: Source, overrides: Sequence[str], file: Path | None, check_files: bool) -> Recipe:
    for text in overrides:
        apply_override(source, text)
    for key in source.tree:
        if key not in (*_BLOCKS, "strategies"):
            raise source.error((key,), _misplaced(key, [*_BLOCKS, "strategies"]))
    model = _block(source, "model", ModelConfig)
    data = _block(source, "data", DataConfig)
    training = _block(source, "training", TrainingConfig)
    folder = file.parent if file else Path()
    strategies = _strategies(source, folder)
    recipe_paths.resolve_strategy_paths(strategies, source, folder, check_files)
    return Recipe(
        recipe_paths.resolve_model_path(model, source, folder, check_files),
        recipe_paths.resolve_data_paths(data, source, folder, check_files),
        recipe_paths.resolve_output_dir(training, source),
        strategies,
        file,
    )


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 (byte {error.start}); save the recipe as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None


def _block(source: Source, name: str, cls: type[T]) -> T:
    values = source.tree.get(name)
    if name not in source.tree and name == "model":
        raise RecipeError(f"{source.name}: model: this block is missing; it needs at least name_or_path")
    return _build(source, (name,), cls, {} if values is None else values)


def _build(source: Source, path: tuple[str, ...], cls: type[T], values: Any) -> T:
    if not isinstance(values, dict):
        raise source.error(path, f"must be a mapping of settings; got {shown(values)}")
    try:
        made: T = build(cls, values)
    except InvalidValueError as error:
        reason = error.reason
        if len(error.path) == 1 and reason.startswith("unknown key") and "did you mean" not in reason:
            reason = _misplaced(str(error.path[0]), list(field_types(cls)))
        raise source.error((*path, *error.path), reason) from error.__cause__
    return made


def _misplaced(key: str, valid: list[str]) -> str:
    """The hint for an unknown key: a near one here, else the same word in another block."""
    from lowmem.strategies import STRATEGIES

    elsewhere = {f"{block}.{name}": name for block, cls in _BLOCKS.items() for name in field_types(cls)}
    elsewhere |= {f"strategies.{name}": name for name in STRATEGIES}
    if nearest(key, valid) is None:
        near = nearest(key, elsewhere.values(), cutoff=0.8)  # stricter: a word from another block is rarely meant
        if near:
            return f"unknown key; did you mean {next(full for full, name in elsewhere.items() if name == near)}?"
    return unknown_key(key, valid)


def _strategies(source: Source, folder: Path) -> list[Strategy]:
    values = source.tree.get("strategies")
    if values is None:
        return []
    if not isinstance(values, dict):
        raise source.error(("strategies",), "must be a mapping: one key per strategy, such as `lora: {r: 8}`")
    result: list[Strategy] = []
    for key, settings in values.items():
        path = ("strategies", key)
        cls = _strategy_class(source, key, folder)
        if settings is None:
            settings = {}
        elif not isinstance(settings, dict):
            off = settings is False or str(settings).lower() in ("no", "off", "none", "false")
            hint = "leave the key out to switch it off" if off else f"write `{key}: {{}}` for the defaults"
            raise source.error(path, f"must be a mapping of settings; got {shown(settings)}: {hint}")
        if any(type(other) is cls for other in result):
            raise source.error(path, f"{cls.__name__} stands in the recipe twice, under two import paths")
        result.append(_build(source, path, cls, settings))
    return result


def _strategy_class(source: Source, key: str, folder: Path) -> type[Strategy]:
    from lowmem.strategies import STRATEGIES

    if key in STRATEGIES:
        return STRATEGIES[key]
    if "." not in key:
        near = nearest(key, STRATEGIES)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(STRATEGIES))}"
        raise source.error(("strategies", key), f"unknown strategy; {hint}")
    try:
        cls = _import(key, folder)
    except Exception as error:  # the user's own module raises what it likes
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise source.error(("strategies", key), f"cannot be imported: {short(said, 300)}") from error
    shipped = next((name for name, ours in STRATEGIES.items() if ours is cls), None)
    if shipped:
        raise source.error(("strategies", key), f"is one of lowmem's own; write {shipped}")
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise source.error(("strategies", key), "is no subclass of lowmem.Strategy")
    if not is_dataclass(cls):
        raise source.error(("strategies", key), "is no dataclass; its fields are the keys of a recipe")
    return cls


def _import(key: str, folder: Path) -> Any:
    import pkgutil
    import sys

    place = os.fspath(folder.absolute())
    sys.path.append(place)
    try:
        return pkgutil.resolve_name(key)
    finally:
        sys.path.remove(place)
