"""ShareGPT conversations (`from`, `value`) -> messages."""

from __future__ import annotations

from typing import Any

from lowmem.data.content import Chat, Message, short, text_field
from lowmem.data.messages import chat, read_list, read_tools
from lowmem.data.read import BadRowError, Row

# names in use -> role; whatever else stands there is an error, because a turn left out changes the conversation
ROLE_NAMES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "chatbot", "bot", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "call"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
}


def read_conversations(row: Row, where: str) -> Chat:
    """`conversations`: a list of from and value (or role and content); maybe `system` and `tools`."""
    messages = with_system(row, conversation(row, "conversations", where), where)
    return chat(messages, where, tools=read_tools(row, where))


def conversation(row: Row, key: str, where: str) -> list[Message]:
    """The messages of a list in ShareGPT's form."""
    turns = read_list(row, key, where)
    return [message(turn, f"{where}, message {index}") for index, turn in enumerate(turns)]


def messages_of(row: Row, key: str, where: str) -> list[Message]:
    """The messages of a list in OpenAI's form, or, where they have `from`, in ShareGPT's."""
    messages = read_list(row, key, where)
    shared = any(turn.get("role") is None and turn.get("from") is not None for turn in messages)
    return conversation(row, key, where) if shared else messages


def with_system(row: Row, messages: list[Message], where: str) -> list[Message]:
    """The messages, with what the field `system` says in front; a blank field says nothing.

    Raises:
        BadRowError: the messages start with another system text.
    """
    system = text_field(row, "system", where, optional=True)
    if not system.strip() or not messages:
        return messages
    if messages[0].get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise BadRowError(where, "the field 'system' and the system message contradict each other", "wrong value")
    return messages


def message(turn: Message, where: str) -> Message:
    """One turn with `role` and `content`; a function call becomes an assistant's message with `tool_calls`."""
    rest = {key: value for key, value in turn.items() if value is not None}
    name, value = _only(rest, ("from", "role"), where), _only(rest, ("value", "content"), where)
    spelt = name.strip().lower().replace("-", "_") if isinstance(name, str) else ""
    role = ROLE_NAMES.get(spelt)
    if role is None:
        known = ", ".join(ROLE_NAMES)
        raise BadRowError(where, f"unknown role {short(name)!r}; known are {known}", "unknown role")
    if role == "call":
        if not value:
            raise BadRowError(where, f"the {short(name)} is empty", "wrong tool call")
        return {**rest, "role": "assistant", "content": "", "tool_calls": value}
    return {**rest, "role": role, "content": value}


def _only(turn: dict[str, Any], keys: tuple[str, str], where: str) -> Any:
    """The value under the one of two keys that is there; both are taken out."""
    found = [turn.pop(key) for key in keys if key in turn]
    if len(found) == 2 and found[0] != found[1]:
        raise BadRowError(where, f"'{keys[0]}' and '{keys[1]}' contradict each other", "wrong value")
    return found[0] if found else None
