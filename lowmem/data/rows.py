"""Row formats: one function per format turns a row into a chat, a text or token ids. New formats go into `FORMATS`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowmem.data.read import BadRowError, Row

Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]
Message: TypeAlias = dict[str, Any]
IGNORE = -100
# templates skip roles they do not know without a word, so a name outside this list is an error here
ROLES = ("system", "developer", "user", "assistant", "tool")


class Dropped(Exception):  # noqa: N818 - not a fault: the row is fine, and has nothing to teach
    """A row that is left out and counted. `args[0]` is the reason."""


@dataclass(frozen=True)
class Chat:
    """Messages, and which of them are learnt.

    Attributes:
        messages: role, content (a string) and whatever else the template reads.
        turns: indices of the assistant messages that are supervised; never empty.
        tools: tool schemas for the template.
        plain: the row can do without a chat template (see `render.plain_form`).
    """

    messages: list[Message]
    turns: list[int]
    tools: list[Any] | None = None
    plain: bool = False


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


def read_messages(row: Row, where: str) -> Chat:
    """`messages`: a list of role and content; maybe `tools`."""
    return chat(_messages(row, "messages", where), where, tools=_tools(row, where))


def read_instruction(row: Row, where: str) -> Chat:
    """`instruction`, `input`, `output`; maybe `system` and `history` (pairs of question and answer)."""
    messages: list[Message] = []
    system = _string(row, "system", where, optional=True)
    if system.strip():
        messages.append({"role": "system", "content": system})
    for pair in row.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRowError(where, "'history' is a list of pairs (question, answer)", "wrong type")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = [_string(row, "instruction", where, optional=True), _string(row, "input", where, optional=True)]
    messages.append({"role": "user", "content": "\n\n".join(part for part in question if part.strip())})
    messages.append({"role": "assistant", "content": _string(row, "output", where)})
    if not messages[-1]["content"].strip():
        raise Dropped("empty answer")
    return chat(messages, where, plain=True)


def read_prompt_completion(row: Row, where: str) -> Chat | Text:
    """`prompt` and `completion`: two strings, joined as they are, or two lists of messages."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list):
        before = _messages(row, "prompt", where)
        if isinstance(completion, list):
            after = _messages(row, "completion", where)
        else:
            after = [{"role": "assistant", "content": _string(row, "completion", where)}]
        return chat([*before, *after], where, first=len(before), tools=_tools(row, where))
    text = Text(_string(row, "prompt", where, optional=True), _string(row, "completion", where))
    if not text.answer.strip():
        raise Dropped("empty answer")
    return text


def read_text(row: Row, where: str) -> Text:
    """`text`: one document."""
    text = _string(row, "text", where)
    if not text.strip():
        raise Dropped("empty text")
    return Text(None, text)


def read_tokens(row: Row, where: str) -> Tokens:
    """`input_ids`, maybe `labels` (-100: no loss; missing: every token) and `loss_weights` (0 or more)."""
    ids = _ints(row, "input_ids", where, lowest=0)
    if not len(ids):
        raise Dropped("empty row")
    labels = ids if row.get("labels") is None else _ints(row, "labels", where, lowest=IGNORE)
    if ((labels < 0) & (labels != IGNORE)).any():
        raise BadRowError(where, f"'labels' holds token ids and {IGNORE}", "wrong value")
    weights = None
    if row.get("loss_weights") is not None:
        try:
            weights = np.asarray(row["loss_weights"], dtype=np.float32)
        except (TypeError, ValueError):
            raise BadRowError(where, "'loss_weights' is a list of numbers", "wrong type") from None
        if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
            raise BadRowError(where, "'loss_weights' are finite numbers of 0 or more", "wrong value")
    for name, other in (("labels", labels), ("loss_weights", weights)):
        if other is not None and len(other) != len(ids):
            message = f"'{name}' has {len(other)} entries, 'input_ids' {len(ids)}"
            raise BadRowError(where, message, "lengths differ")
    return Tokens(ids, labels, weights)


@dataclass(frozen=True)
class Format:
    """One row format: the keys by which `auto` knows it, and its reader."""

    keys: tuple[str, ...]
    read: Callable[[Row, str], Content]


# in the order in which `auto` tries them
FORMATS: dict[str, Format] = {
    "tokens": Format(("input_ids",), read_tokens),
    "messages": Format(("messages",), read_messages),
    "prompt_completion": Format(("prompt", "completion"), read_prompt_completion),
    "instruction": Format(("instruction", "output"), read_instruction),
    "text": Format(("text",), read_text),
}


