"""Messages of a chat as people write them -> one form: roles, text, reasoning, tool calls and loss weights."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from lowmem.data.content import Chat, Dropped, Message, short
from lowmem.data.read import BadRowError, Row

# templates skip roles they do not know without a word, so a name outside this list is an error here
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")
WEIGHTS = ("loss_weight", "weight", "train")


def chat(
    messages: list[Message], where: str, first: int = 0, tools: list[Any] | None = None, plain: bool = False
) -> Chat:
    """Check messages and find the turns to learn: assistant messages from `first` on that say something.

    A null content is an empty one. An assistant turn that is blank or has a loss weight of 0 stays in the text without
    supervision.

    Raises:
        BadRowError: a role, a content or a weight that cannot be used.
        Dropped: no turn is left.
    """
    if not messages:
        raise Dropped("no messages")
    clean: list[Message] = []
    weights: list[float] = []
    for index, message in enumerate(messages):
        one, weight = _message(message, f"{where}, message {index}")
        clean.append(one)
        weights.append(weight)
    answers = [index for index, message in enumerate(clean) if message["role"] == "assistant" and index >= first]
    spoken = [index for index in answers if clean[index]["content"].strip() or clean[index].get("tool_calls")]
    turns = {index: weights[index] for index in spoken if weights[index]}
    if not turns:
        raise Dropped("no answer" if not answers else "empty answer" if not spoken else "nothing to learn")
    return Chat(clean, turns, tools, plain, silenced=[index for index in spoken if not weights[index]])


def read_list(row: Row, key: str, where: str) -> list[Message]:
    """A field that is a list of messages, or the JSON text of one (as a CSV file has it)."""
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = from_json(value, f"'{key}'", where)
    if value is None or value == "":
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(message, dict) for message in value):
        raise BadRowError(where, f"'{key}' is a list of messages with role and content", "wrong type")
    return list(value)


def read_tools(row: Row, where: str) -> list[Any] | None:
    """`tools` (or `functions`): a list of schemas or its JSON text; a bare function gets its usual envelope."""
    key = "tools" if row.get("tools") else "functions"
    tools = row.get(key)
    if isinstance(tools, str):
        tools = from_json(tools, f"'{key}'", where) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError(where, f"'{key}' is a list of tool schemas", "wrong type")
    return [_enveloped(tool) for tool in tools]


def from_json(text: str, what: str, where: str) -> Any:
    """The value of a JSON text inside a row.

    Raises:
        BadRowError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(where, f"{what} is not JSON ({error or 'nested too deeply'})", "wrong value") from None


def tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, from one call or a list, as objects or JSON text; arguments become objects.

    Raises:
        BadRowError: a call without a name, or arguments that are no object.
    """
    if isinstance(value, str):
        value = from_json(value, "the tool call", where)
    calls = value if isinstance(value, list | tuple) else [value]
    return [_call(call, where) for call in calls]


def _enveloped(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = from_json(call, "the tool call", where)
    function = call.get("function") or call if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadRowError(where, f"a tool call has a name and arguments; got {short(call)}", "wrong tool call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json(arguments, f"'arguments' of {short(name)}", where) if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise BadRowError(
            where, f"'arguments' of {short(name)} is an object; got {short(arguments)}", "wrong tool call"
        )
    made = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return {"id": call["id"], **made} if call.get("id") is not None else made


def _message(message: Message, where: str) -> tuple[Message, float]:
    """A message in the one form, and its loss weight."""
    clean = {key: value for key, value in message.items() if value is not None}
    role = clean.get("role")
    if role == "function":  # OpenAI's older name
        role = clean["role"] = "tool"
    if role not in ROLES:
        raise BadRowError(where, f"unknown role {short(role)!r}; roles are {', '.join(ROLES)}", "unknown role")
    weight = _weight(clean, role, where)
    content, thoughts, calls = _content(clean.get("content"), where)
    thoughts = _reasoning(clean, thoughts, where)
    if calls and clean.get("tool_calls"):
        raise BadRowError(where, "tool calls in 'content' and in 'tool_calls'; give one", "wrong tool call")
    calls = calls or [call for key in ("tool_calls", "function_call") for call in _listed(clean.pop(key, None), where)]
    clean["content"] = content
    if role != "assistant" and (thoughts or calls):
        raise BadRowError(where, f"reasoning and tool calls are an assistant's; the role is {role}", "wrong value")
    if thoughts:
        clean["reasoning_content"] = thoughts
    if calls:
        clean["tool_calls"] = calls
    return clean, weight


def _reasoning(message: Message, part: str, where: str) -> str:
    """The reasoning of a message, whatever its field is called; the fields are taken out."""
    given = {key: message.pop(key) for key in REASONING if key in message}
    for key, value in given.items():
        if not isinstance(value, str):
            raise BadRowError(where, f"'{key}' is a string; got {type(value).__name__}", "wrong type")
    found = {text for text in (part, *given.values()) if text.strip()}
    if len(found) > 1:
        raise BadRowError(where, "two different reasonings in one message", "wrong value")
    return found.pop() if found else ""


def _listed(value: Any, where: str) -> list[dict[str, Any]]:
    return tool_calls(value, where) if value else []


def _weight(message: Message, role: str, where: str) -> float:
    """The loss weight of a message, whatever its field is called; the field is taken out."""
    given = {key: message.pop(key) for key in WEIGHTS if key in message}
    found: set[float] = set()
    for key, value in given.items():
        number = isinstance(value, bool) if key == "train" else isinstance(value, int | float) and value is not True
        single = float(np.float32(value)) if number and abs(value) < 1e30 else math.nan
        if not (number and single >= 0) or (single and role != "assistant"):
            kinds = "true or false" if key == "train" else "a number of 0 or more"
            kinds = kinds if role == "assistant" else f"{kinds} for an assistant, 0 or false for others"
            raise BadRowError(where, f"'{key}' is {kinds}; got {short(value)} for {role}", "wrong value")
        found.add(single)
    if len(found) > 1:
        raise BadRowError(where, f"{' and '.join(given)} contradict each other", "wrong value")
    return found.pop() if found else 1.0


def _content(content: Any, where: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, reasoning and tool calls of a content; parts of one kind are joined."""
    if content is None:
        return "", "", []
    if isinstance(content, str):
        return content, "", []
    if not isinstance(content, list | tuple):
        raise BadRowError(where, f"'content' is a string; got {type(content).__name__}", "wrong type")
    text, reasoning, calls = "", "", []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in TEXT_PARTS:
            text += _said(part, ("text", "value"), where)
        elif kind in REASONING:
            reasoning += _said(part, ("text", "value", kind, "content"), where)
        elif kind in ("tool_call", "function_call"):
            calls += tool_calls(part.get("value") or part.get(kind) or part, where)
        else:
            known = "text, reasoning and tool_call (pictures and sound cannot be learnt)"
            raise BadRowError(where, f"content parts are {known}; got '{short(kind)}'", "unknown content part")
    return text, reasoning, calls


def _said(part: dict[str, Any], keys: tuple[str, ...], where: str) -> str:
    """What a part says, under the first of its usual keys that is there."""
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    if not isinstance(value, str):
        known = ", ".join(f"'{key}'" for key in keys)
        raise BadRowError(where, f"a part of type {part['type']} has its text in {known}", "wrong type")
    return value
