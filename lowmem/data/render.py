"""A row -> its text with supervised spans, or its token ids."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Literal

from lowmem.data.chat import ChatTemplate, Span
from lowmem.data.encode import Rendered
from lowmem.data.read import BadRowError, Row
from lowmem.data.rows import Chat, Message, Text, Tokens, read
from lowmem.errors import UserError

# what a template engine would have filled in; data sets have been published with it left open
PLACEHOLDER = re.compile(r"(?<!\$)\{\{ *[A-Za-z_]\w* *\}\}")


class Renderer:
    """Reads rows of any format the same way throughout a data set.

    Args:
        tokenizer: a transformers tokenizer; None is enough for rows of token ids.
        format: a row format, or `auto`.
        train_on: `completions`, `everything`, or None (completions where a row has a prompt).
    """

    def __init__(
        self, tokenizer: Any, format: str = "auto", train_on: Literal["completions", "everything"] | None = None
    ):
        self.tokenizer, self.format, self.train_on = tokenizer, format, train_on

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The tokenizer's chat template, if it has one."""
        return ChatTemplate(self.tokenizer) if getattr(self.tokenizer, "chat_template", None) else None

    def render(self, row: Row, where: str) -> tuple[str, Rendered | Tokens]:
        """What a row is, and its text (or token ids).

        The first is the name of its format, followed by whatever is worth a count in the report: tools or a reasoning
        that the chat template has no place for and that were written as text, and placeholders left open (`{{name}}`).

        Raises:
            BadRowError: something in the row is wrong; the message starts with `where`.
            Dropped: the row is fine and teaches nothing.
            UserError: the rows need a tokenizer, a chat template, or another `train_on`.
        """
        name, content = read(row, where, self.format)
        if isinstance(content, Tokens):
            return name, content
        if self.tokenizer is None:
            raise UserError(f"{where}: a row of format '{name}' needs a tokenizer")
        notes: list[str] = []
        if isinstance(content, Chat):
            rendered, notes = self._chat(content, where)
        else:
            rendered = self._text(content, where)
        try:
            rendered.text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRowError(where, "half a character (a lone surrogate) in the text", "not Unicode") from None
        written = f" with {' and '.join(notes)} as text" if notes else ""
        open_ends = " with {{placeholders}}" if PLACEHOLDER.search(rendered.text) else ""
        return f"{name}{written}{open_ends}", rendered

    def _chat(self, chat: Chat, where: str) -> tuple[Rendered, list[str]]:
        """A chat as text, and what of it the template has no place for."""
        everything = self.train_on == "everything"
        if everything and (chat.silenced or any(weight != 1 for weight in chat.turns.values())):
            message = "its loss weights would have no effect with train_on: everything; drop one of the two"
            raise BadRowError(where, message, "loss weights without effect")
        if self.template is None:
            if not chat.plain:
                raise UserError(f"{where}: the tokenizer has no chat template, and a row of messages needs one")
            text, spans = plain_form(chat)
            return Rendered(text, [(0, len(text))] if everything else spans, plain=True), []
        chat, notes = self.template.fit(chat)
        if everything:
            text = self.template.text(chat, where)
            return Rendered(text, [(0, len(text))], plain=False), notes
        text, spans, weights = self.template.spans(chat, where)
        return Rendered(text, spans, plain=False, weights=weights), notes

    def _text(self, content: Text, where: str) -> Rendered:
        if content.prompt is None and self.train_on == "completions":
            raise UserError(f"{where}: plain text has no prompt; with train_on: completions nothing would be learnt")
        prompt = content.prompt or ""
        text = prompt + content.answer
        start = 0 if self.train_on == "everything" else len(prompt)
        return Rendered(text, [(start, len(text))], plain=True)


def plain_form(chat: Chat) -> tuple[str, list[Span]]:
    """Text and supervised spans of instruction rows for a tokenizer without chat template.

    A system text stands first, followed by an empty line. Then come, for every question, `### Instruction:` and the
    question, an empty line, `### Response:` and the answer.
    """
    text, spans = "", []
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            start = len(text)
            text += message["content"]
            if index in chat.turns:
                spans.append((start, len(text)))
            if index + 1 < len(chat.messages):
                text += "\n\n"
        else:
            text += plain_prompt([message])
    return text, spans


def plain_prompt(messages: list[Message]) -> str:
    """The plain form of the messages before an answer, up to where it begins."""
    text = ""
    for message in messages:
        if message["role"] == "user":
            text += f"### Instruction:\n{message['content']}\n\n### Response:\n"
        else:
            text += f"{message['content']}\n\n"
    return text
