"""Which file a recipe means: shipped recipes, and paths that start from the recipe's folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeAlias

from lowmem.config import DataConfig, ModelConfig, TrainingConfig, WeightedPath
from lowmem.fetch import WEIGHTS
from lowmem.recipe_source import Source
from lowmem.schema import nearest
from lowmem.strategy import Strategy
from lowmem.yaml_lines import KeyPath, RecipeError, short

_FILE_SUFFIXES = {".json", ".jsonl", ".txt", ".md", ".csv", ".tsv", ".parquet", ".arrow", ".gguf", ".gz", ".zst"}
_FILE_SUFFIXES |= {".jinja", ".jinja2", ".j2"}
Files: TypeAlias = str | list[str | WeightedPath] | WeightedPath | None
_HERE = Path(__file__).parent


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with lowmem."""
    folders = (_HERE / "_recipes", _HERE.parent / "recipes")  # in a wheel; in a source checkout
    folder = next((folder for folder in folders if folder.is_dir()), folders[-1])
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def summary(path: Path) -> str:
    """The first comment line of a recipe, without its own name."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").removeprefix(f"{path.stem}.yaml: ")


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a shipped one (`quickstart`).

    Raises:
        RecipeError: neither; the absolute path tried, or the nearest name, is in the message.
    """
    path = native(str(name_or_path)).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    name = str(name_or_path)
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise RecipeError(f"{path.absolute()}: a folder, where a recipe file was expected")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        near = nearest(path.stem, shipped)
        hint = f"; a shipped recipe is named without path and suffix: {near}" if near else ""
        raise RecipeError(f"{path.absolute()}: no such recipe file{hint}")
    near = nearest(name, shipped)
    hint = f"did you mean {near}?" if near else f"shipped recipes: {', '.join(shipped)}"
    raise RecipeError(f"{name}: no recipe of that name, and no file {path.absolute()}; {hint}")


def resolve_model_path(model: ModelConfig, source: Source, folder: Path, check: bool) -> ModelConfig:
    """A folder, a GGUF file and a template's file made absolute; a hub id, or an alias, is left alone.

    Raises:
        RecipeError: `check`, it can only be a path, and nothing is there.
    """
    if model.chat_template and "{" not in model.chat_template:  # a file; a template in Jinja has braces
        path = _resolve(model.chat_template, ("model", "chat_template"), source, folder, check)
        model = replace(model, chat_template=path)
    if model.name_or_path in WEIGHTS:  # an alias is not shadowed by a folder that happens to be called the same
        return model
    return replace(model, name_or_path=_resolve(model.name_or_path, ("model", "name_or_path"), source, folder, check))


def resolve_data_paths(data: DataConfig, source: Source, folder: Path, check: bool) -> DataConfig:
    """Data files made absolute; hub ids are left alone.

    Raises:
        RecipeError: `check`, and a file is not there.
    """

    def entry(value: str | WeightedPath, path: KeyPath) -> str | WeightedPath:
        if isinstance(value, WeightedPath):
            return replace(value, path=_resolve(value.path, path, source, folder, check, pattern=True))
        return _resolve(value, path, source, folder, check, pattern=True)

    def files(value: Files, key: str) -> Files:
        if isinstance(value, list):
            return [entry(item, ("data", key, index)) for index, item in enumerate(value)]
        return None if value is None else entry(value, ("data", key))

    prompts = data.exact_match
    if prompts is not None:
        prompts = _resolve(prompts, ("data", "exact_match"), source, folder, check)
    return replace(data, train=files(data.train, "train"), eval=files(data.eval, "eval"), exact_match=prompts)


def resolve_output_dir(training: TrainingConfig, source: Source) -> TrainingConfig:
    """The run folder made absolute, from the current directory.

    Raises:
        RecipeError: it cannot be a path.
    """
    key = ("training", "output_dir")
    if training.output_dir is None:
        return training
    if not training.output_dir or "\0" in training.output_dir:
        raise source.error(key, "cannot be a path; null writes nothing")
    try:
        return replace(training, output_dir=str(native(training.output_dir).expanduser().absolute()))
    except RuntimeError as error:  # a home of nobody
        raise source.error(key, f"cannot be a path: {error}") from None


def resolve_strategy_paths(strategies: Iterable[Strategy], source: Source, folder: Path, check: bool) -> None:
    """Folders that strategies name (fields with the metadata `path`) made absolute.

    Raises:
        RecipeError: `check`, and it can only be a path, and nothing is there.
    """
    for strategy in strategies:
        for field in fields(strategy):  # type: ignore[arg-type]
            value = getattr(strategy, field.name) if field.metadata.get("path") else None
            if value is not None:
                key = ("strategies", strategy.name, field.name)
                setattr(strategy, field.name, _resolve(value, key, source, folder, check))


def native(text: str) -> Path:
    """A path as this system spells it: under an ASCII locale, text beyond ASCII becomes the bytes of its UTF-8."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return Path(text)


def _resolve(text: str, key: KeyPath, source: Source, folder: Path, check: bool, pattern: bool = False) -> str:
    if not text:
        raise source.error(key, "is empty")
    typed = source.is_override(key)
    try:
        given = native(text).expanduser()
        place = Path(os.path.normpath((Path.cwd() if typed else folder.absolute()) / given))
        if place.exists():
            return str(place)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a home of nobody, a NUL
        raise source.error(key, f"cannot be a path: {short(str(error), 200)}") from None
    if pattern and glob.has_magic(text):
        return _resolve_pattern(given, key, source, Path.cwd() if typed else folder.absolute(), check)
    if _only_a_path(text):
        start = "the current directory, for overrides" if typed else "the recipe's folder"
        if check:
            raise source.error(key, f"no such file: {place} (relative paths start from {start})")
        return str(place)
    if given.exists():
        # libraries would take it from the current directory, and the recipe would work from there only
        raise source.error(
            key, f"no such file: {place} (there is one in the current directory; paths start from the recipe)"
        )
    return text


def _resolve_pattern(given: Path, key: KeyPath, source: Source, start: Path, check: bool) -> str:
    """A pattern made absolute; the folder it starts from is no pattern, whatever its name."""
    place = os.path.normpath(given if given.is_absolute() else Path(glob.escape(str(start))) / given)
    if check and not any(map(os.path.isfile, glob.iglob(place, recursive=True))):
        raise source.error(key, f"no file matches {place}")
    return place


def _only_a_path(text: str) -> bool:
    """Not possibly a hub id (`name` or `owner/name`)."""
    path = Path(text)
    if text.startswith((".", "/", "~")) or path.is_absolute() or path.suffix.lower() in _FILE_SUFFIXES:
        return True
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text, flags=re.ASCII) is None
