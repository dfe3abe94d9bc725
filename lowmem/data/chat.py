"""Chat templates: the text of a conversation, and where in it the assistant speaks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

from lowmem.data.as_text import Abilities, written_out
from lowmem.data.content import Chat, Message, short
from lowmem.data.messages import REASONING
from lowmem.data.read import BadRowError
from lowmem.errors import UserError

Span: TypeAlias = tuple[int, int]
# private-use characters: no template trims, escapes or writes them
MARK = "\ue000\ue001\ue000"


class ChatTemplate:
    """The chat template of a tokenizer.

    Supervised is what the model itself has to write, found in the rendered text and never in token ids:

    1. A template with generation marks: what stands inside the marks.
    2. Otherwise a turn starts where the generation prompt of the messages before it ends, and ends where the rendering
       of the messages up to it ends, both checked to be prefixes of the whole text.
    3. Where such a prefix does not match (a template without generation prompt, or one that writes earlier turns in
       another way), the turn starts or ends with its content, found by rendering once more with a mark beside it; the
       end-of-turn token follows where the turn has it inside the conversation as it has at its end.
    4. A turn found by none of these is an error.

    White space after an end-of-turn token does not belong to the turn.

    What the template would leave out is an error, or, for tools and reasonings, written as text (see `as_text`).
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        specials = [*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())]
        self.specials = tuple({token for token in specials if token.strip()})
        pattern = "|".join(re.escape(token) for token in sorted(self.specials, key=len, reverse=True))
        self.special = re.compile(pattern or r"(?!)")

    def render(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """The text of messages; `prompt`: up to where the assistant would begin to write."""
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        if not isinstance(text, str):
            raise UserError(f"the chat template gave {type(text).__name__}, not text")
        return text

    def fit(self, chat: Chat) -> tuple[Chat, list[str]]:
        """The chat in the words that this template reads, and what of it had to be written as text.

        Raises:
            UserError: the tokenizer has several templates, and none for such a row.
        """
        try:
            source = self.tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:  # several templates, none of them the default
            raise UserError(f"chat template: {error}") from None
        fitting, notes = written_out(chat, self.abilities.setdefault(source, Abilities.of(source)))
        if self.arguments_are_text and any("tool_calls" in message for message in fitting.messages):
            fitting = replace(fitting, messages=[_with_text_arguments(message) for message in fitting.messages])
        return fitting, notes

    @cached_property
    def abilities(self) -> dict[str, Abilities]:
        """What each template of the tokenizer reads, by its source."""
        return {}

    @cached_property
    def arguments_are_text(self) -> bool:
        """The template joins the arguments of a tool call to other text, and refuses them as an object."""
        call = {"type": "function", "function": {"name": "name", "arguments": {}}, "id": "123456789"}
        chat: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
        chat[1]["tool_calls"] = [call]
        as_text = [_with_text_arguments(message) for message in chat]
        return self._try(chat, None) is None and self._try(as_text, None) is not None

    def text(self, chat: Chat, where: str) -> str:
        """The text of a chat.

        Raises:
            BadRowError: the template refuses the messages.
        """
        return self._rendered(chat, where)[0]

    def spans(self, chat: Chat, where: str) -> tuple[str, list[Span], list[float]]:
        """The text of a chat, the character spans of its supervised turns in order, and their loss weights.

        Raises:
            BadRowError: the template refuses the messages, or a turn cannot be found in its text.
        """
        text, marked = self._rendered(chat, where)
        if marked is not None:
            learnt = self._learnt(chat, text, marked, where)
        else:
            learnt = [(self._turn(chat, index, text, where), weight) for index, weight in chat.turns.items()]
        return text, [span for span, _ in learnt], [weight for _, weight in learnt]

    def _rendered(self, chat: Chat, where: str) -> tuple[str, list[Span] | None]:
        """Text and generation spans (None: the template has no marks)."""
        try:
            text, marked = self._marked(chat) or (self.render(chat.messages, chat.tools), None)
        except Exception as error:  # templates raise what they like: TemplateError, TypeError, KeyError, ...
            message = f"the chat template refuses the row: {type(error).__name__}: {error}"
            raise BadRowError(where, message, "refused by the chat template") from None
        self._check_nothing_is_left_out(chat, text, where)
        return text, marked

    def _check_nothing_is_left_out(self, chat: Chat, text: str, where: str) -> None:
        """Render once more with a mark in place of what cannot be seen in the text, or could stand there anyway."""
        for index, message in enumerate(chat.messages):
            calls = message.get("tool_calls", [])
            said = message["content"].strip()
            hidden = bool(said) and said not in text
            if not hidden and not calls:
                continue
            marked = {**message, "content": MARK} if hidden else dict(message)
            if calls:
                marked["tool_calls"] = [{**call, "function": {**call["function"], "name": MARK}} for call in calls]
            seen = self._try([*chat.messages[:index], marked, *chat.messages[index + 1 :]], chat.tools)
            if seen is not None and seen.count(MARK) < hidden + len(calls):
                what = "a tool call" if calls else f"'{short(said)}'"
                reason = (
                    f"message {index} ({marked['role']}): the chat template leaves out {what}; use another template"
                )
                raise BadRowError(where, reason, "left out by the chat template")

    def _marked(self, chat: Chat) -> tuple[str, list[Span]] | None:
        template = self.tokenizer.get_chat_template(tools=chat.tools)
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            return None
        # character spans from the renderer itself: masks over tokens have been wrong for multi-byte characters
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[chat.messages],
            tools=chat.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0]]

    def _learnt(self, chat: Chat, text: str, spans: list[Span], where: str) -> list[tuple[Span, float]]:
        """The marked spans that belong to the turns to learn, with their weights."""
        speakers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) == len(speakers):
            pairs = zip(spans, speakers, strict=True)
            return [(span, chat.turns[index]) for span, index in pairs if index in chat.turns]
        # a template may mark parts of a turn, or skip one: what is blank but for special tokens teaches nothing
        spans = [(start, end) for start, end in spans if self.special.sub("", text[start:end]).strip()]
        weights = set(chat.turns.values())
        if len(chat.turns) == len(speakers) and len(weights) == 1:
            return [(span, min(weights)) for span in spans]
        parts = [(self._turn(chat, index, text, where), weight) for index, weight in chat.turns.items()]
        found = []
        for start, end in spans:
            inside = [weight for (a, b), weight in parts if a < end and start < b]
            found += [((start, end), weight) for weight in inside[:1]]
        return found

    def _turn(self, chat: Chat, index: int, text: str, where: str) -> Span:
        """Where one turn stands in a text rendered without marks."""
        before = chat.messages[:index]
        prompt = self._prefix(chat, before, text, prompt=True)
        if prompt is not None and prompt == self._prefix(chat, before, text):
            prompt = None  # the template has no generation prompt: the turn would begin with its role mark
        upto = text if index + 1 == len(chat.messages) else self._prefix(chat, chat.messages[: index + 1], text)
        start = None if prompt is None else len(prompt)
        end = None if upto is None else len(upto)
        if start is None:
            start = self._start_by_content(chat, index, text)
        if end is None:
            end = self._end_by_content(chat, index, text)
        if start is None or end is None or start >= end:
            raise BadRowError(
                where,
                f"message {index}: the answer cannot be found in the text of the chat template; use a template with "
                "generation marks, or train_on: everything",
                "answer not found in the chat template's text",
            )
        written = text[start:end].rstrip()
        return start, start + len(written) if written.endswith(self.specials) else end

    def _prefix(self, chat: Chat, messages: list[Message], text: str, prompt: bool = False) -> str | None:
        """The rendering of the first messages, if the whole text starts with it."""
        part = self._try(messages, chat.tools, prompt)
        return part if part is not None and text.startswith(part) else None

    def _try(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str | None:
        try:
            return self.render(messages, tools, prompt) if messages else None
        except Exception:  # a part of a conversation may be refused although the whole is not
            return None

    def _start_by_content(self, chat: Chat, index: int, text: str) -> int | None:
        """A reasoning comes before the content, where the template writes it."""
        reasoning = [field for field in REASONING if field in chat.messages[index]]
        found = [self._edge(chat, index, text, at_end=False, field=field) for field in (*reasoning, "content")]
        return next((edge for edge in found if edge is not None), None)

    def _edge(self, chat: Chat, index: int, text: str, at_end: bool, field: str = "content") -> int | None:
        """Where the content (or another field) of a message starts or ends; None if the template rewrites it."""
        content = chat.messages[index][field]
        # a template that trims is seen through by trimming first
        for trimmed in (content, content.rstrip() if at_end else content.lstrip()):
            messages = list(chat.messages)
            messages[index] = {**messages[index], field: trimmed + MARK if at_end else MARK + trimmed}
            seen = self._try(messages, chat.tools)
            if seen is not None and seen.count(MARK) == 1 and seen.replace(MARK, "") == text:
                return seen.index(MARK)
        return None

    def _end_by_content(self, chat: Chat, index: int, text: str) -> int | None:
        end = self._edge(chat, index, text, at_end=True)
        if end is None:
            return None
        last = replace(chat, messages=chat.messages[: index + 1])
        alone = self._try(last.messages, last.tools)
        close = None if alone is None else self._edge(last, index, alone, at_end=True)
        if alone is None or close is None:
            return end
        tail = _common_start(alone[close:], text[end:])
        if tail and tail == alone[close:].rstrip():
            return end + len(tail)
        # what both have in common may reach into the next turn: up to the last whole special token it is this one's
        closings = [found.end() for found in self.special.finditer(text, end, end + len(tail))]
        return closings[-1] if closings else end


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False, default=str)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _common_start(one: str, other: str) -> str:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]
