"""Preference rows (a chosen and a rejected answer), of which only the chosen answer is learnt."""

from __future__ import annotations

from lowmem.data.content import Chat, Dropped, Message, Text, text_field
from lowmem.data.messages import chat, read_tools
from lowmem.data.read import BadRowError, Row
from lowmem.data.sharegpt import conversation, messages_of, with_system


def read_chosen(row: Row, where: str) -> Chat | Text:
    """`chosen` behind `conversations`, `prompt` or `instruction`, or a `chosen` that is the whole conversation.

    A whole conversation is learnt from the first message on in which it differs from `rejected`.
    """
    prompt, chosen = row.get("prompt"), row["chosen"]
    if isinstance(chosen, str) and (prompt is None or isinstance(prompt, str)) and not _has_chat(row):
        if prompt is None:
            raise BadRowError(where, "'chosen' is text, and there is no 'prompt' before it", "missing field")
        if not chosen.strip():
            raise Dropped("empty answer")
        return Text(prompt, chosen)
    after = _answer(row, "chosen", where)
    if not after:
        raise Dropped("empty answer")
    tools = read_tools(row, where)
    if after[0].get("role") != "assistant":
        return chat(after, where, first=_first_of_its_own(row, after, where), tools=tools)
    if row.get("conversations") is not None:
        before = with_system(row, conversation(row, "conversations", where), where)
    elif isinstance(prompt, list | tuple):
        before = with_system(row, messages_of(row, "prompt", where), where)
    else:
        asked = question(row, where) if prompt is None else [{"role": "user", "content": prompt}]
        before = with_system(row, asked, where)
    return chat([*before, *after], where, first=len(before), tools=tools)


def question(row: Row, where: str) -> list[Message]:
    """The messages of an instruction row before its answer."""
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in history):
        raise BadRowError(where, "'history' is a list of pairs (question, answer)", "wrong type")
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    parts = [text_field(row, key, where, optional=True) for key in ("instruction", "input")]
    messages.append({"role": "user", "content": "\n\n".join(part for part in parts if part.strip())})
    return with_system(row, messages, where)


def _has_chat(row: Row) -> bool:
    return any(row.get(key) is not None for key in ("conversations", "instruction"))


def _answer(row: Row, key: str, where: str) -> list[Message]:
    """A text, a message or a list of messages as a list."""
    value = row.get(key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if value.strip() else []
    return messages_of({key: [value]} if isinstance(value, dict) else row, key, where)


def _first_of_its_own(row: Row, chosen: list[Message], where: str) -> int:
    """Where a whole conversation leaves the rejected one."""
    prompt = row.get("prompt")
    asked = prompt is None or any(turn.get("content") == prompt for turn in chosen)
    if not asked or row.get("conversations") is not None:
        message = "'chosen' starts with a message that is no answer; then it must be the whole conversation"
        raise BadRowError(where, message, "wrong value")
    rejected = _answer(row, "rejected", where)
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    return min(common, len(chosen) - 1)
