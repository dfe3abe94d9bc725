"""What a row holds once its format is known: a chat, a text or token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowmem.data.read import BadRowError, Row

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]
Message: TypeAlias = dict[str, Any]
IGNORE = -100


class Dropped(Exception):  # noqa: N818 - not a fault: the row is fine, and has nothing to teach
    """A row that is left out and counted. `args[0]` is the reason."""


@dataclass(frozen=True)
class Chat:
    """Messages, and which of them are learnt.

    Attributes:
        messages: role, content (a string), maybe `reasoning_content` and `tool_calls` (arguments are objects), and
            whatever else the template reads.
        turns: index of each supervised assistant message -> its loss weight (above 0), in order; never empty.
        tools: tool schemas for the template, each `{"type": "function", "function": {...}}`.
        plain: the row can do without a chat template (see `render.plain_form`).
        silenced: assistant messages that would be learnt but for their loss weight of 0.
    """

    messages: list[Message]
    turns: Mapping[int, float]
    tools: list[Any] | None = None
    plain: bool = False
    silenced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    """Plain text: a prompt (None: there is none) and what follows it."""

    prompt: str | None
    answer: str


@dataclass(frozen=True)
class Tokens:
    """Token ids as they are: three arrays of one length (no weights: None)."""

    input_ids: Int32
    labels: Int32
    loss_weights: Float32 | None = None


Content: TypeAlias = Chat | Text | Tokens


def text_field(row: Row, key: str, where: str, optional: bool = False) -> str:
    """A field that is a string; null is an empty one.

    Raises:
        BadRowError: it is something else, or is missing.
    """
    if not optional and key not in row:
        raise BadRowError(where, f"the field '{key}' is missing; {has(row)}", "missing field")
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRowError(where, f"'{key}' is a string; got {type(value).__name__}", "wrong type")
    return value or ""


def has(row: Row) -> str:
    """The fields of a row, for messages."""
    names = [short(name) for name in row]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"the row has {', '.join(names[:12]) or 'no fields'}{more}"


def short(value: object) -> str:
    """A value in a message: text as it is, anything else as Python writes it, and never long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
