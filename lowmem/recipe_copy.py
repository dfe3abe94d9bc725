"""Copies a recipe together with the data it names."""

from __future__ import annotations

import shutil
from pathlib import Path

from lowmem.config import WeightedPath
from lowmem.errors import UserError
from lowmem.recipe import Recipe, load_recipe


def copy_recipe(name: str, destination: Path) -> list[Path]:
    """Copy a recipe and the data files in its folder that it names, keeping their relative places.

    Args:
        name: a shipped recipe, or a file.
        destination: a folder, or the new file (`.yaml`).

    Returns:
        The files written, the recipe first.

    Raises:
        UserError: a file is there already; nothing was written then.
    """
    recipe = load_recipe(name, check_files=False)
    assert recipe.path is not None
    source = recipe.path.absolute().parent
    target = destination if destination.suffix in (".yaml", ".yml") else destination / recipe.path.name
    copies = {recipe.path: target}
    for file in _data_files(recipe):
        if file.is_file() and file.is_relative_to(source):
            copies[file] = target.parent / file.relative_to(source)
    taken = [str(path) for path in copies.values() if path.exists()]
    if taken:
        raise UserError(f"copy: {', '.join(taken)} exists already; give another place")
    for file, path in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path)
    return list(copies.values())


def _data_files(recipe: Recipe) -> list[Path]:
    named: list[str] = []
    for value in (recipe.data.train, recipe.data.eval, recipe.data.exact_match):
        entries = value if isinstance(value, list) else [value] if value else []
        named += [entry.path if isinstance(entry, WeightedPath) else entry for entry in entries]
    return list(dict.fromkeys(map(Path, named)))
