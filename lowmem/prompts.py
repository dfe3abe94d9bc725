"""Prompts from files: rows of any known format, with or without answers, or one prompt a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowmem.answers import Prompt
from lowmem.config import DataConfig
from lowmem.data.files import kind_of
from lowmem.data.read import BadRowError, Row, read_rows
from lowmem.data.rows import Chat, Dropped, Text, read
from lowmem.errors import UserError

# what a row without an answer lacks to be read like any other
_ANSWERS = {"prompt": "completion", "instruction": "output"}


def read_prompts(source: str | Path, data: DataConfig, chat: bool) -> list[Prompt]:
    """What is asked in every row; an answer at the end of a row is left out.

    Args:
        source: a data file; of a `.txt` file every line is a prompt.
        data: `format` and `on_bad_row`.
        chat: a line of text is a user's message (else the beginning of a text).

    Raises:
        UserError: the file cannot be read, a row is no prompt (unless `on_bad_row` is `skip`), or there is none.
    """

    def bad(error: BadRowError) -> None:
        if data.on_bad_row != "skip":
            raise error

    lines = kind_of(Path(source)) == ".txt"
    prompts: list[Prompt] = []
    for row, where in read_rows(str(source), bad):
        try:
            prompts.append(typed(row["text"], chat) if lines else _prompt(row, where, data.format))
        except BadRowError as error:
            bad(error)
    if not prompts:
        raise UserError(f"{source}: there is no prompt in it")
    return prompts


def typed(text: str, chat: bool) -> Prompt:
    """A prompt as a person types it."""
    return [{"role": "user", "content": text}] if chat else text


def with_system(prompt: Prompt, system: str) -> Prompt:
    """The prompt with a system message before it.

    Raises:
        UserError: it is a plain text, or has one already.
    """
    if isinstance(prompt, str):
        raise UserError("system: has no effect on a plain text (no chat template, or a row of text)")
    messages = prompt.messages if isinstance(prompt, Chat) else prompt
    if messages[0]["role"] == "system":
        raise UserError(f"system: a prompt has a system message of its own ({messages[0]['content'][:40]!r})")
    new = [{"role": "system", "content": system}, *messages]
    return replace(prompt, messages=new) if isinstance(prompt, Chat) else new


def _prompt(row: Row, where: str, wanted: str) -> Prompt:
    try:
        name, content = read(_answered(row), where, wanted)
    except Dropped as dropped:
        raise BadRowError(where, f"the row is no prompt ({dropped})", "no prompt") from None
    if isinstance(content, Text):
        prompt = content.answer if content.prompt is None else content.prompt
        if not prompt.strip():
            raise BadRowError(where, "the prompt is empty", "empty prompt")
        return prompt
    if not isinstance(content, Chat):
        raise BadRowError(where, f"a row of format '{name}' is no prompt", "no prompt")
    messages = content.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRowError(where, "nothing is asked in the row", "no prompt")
    return replace(content, messages=messages)


def _answered(row: Row) -> dict[str, Any]:
    """The row with an answer, where it has none: rows are read by their answers."""
    full = dict(row)
    for prompt, answer in _ANSWERS.items():
        if full.get(prompt) is not None and not full.get(answer):
            full[answer] = "-"
    for key in ("messages", "conversations"):
        turns = full.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[-1], Mapping):
            answer_turn = (
                {"from": "gpt", "value": "-"} if "from" in turns[-1] else {"role": "assistant", "content": "-"}
            )
            full[key] = [*turns, answer_turn]
    return full
