"""YAML 1.2 into plain values, keeping the line of every key so that an error can name it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, DocumentStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from lowmem.errors import UserError

KeyPath: TypeAlias = tuple[str | int, ...]

# words that a person writes to switch something; all of them are plain text in YAML 1.2
SWITCH_WORDS = {"no": False, "off": False, "none": False, "n": False, "yes": True, "on": True, "y": True}

_MAX_DEPTH = 20  # a recipe is four levels deep; far deeper nesting only exhausts the stack
_TAG = "tag:yaml.org,2002:"


class RecipeError(UserError):
    """Something is wrong in a recipe or in an override; the message starts with the file and line, or the override."""


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
        _refuse_indirection(text, name)
        node = _reader().compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        raise RecipeError(f"{name}{line}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise RecipeError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    lines: dict[KeyPath, int] = {}
    value = None if node is None else _Values(name, lines).of(node, ())
    return Document(value, lines)


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


def _refuse_indirection(text: str, name: str) -> None:
    depth = documents = 0
    for event in _events(text):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None):
            raise RecipeError(f"{name}:{line}: anchors and aliases (& and *) are not used in recipes; write it out")
        if getattr(event, "tag", None) and not isinstance(event, DocumentStartEvent):
            raise RecipeError(f"{name}:{line}: tags ({event.tag}) are not used in recipes; leave it out")
        if isinstance(event, DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise RecipeError(f"{name}:{line}: a recipe is one document; '---' starts a second one")
            if event.version not in (None, (1, 2)):
                raise RecipeError(f"{name}:{line}: recipes are YAML 1.2; drop the %YAML line")
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise RecipeError(f"{name}:{line}: nested deeper than {_MAX_DEPTH} levels")
        elif isinstance(event, CollectionEndEvent):
            depth -= 1


def _events(text: str) -> Iterator[Any]:
    yield from _reader().parse(io.StringIO(text))


class _Values:
    """Turns composed nodes into values and notes the line of every key."""

    def __init__(self, name: str, lines: dict[KeyPath, int]) -> None:
        self.name = name
        self.lines = lines

    def of(self, node: Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.of(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise RecipeError(f"{self.name}:{line}: a key must be text")
            key = str(key_node.value)
            if key in result:
                first = self.lines[(*path, key)]
                where = ".".join(map(str, (*path, key)))
                raise RecipeError(f"{self.name}:{line}: {where}: given twice; first on line {first}")
            self.lines[(*path, key)] = line
            result[key] = self.of(value_node, (*path, key))
        return result

    def _scalar(self, node: ScalarNode) -> Any:
        text, kind = node.value, str(node.tag).removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind in ("int", "float"):
            try:
                return _integer(text) if kind == "int" else _number(text)
            except ValueError:
                shown = text if len(text) < 40 else f"{text[:40]}..."
                raise RecipeError(f"{self.name}:{node.start_mark.line + 1}: not a number: {shown}") from None
        return PlainText(text) if node.style is None else text


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2].lower(), 10)
    return sign * int(digits[2:] if base != 10 else digits, base)


def _number(text: str) -> float:
    lowered = text.replace("_", "").lower()
    return float(lowered.replace(".inf", "inf").replace(".nan", "nan"))
