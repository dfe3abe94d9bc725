"""Dotted overrides of a recipe: `training.learning_rate=1e-4`."""

from __future__ import annotations

from typing import Any

from lowmem.recipe_source import Source
from lowmem.schema import nearest
from lowmem.yaml_lines import KeyPath, RecipeError, dotted, parse_yaml, short

_SECTIONS = ("model", "data", "training", "strategies")


def apply_override(source: Source, text: str) -> None:
    """Change `source` as `section.key=value` says; `strategies.NAME=null` takes a strategy out.

    Raises:
        RecipeError: the text is no override, or its section is none; the message starts with it.
    """
    origin = f"override '{short(text, 200)}'"
    dotted, separator, raw = text.partition("=")
    dotted = dotted.strip()
    if not separator or not dotted:
        raise RecipeError(f"{origin}: must be section.key=value, such as training.learning_rate=1e-4")
    value = _value(raw, origin)
    section, _, rest = dotted.partition(".")
    if section not in _SECTIONS:
        near = nearest(section, _SECTIONS)
        hint = f"did you mean {near}?" if near else f"start with one of {', '.join(_SECTIONS)}"
        raise RecipeError(f"{origin}: unknown section {short(section)}; {hint}")
    if section == "strategies" and rest:
        path: tuple[str, ...] = (section, *_split_strategy(source, rest, value))
        if len(path) == 2 and value is None:
            _take_out(source, path[1], origin)
            return
    else:
        path = (section, *rest.split(".")) if rest else (section,)
    _set(source, path, value, origin)


def _value(raw: str, origin: str) -> Any:
    if not raw.strip():
        raise RecipeError(f'{origin}: the value is missing; write null, or "" for empty text')
    try:
        return parse_yaml(raw, origin).value
    except RecipeError as error:
        # an override has no lines worth counting
        raise RecipeError(str(error).replace(f"{origin}:1:", f"{origin}:", 1)) from None


def _split_strategy(source: Source, rest: str, value: Any) -> tuple[str, ...]:
    """A strategy's name may hold dots itself: first the names in the recipe, then ours, then an import path."""
    from lowmem.strategies import STRATEGIES

    present = source.tree.get("strategies")
    names = sorted([*(present if isinstance(present, dict) else ()), *STRATEGIES], key=len, reverse=True)
    for name in names:
        if rest == name or rest.startswith(f"{name}."):
            return (name, *rest[len(name) + 1 :].split(".")) if rest != name else (name,)
    if value is None or isinstance(value, dict) or "." not in rest:
        return (rest,)
    name, _, key = rest.rpartition(".")
    return (name, key)


def _take_out(source: Source, name: str, origin: str) -> None:
    present = source.tree.get("strategies")
    if not isinstance(present, dict) or name not in present:
        near = nearest(name, present or ())
        raise RecipeError(
            f"{origin}: the recipe has no strategy {short(name)}" + (f"; did you mean {near}?" if near else "")
        )
    del present[name]
    _forget(source, ("strategies", name))


def _set(source: Source, path: tuple[str, ...], value: Any, origin: str) -> None:
    node = source.tree
    for depth, key in enumerate(path[:-1], start=1):
        if node.get(key) is None:
            node[key] = {}
            source.origins[path[:depth]] = origin
        node = node[key]
        if not isinstance(node, dict):
            raise RecipeError(f"{origin}: {dotted(path[:depth])} holds {short(str(node))}, which has no keys")
    _forget(source, path)
    node[path[-1]] = value
    source.origins[path] = origin


def _forget(source: Source, path: KeyPath) -> None:
    for known in [known for known in source.origins if known[: len(path)] == path]:
        del source.origins[known]
