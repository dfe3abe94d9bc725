"""Prompts with reference answers, for counting exact matches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowmem.config import DataConfig
from lowmem.data.read import BadRowError, read_rows
from lowmem.data.rows import Chat, Dropped, Message, Text, read
from lowmem.errors import UserError


def prompts_and_answers(
    source: Any, data: DataConfig | None = None, left_out: Callable[[str], None] | None = None
) -> list[tuple[list[Message] | str, str]]:
    """Split every row into what is asked and what should be answered.

    Args:
        source: whatever `read_rows` takes; rows of messages, instruction or prompt/completion.
        data: format and on_bad_row; its paths are not looked at.
        left_out: called with the reason of every row that `on_bad_row: skip` leaves out.

    Returns:
        (prompt, answer) for each row: messages for the chat template (or for `render.plain_prompt`), or a plain string.
        The last message of a chat is its answer.

    Raises:
        UserError: a row that cannot be read (unless `on_bad_row` is `skip`), or no row with prompt and answer.
    """
    data = data or DataConfig()
    skip = data.on_bad_row == "skip"

    def bad(error: BadRowError) -> None:
        if not skip:
            raise error
        if left_out:
            left_out(error.reason)

    pairs: list[tuple[list[Message] | str, str]] = []
    for row, where in read_rows(source, bad):
        try:
            pairs.append(_split(row, where, data.format))
        except BadRowError as error:
            bad(error)
    if not pairs:
        raise UserError("exact_match: no row with a prompt and an answer")
    return pairs


def _split(row: Any, where: str, wanted: str) -> tuple[list[Message] | str, str]:
    try:
        name, content = read(row, where, wanted)
    except Dropped as dropped:
        raise BadRowError(where, f"no reference answer ({dropped})", str(dropped)) from None
    if isinstance(content, Text) and content.prompt is not None:
        return content.prompt, content.answer
    if not isinstance(content, Chat):
        raise BadRowError(where, f"a row of format '{name}' has no prompt and answer", "no prompt")
    if content.tools or any("tool_calls" in message or "reasoning_content" in message for message in content.messages):
        raise BadRowError(where, "the row has tools or a reasoning; exact match compares plain answers", "not plain")
    last = len(content.messages) - 1
    if last not in content.turns or not content.messages[last]["content"].strip() or not last:
        raise BadRowError(where, "the last message must be an assistant's answer to something", "no answer")
    return content.messages[:last], content.messages[last]["content"]
