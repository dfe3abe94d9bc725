"""Checks plain values against the very dataclasses that Python users fill, and says what is accepted.

A field is checked by pydantic in strict JSON mode: nothing is coerced except a whole number to a float, a list to a
tuple, and text to an enum or a path.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lowmem.yaml_lines import SWITCH_WORDS, KeyPath, PlainText, short

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


class InvalidValueError(Exception):
    """A value that a field does not take.

    Attributes:
        path: keys from the checked mapping to the value.
        reason: what is wrong and what is accepted.
    """

    def __init__(self, path: KeyPath, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


def build(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from plain values.

    Raises:
        InvalidValueError: an unknown or missing key, a value of another type, or one that the class itself refuses.
    """
    known = field_types(cls)
    for key in values:
        if key not in known:
            raise InvalidValueError((key,), unknown_key(key, known))
    for field in fields(cls):
        if field.name in known and field.name not in values and _required(field):
            raise InvalidValueError((), f"the key {field.name} is missing")
    converted = {key: _nested(known[key], value, key) for key, value in values.items()}
    try:
        return cls(**converted)
    except ValueError as error:  # a UserError, or what a user's own class raises
        raise InvalidValueError(_blamed(cls, str(error), values), str(error)) from error


def field_types(cls: type[Any]) -> Mapping[str, Any]:
    """Field name -> type, for the fields that a user may give."""
    key: Any = cls  # mypy holds that classes cannot be keys
    return _field_types(key)


@cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    result: dict[str, Any] = {}
    for field in fields(cls):
        if field.init:
            owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
            # one field at a time: an annotation of another field may name a type that exists for type checkers only
            holder = types.SimpleNamespace(__annotations__={field.name: field.type})
            result |= get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)
    return types.MappingProxyType(result)


def convert(hint: Any, value: Any) -> Any:
    """`value` as `hint` wants it.

    Raises:
        InvalidValueError: it is something else; the reason says what is accepted.
    """
    members = _members(hint)
    if isinstance(value, dict):
        for member in members:
            if is_dataclass(member) and isinstance(member, type):
                return build(member, value)
    if isinstance(value, list):
        for member in members:
            if get_origin(member) is list:
                item_type = get_args(member)[0]
                return [_nested(item_type, item, index) for index, item in enumerate(value)]
    if isinstance(value, PlainText) and {str, type(None)} <= set(members) and SWITCH_WORDS.get(value.lower()) is False:
        raise InvalidValueError(
            (), f'{value} is text in YAML 1.2; use null to switch it off, or "{value}" for the text'
        )
    try:
        return _adapter(hint).validate_json(json.dumps(value))
    except ValidationError:
        raise InvalidValueError((), _refusal(hint, value)) from None


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(hint)
    except TypeError:  # a hint that cannot be a key, or that pydantic refuses
        return TypeAdapter(hint, config=_STRICT)


@cache
def _cached_adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=_STRICT)


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """`unknown key; did you mean r?`, or the valid keys where none is near."""
    valid = list(valid)
    near = nearest(key, valid)
    if near:
        return f"unknown key; did you mean {near}?"
    return f"unknown key; valid keys: {', '.join(valid)}" if valid else "unknown key; there are no keys here"


def nearest(key: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid key that was probably meant: spelt alike, or equal but for case and underscores."""
    plain = {name.lower().replace("_", ""): name for name in valid}
    wanted = key.lower().replace("_", "").replace("-", "")
    found = difflib.get_close_matches(wanted, plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def describe(hint: Any) -> str:
    """A type in words: `a whole number or null`."""
    return _join([_describe_one(member) for member in _members(hint)])


def _nested(hint: Any, value: Any, key: str | int) -> Any:
    try:
        return convert(hint, value)
    except InvalidValueError as error:
        raise InvalidValueError((key, *error.path), error.reason) from error.__cause__


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _blamed(cls: type[Any], message: str, values: Mapping[str, Any]) -> KeyPath:
    """The key that a class complains about: the first of its fields that the message names and the user gave."""
    words = "".join(char if char.isalnum() or char == "_" else " " for char in message).split()
    return next(((word,) for word in words if word in values and word in field_types(cls)), ())


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(inner for member in get_args(hint) for inner in _members(member))
    return (hint,)


def _describe_one(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (list, tuple, set, frozenset):
        inner = [describe(part) for part in get_args(hint) if part is not ...]
        if origin is tuple and ... not in get_args(hint):
            return f"a list of {len(inner)}: {', '.join(inner)}"
        return f"a list (items: {inner[0]})" if inner else "a list"
    if origin is dict:
        return "a mapping"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"a mapping with {', '.join(field_types(hint))}"
    return _WORDS.get(hint) or str(getattr(hint, "__name__", hint))


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _refusal(hint: Any, value: Any) -> str:
    advice = _advice(set(_members(hint)), value)
    return f"must be {describe(hint)}; got {shown(value)}" + (f" ({advice})" if advice else "")


def _advice(members: set[Any], value: Any) -> str | None:
    """What to write instead, where the slip is a common one."""
    if isinstance(value, str):
        return _advice_on_text(members, value)
    if value is False and type(None) in members:
        return "use null to switch it off"
    if isinstance(value, bool):
        return f'quote it for the text: "{str(value).lower()}"' if str in members else None
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be finite"
    if isinstance(value, float) and int in members and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, int | float) and str in members:
        return f'quote it for the text: "{value}"'
    return None


def _advice_on_text(members: set[Any], value: str) -> str | None:
    meant = SWITCH_WORDS.get(value.lower())
    if meant is not None and bool in members:
        return f"{value} is text in YAML 1.2; write {str(meant).lower()}"
    if meant is False and type(None) in members:
        return f"{value} is text in YAML 1.2; use null to switch it off"
    if members & {int, float} and not isinstance(value, PlainText):
        try:
            float(value)
        except ValueError:
            return None
        return "it stands in quotes; drop them"
    return None


def shown(value: Any) -> str:
    """A value for a message, as a recipe would spell it."""
    if isinstance(value, PlainText):
        return short(value)
    return short(json.dumps(value, ensure_ascii=False))
