"""YAML 1.2 into plain values, keeping the line of every key so that an error can name it."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from lowmem.errors import UserError

KeyPath: TypeAlias = tuple[str | int, ...]

# words that a person writes to switch something; all of them are plain text in YAML 1.2
SWITCH_WORDS = {"no": False, "off": False, "none": False, "n": False, "yes": True, "on": True, "y": True}

_MAX_DEPTH = 20  # a recipe is four levels deep; far deeper nesting only exhausts the stack
_TAG = "tag:yaml.org,2002:"
_UNSEEN = ("Cc", "Zl", "Zp")  # control characters, and what starts a line or a paragraph


class RecipeError(UserError):
    """Something is wrong in a recipe or in an override; the message starts with the file and line, or the override.

    It is one line: control characters that come from a recipe are spelt out, so that they cannot steer a terminal.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if unicodedata.category(c) not in _UNSEEN else f"\\u{ord(c):04x}" for c in message))


class PlainText(str):
    """Text that stood without quotes: `no` may have been meant as a switch, `"no"` was not."""

    __slots__ = ()


@dataclass(frozen=True)
class Document:
    """A parsed YAML text.

    Attributes:
        value: dicts, lists, numbers, text, true/false, null.
        lines: path of keys -> line, counted from 1.
    """

    value: Any
    lines: dict[KeyPath, int]


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML 1.2 document.

    Raises:
        RecipeError: not YAML; or an anchor, an alias, a tag, or a key given twice. `name` and the line come first.
    """
    try:
        return _Reading(text, name).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise RecipeError(f"{name}{line}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise RecipeError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def dotted(path: KeyPath) -> str:
    """A path of keys for a message: `training.learning_rate`."""
    return ".".join(short(str(key)) for key in path)


def short(text: str, limit: int = 60) -> str:
    """A text for a message, its end cut off where it is long."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def dump_yaml(value: Any) -> str:
    """Plain values as YAML 1.2 text, keys in the order given."""
    stream = io.StringIO()
    writer = _reader()
    writer.Representer = _QuotesSwitchWords
    writer.default_flow_style = False
    writer.allow_unicode = True
    writer.width = 10_000
    writer.sort_base_mapping_type_on_output = False
    writer.dump(value, stream)
    return stream.getvalue()


class _QuotesSwitchWords(SafeRepresenter):
    """Quotes texts such as `no`, so that they are read back as meant and not taken for a switch."""

    def represent_text(self, data: str) -> Any:
        style = '"' if data.lower() in SWITCH_WORDS else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_QuotesSwitchWords.add_representer(str, _QuotesSwitchWords.represent_text)


def _reader() -> Any:
    # the pure implementation: it alone resolves scalars by YAML 1.2, and it keeps line numbers
    return YAML(typ="safe", pure=True)


class _Reading:
    """One pass over the parser's events: values, the line of every key, and what recipes do not use."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.reader = _reader()
        self.events = self._events(text)
        self.lines: dict[KeyPath, int] = {}

    def _events(self, text: str) -> Iterator[Any]:
        try:
            yield from self.reader.parse(io.StringIO(text))
        except (ValueError, OverflowError, LookupError, AttributeError, TypeError) as error:
            # what the parser stumbles over, such as an escape beyond Unicode
            raise RecipeError(f"{self.name}: not valid YAML: {error}") from None

    def document(self) -> Document:
        documents, value = 0, None
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(event, "a recipe is one document; '---' starts a second one")
                if event.version not in (None, (1, 2)):
                    raise self._error(event, "recipes are YAML 1.2; drop the %YAML line")
            elif isinstance(event, NodeEvent):
                value = self._value(event, ())
        return Document(value, self.lines)

    def _value(self, event: Any, path: KeyPath) -> Any:
        self._refuse_indirection(event)
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, ScalarEvent):
            return self._scalar(event)
        if len(path) >= _MAX_DEPTH:
            raise self._error(event, f"nested deeper than {_MAX_DEPTH} levels")
        return self._mapping(path) if isinstance(event, MappingStartEvent) else self._sequence(path)

    def _refuse_indirection(self, event: Any) -> None:
        if isinstance(event, AliasEvent) or event.anchor:
            raise self._error(event, "anchors and aliases (& and *) are not used in recipes; write it out")
        if event.tag:
            raise self._error(event, f"tags ({event.tag}) are not used in recipes; leave it out")

    def _sequence(self, path: KeyPath) -> list[Any]:
        result: list[Any] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            result.append(self._value(event, (*path, len(result))))
        return result

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            self._refuse_indirection(event)
            if not isinstance(event, ScalarEvent):
                raise self._error(event, "a key must be text")
            key = self._text(event)
            if key in result:
                where = dotted((*path, key))
                raise self._error(event, f"{where}: given twice; first on line {self.lines[(*path, key)]}")
            self.lines[(*path, key)] = event.start_mark.line + 1
            result[key] = self._value(next(self.events), (*path, key))
        return result

    def _scalar(self, event: Any) -> Any:
        text = self._text(event)
        kind = str(self.reader.resolver.resolve(ScalarNode, text, event.implicit)).removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind in ("int", "float"):
            try:
                number = _integer(text) if kind == "int" else _number(text)
            except ValueError:
                raise self._error(event, f"not a number: {short(text)}") from None
            if kind == "int" and not -(2**63) <= number < 2**63:
                raise self._error(event, f"a whole number has 64 bits at most; got {short(text)}")
            return number
        return PlainText(text) if event.style is None else text

    def _text(self, event: Any) -> str:
        text = str(event.value)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self._error(event, "half a character (a lone surrogate)")
        return text

    def _error(self, event: Any, reason: str) -> RecipeError:
        return RecipeError(f"{self.name}:{event.start_mark.line + 1}: {reason}")


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2].lower(), 10)
    return sign * int(digits[2:] if base != 10 else digits, base)


def _number(text: str) -> float:
    lowered = text.replace("_", "").lower()
    return float(lowered.replace(".inf", "inf").replace(".nan", "nan"))
