"""Chat templates: the text of a conversation, and where in it the assistant speaks."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from lowmem.data.read import BadRowError
from lowmem.data.rows import Chat, Message
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

    def text(self, chat: Chat, where: str) -> str:
        """The text of a chat.

        Raises:
            BadRowError: the template refuses the messages.
        """
        return self._rendered(chat, where)[0]

    def spans(self, chat: Chat, where: str) -> tuple[str, list[Span]]:
        """The text of a chat and the character spans of its supervised turns, in order.

        Raises:
            BadRowError: the template refuses the messages, or a turn cannot be found in its text.
        """
        text, marked = self._rendered(chat, where)
        if marked is not None:
            return text, self._learnt(chat, text, marked, where)
        return text, [self._turn(chat, index, text, where) for index in chat.turns]

    def _rendered(self, chat: Chat, where: str) -> tuple[str, list[Span] | None]:
        """Text and generation spans (None: the template has no marks)."""
        try:
            return self._marked(chat) or (self.render(chat.messages, chat.tools), None)
        except Exception as error:  # templates raise what they like: TemplateError, TypeError, KeyError, ...
            message = f"the chat template refuses the row: {type(error).__name__}: {error}"
            raise BadRowError(where, message, "refused by the chat template") from None

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

    def _learnt(self, chat: Chat, text: str, spans: list[Span], where: str) -> list[Span]:
        """The marked spans that belong to the turns to learn."""
        speakers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(spans) == len(speakers):
            return [span for span, index in zip(spans, speakers, strict=True) if index in chat.turns]
        # a template may mark parts of a turn, or skip one: what is blank but for special tokens teaches nothing
        spans = [(start, end) for start, end in spans if self.special.sub("", text[start:end]).strip()]
        if len(chat.turns) == len(speakers):
            return spans
        parts = [self._turn(chat, index, text, where) for index in chat.turns]
        return [(start, end) for start, end in spans if any(a < end and start < b for a, b in parts)]

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
            start = self._edge(chat, index, text, at_end=False)
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

    def _edge(self, chat: Chat, index: int, text: str, at_end: bool) -> int | None:
        """Where the content of a message starts or ends in the text; None if the template rewrites it."""
        content = chat.messages[index]["content"]
        # a template that trims is seen through by trimming first
        for trimmed in (content, content.rstrip() if at_end else content.lstrip()):
            messages = list(chat.messages)
            messages[index] = {**messages[index], "content": trimmed + MARK if at_end else MARK + trimmed}
            seen = self._try(messages, chat.tools)
            if seen is not None and seen.count(MARK) == 1 and seen.replace(MARK, "") == text:
                return seen.index(MARK)
        return None

    def _end_by_content(self, chat: Chat, index: int, text: str) -> int | None:
        end = self._edge(chat, index, text, at_end=True)
        if end is None:
            return None
        last = Chat(chat.messages[: index + 1], chat.turns, chat.tools)
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


def _common_start(one: str, other: str) -> str:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]
