"""The JSON Schema of a recipe, so that editors complete and check it."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from lowmem.config import DataConfig, ModelConfig, TrainingConfig
from lowmem.schema import field_types

_OPEN = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def json_schema() -> dict[str, Any]:
    """The schema of a whole recipe (draft 2020-12): four blocks, no other keys, every field described."""
    from lowmem.strategies import STRATEGIES

    definitions: dict[str, Any] = {}
    strategies = {name: _or_null(_block(cls, definitions)) for name, cls in sorted(STRATEGIES.items())}
    blocks = {
        "model": _block(ModelConfig, definitions),
        "data": _or_null(_block(DataConfig, definitions)),
        "training": _or_null(_block(TrainingConfig, definitions)),
        "strategies": _or_null(
            {
                "type": "object",
                "description": "How it fits into memory: each technique at most once, order without meaning.",
                "properties": strategies,
                "patternProperties": {
                    r"^[^\W\d]\w*(\.[^\W\d]\w*)+$": {
                        "type": ["object", "null"],
                        "description": "A class of your own by its import path; its fields are the keys.",
                    }
                },
                "additionalProperties": False,
            }
        ),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lowmem recipe",
        "type": "object",
        "properties": blocks,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def plain(value: Any) -> Any:
    """Dataclasses, tuples, enums and paths as dicts, lists and text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str | PurePath):
        return str(value)
    return value


def described_fields(cls: type[Any]) -> dict[str, str]:
    """Field name -> what the class's docstring says under `Attributes:`."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    result: dict[str, str] = {}
    # an entry starts at the section's indentation and goes on in deeper lines
    for entry in re.findall(r"^    (\S.*(?:\n(?:      .*|\s*$))*)", section, flags=re.MULTILINE):
        names, separator, words = entry.partition(":")
        if separator:
            description = " ".join(words.split())
            result |= {re.sub(r"\W.*", "", name.strip()): description for name in names.split(",")}
    return result


def _block(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    described = described_fields(cls)
    types = field_types(cls)
    properties: dict[str, Any] = {}
    required = []
    for field in fields(cls):
        if field.name not in types:
            continue
        schema = TypeAdapter[Any](types[field.name], config=_OPEN).json_schema()
        definitions |= schema.pop("$defs", {})
        if field.default is not MISSING:
            schema["default"] = plain(field.default)
        elif field.default_factory is not MISSING:
            schema["default"] = plain(field.default_factory())
        else:
            required.append(field.name)
        if field.name in described:
            schema["description"] = described[field.name]
        properties[field.name] = schema
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    block = {"type": "object", "description": " ".join(summary.split()), "properties": properties}
    return block | ({"required": required} if required else {}) | {"additionalProperties": False}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "description": schema["description"]}
