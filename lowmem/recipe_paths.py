"""Which file a recipe means: shipped recipes, and paths that start from the recipe's folder."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from lowmem.config import DataConfig, ModelConfig, TrainingConfig, WeightedPath
from lowmem.fetch import WEIGHTS
from lowmem.recipe_source import Source
from lowmem.schema import nearest
from lowmem.yaml_lines import KeyPath, RecipeError

_FILE_SUFFIXES = {".json", ".jsonl", ".txt", ".md", ".csv", ".tsv", ".parquet", ".arrow", ".gguf", ".gz", ".zst"}
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
    """A folder or GGUF file made absolute; a hub id, or an alias, is left alone.

    Raises:
        RecipeError: `check`, it can only be a path, and nothing is there.
    """
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
            return replace(value, path=_resolve(value.path, path, source, folder, check))
        return _resolve(value, path, source, folder, check)

    def files(value: str | list[str | WeightedPath] | None, key: str) -> str | list[str | WeightedPath] | None:
        if isinstance(value, list):
            return [entry(item, ("data", key, index)) for index, item in enumerate(value)]
        return None if value is None else _resolve(value, ("data", key), source, folder, check)

    prompts = data.exact_match
    if prompts is not None:
        prompts = _resolve(prompts, ("data", "exact_match"), source, folder, check)
    return replace(data, train=files(data.train, "train"), eval=files(data.eval, "eval"), exact_match=prompts)


def resolve_output_dir(training: TrainingConfig) -> TrainingConfig:
    """The run folder made absolute, from the current directory."""
    if training.output_dir is None:
        return training
    return replace(training, output_dir=str(native(training.output_dir).expanduser().absolute()))


def native(text: str) -> Path:
    """A path as this system spells it: under an ASCII locale, text beyond ASCII becomes the bytes of its UTF-8."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return Path(text)


def _resolve(text: str, key: KeyPath, source: Source, folder: Path, check: bool) -> str:
    if not text:
        raise source.error(key, "is empty")
    given = native(text).expanduser()
    typed = source.is_override(key)
    place = Path(os.path.normpath((Path.cwd() if typed else folder.absolute()) / given))
    if place.exists():
        return str(place)
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


def _only_a_path(text: str) -> bool:
    """Not possibly a hub id (`name` or `owner/name`)."""
    path = Path(text)
    if text.startswith((".", "/", "~")) or path.is_absolute() or path.suffix.lower() in _FILE_SUFFIXES:
        return True
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text, flags=re.ASCII) is None