def format_of(row: Row, where: str, wanted: str = "auto") -> str:
    """The name of a row's format.

    Raises:
        BadRowError: no format has these keys, or the wanted one needs others.
    """
    if wanted != "auto":
        missing = [key for key in FORMATS[wanted].keys if key not in row]
        if missing:
            raise BadRowError(where, f"format '{wanted}' needs the field '{missing[0]}'; {_has(row)}", "missing field")
        return wanted
    # a data set with one schema for mixed rows has every column everywhere, with nulls
    for present in (lambda key: row.get(key) is not None, lambda key: key in row):
        for name, kind in FORMATS.items():
            if all(map(present, kind.keys)):
                return name
    expected = "; ".join(f"{name} ({', '.join(kind.keys)})" for name, kind in FORMATS.items())
    raise BadRowError(where, f"no known format; {_has(row)}; formats: {expected}", "unknown format")


def read(row: Row, where: str, wanted: str = "auto") -> tuple[str, Content]:
    """The name of a row's format, and its content.

    Raises:
        BadRowError: something in the row is wrong.
        Dropped: the row is fine and teaches nothing.
    """
    name = format_of(row, where, wanted)
    return name, FORMATS[name].read(row, where)


def chat(
    messages: list[Message], where: str, first: int = 0, tools: list[Any] | None = None, plain: bool = False
) -> Chat:
    """Check messages and find the turns to learn: assistant messages from `first` on that say something.

    A null content is an empty one. An assistant turn that is blank or has `loss_weight` 0 stays in the text without
    supervision.

    Raises:
        BadRowError: a role, a content or a weight that cannot be used.
        Dropped: no turn is left.
    """
    if not messages:
        raise Dropped("no messages")
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant" and index >= first]
    clean = [_message(message, f"{where}, message {index}") for index, message in enumerate(messages)]
    spoken = [index for index in answers if clean[index]["content"].strip() or clean[index].get("tool_calls")]
    turns = [index for index in spoken if messages[index].get("loss_weight") != 0]
    if not turns:
        raise Dropped("no answer" if not answers else "empty answer" if not spoken else "nothing to learn")
    return Chat(clean, turns, tools, plain)


def _message(message: Message, where: str) -> Message:
    role, weight = message.get("role"), message.get("loss_weight")
    if role not in ROLES:
        raise BadRowError(where, f"unknown role {role!r}; roles are {', '.join(ROLES)}", "unknown role")
    if weight not in (None, 0, 1) or (weight == 1 and role != "assistant"):
        raise BadRowError(where, f"'loss_weight' is 0, or 1 for an assistant; got {weight!r} for {role}", "wrong value")
    clean = {key: value for key, value in message.items() if value is not None and key != "loss_weight"}
    clean["content"] = _content(message.get("content"), where)
    return clean


def _content(content: Any, where: str) -> str:
    """A content as one string; text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRowError(where, f"'content' is a string; got {type(content).__name__}", "wrong type")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = (part.get("text") or part.get("value") or "") if kind == "text" else None
        if not isinstance(text, str):
            raise BadRowError(where, f"content parts are text; got '{kind}'", "unknown content part")
        texts.append(text)
    return "".join(texts)


def _messages(row: Row, key: str, where: str) -> list[Message]:
    value = row.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(message, dict) for message in value):
        raise BadRowError(where, f"'{key}' is a list of messages with role and content", "wrong type")
    return list(value)


def _tools(row: Row, where: str) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRowError(where, f"'tools' is not JSON ({error})", "wrong value") from None
    if tools and not isinstance(tools, list):
        raise BadRowError(where, "'tools' is a list of tool schemas", "wrong type")
    return tools or None


def _string(row: Row, key: str, where: str, optional: bool = False) -> str:
    if not optional and key not in row:
        raise BadRowError(where, f"the field '{key}' is missing; {_has(row)}", "missing field")
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRowError(where, f"'{key}' is a string; got {type(value).__name__}", "wrong type")
    return value or ""


def _ints(row: Row, key: str, where: str, lowest: int) -> Int32:
    try:
        values = np.asarray(row[key])
    except (TypeError, ValueError):
        values = np.asarray(None)
    if values.ndim == 1 and not len(values):
        return np.empty(0, np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise BadRowError(where, f"'{key}' is a list of integers", "wrong type")
    if values.min() < lowest or values.max() >= 2**31:
        raise BadRowError(where, f"'{key}' holds values from {lowest} to 2^31 - 1; got {values.min()}", "wrong value")
    return values.astype(np.int32)


def _has(row: Row) -> str:
    return f"the row has {', '.join(map(str, row)) or 'no fields'}"
