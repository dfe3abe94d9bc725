"""What a chat template has no place for, written into the messages as text.

A template that never reads `tools`, `tool_calls` or a reasoning leaves them out without a word, and the model would
learn a conversation with holes. They are written the way Qwen2.5 and Qwen3 write them, which many models know.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from lowmem.data.content import Chat, Message
from lowmem.data.messages import REASONING

TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


@dataclass(frozen=True)
class Abilities:
    """What the source of a chat template reads.

    Attributes:
        tools: the tool schemas.
        tool_calls: the calls in an assistant's message.
        reasoning: the field of a message in which it looks for a reasoning; None: in none.
    """

    tools: bool
    tool_calls: bool
    reasoning: str | None

    @classmethod
    def of(cls, template: str) -> Abilities:
        """Those of a Jinja template."""
        code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
        # `message.thinking` or `message['thinking']`, and not a switch such as `enable_thinking`
        reads = [name for name in REASONING if re.search(rf"\.{name}\b|(['\"]){name}\1", code)]
        return cls(bool(re.search(r"\btools\b", code)), "tool_calls" in code, reads[0] if reads else None)


def written_out(chat: Chat, can: Abilities) -> tuple[Chat, list[str]]:
    """The chat as the template needs it, and what was written as text (`tools`, `reasoning`), for the report."""
    notes: list[str] = []
    messages = list(chat.messages)
    if any("reasoning_content" in message for message in messages):
        if can.reasoning is None:
            notes.append("reasoning")
        messages = [_with_reasoning(message, can.reasoning) for message in messages]
    calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if (chat.tools and not can.tools) or (calls and not can.tool_calls):
        notes.append("tools")
    kept = list(range(len(messages)))  # old index of every message; -1: none
    if calls and not can.tool_calls:
        messages, kept = _with_calls(messages)
    tools = chat.tools
    if tools and not can.tools:
        system = bool(messages) and messages[0]["role"] == "system"
        said = [messages[0]["content"]] if system and messages[0]["content"].strip() else []
        head = {"role": "system", "content": "\n\n".join([*said, _schemas(tools)])}
        messages, kept = [head, *messages[system:]], [-1, *kept[system:]]
        tools = None
    place = {old: new for new, old in enumerate(kept)}
    turns = {place[index]: weight for index, weight in chat.turns.items()}
    return replace(chat, messages=messages, turns=turns, tools=tools), notes


def _schemas(tools: list[Any]) -> str:
    return TOOLS.format(schemas="\n".join(map(_json, tools)))


def _with_reasoning(message: Message, field: str | None) -> Message:
    """The reasoning under the name that the template reads, or in the text."""
    if "reasoning_content" not in message or field == "reasoning_content":
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if field is not None:
        return {**rest, field: message["reasoning_content"]}
    return {**rest, "content": f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n{message['content']}"}


def _with_calls(messages: list[Message]) -> tuple[list[Message], list[int]]:
    """Calls in the text of their message, and results, neighbouring ones together, as a user's message."""
    made: list[Message] = []
    kept: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if index and messages[index - 1]["role"] == "tool":
                made[-1]["content"] += f"\n{result}"
                continue
            message = {"role": "user", "content": result}
        elif "tool_calls" in message:
            parts = [message["content"]] if message["content"].strip() else []
            parts += [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**rest, "content": "\n".join(parts)}
        made.append(message)
        kept.append(index)
    return made, kept


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
