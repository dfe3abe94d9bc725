"""Row formats: one function per format turns a row into a chat, a text or token ids. New formats go into `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowmem.data.content import (
    IGNORE,
    Chat,
    Content,
    Dropped,
    Float32,
    Int32,
    Message,
    Text,
    Tokens,
    has,
    text_field,
)
from lowmem.data.messages import chat, read_tools
from lowmem.data.preference import question, read_chosen
from lowmem.data.read import BadRowError, Row
from lowmem.data.sharegpt import messages_of, read_conversations, with_system

__all__ = ["FORMATS", "IGNORE", "Chat", "Content", "Dropped", "Float32", "Int32", "Message", "Text", "Tokens", "read"]


def read_messages(row: Row, where: str) -> Chat:
    """`messages`: a list of role and content (or from and value, read as ShareGPT's); maybe `tools`."""
    messages = with_system(row, messages_of(row, "messages", where), where)
    return chat(messages, where, tools=read_tools(row, where))


def read_instruction(row: Row, where: str) -> Chat:
    """`instruction`, `input`, `output`; maybe `system` and `history` (pairs of question and answer)."""
    messages = question(row, where)
    messages.append({"role": "assistant", "content": text_field(row, "output", where)})
    if not messages[-1]["content"].strip():
        raise Dropped("empty answer")
    return chat(messages, where, plain=True)


def read_prompt_completion(row: Row, where: str) -> Chat | Text:
    """`prompt` and `completion`: two strings, joined as they are, or two lists of messages."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list | tuple):
        before = with_system(row, messages_of(row, "prompt", where), where)
        if isinstance(completion, list | tuple):
            after = messages_of(row, "completion", where)
        else:
            after = [{"role": "assistant", "content": text_field(row, "completion", where)}]
        return chat([*before, *after], where, first=len(before), tools=read_tools(row, where))
    text = Text(text_field(row, "prompt", where, optional=True), text_field(row, "completion", where))
    if not text.answer.strip():
        raise Dropped("empty answer")
    return text


def read_text(row: Row, where: str) -> Text:
    """`text`: one document."""
    text = text_field(row, "text", where)
    if not text.strip():
        raise Dropped("empty text")
    return Text(None, text)


def read_tokens(row: Row, where: str) -> Tokens:
    """`input_ids`, maybe `labels` (-100: no loss; missing: every token), `loss_weights` and `attention_mask`."""
    ids = _ints(row, "input_ids", where, lowest=0)
    if not len(ids):
        raise Dropped("empty row")
    labels = ids if row.get("labels") is None else _ints(row, "labels", where, lowest=IGNORE)
    if ((labels < 0) & (labels != IGNORE)).any():
        raise BadRowError(where, f"'labels' holds token ids and {IGNORE}", "wrong value")
    weights = None
    if row.get("loss_weights") is not None:
        try:
            with np.errstate(over="ignore"):
                weights = np.asarray(row["loss_weights"], dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise BadRowError(where, "'loss_weights' is a list of numbers", "wrong type") from None
        if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
            raise BadRowError(where, "'loss_weights' are finite numbers of 0 or more", "wrong value")
    for name, other in (("labels", labels), ("loss_weights", weights)):
        if other is not None and len(other) != len(ids):
            message = f"'{name}' has {len(other)} entries, 'input_ids' {len(ids)}"
            raise BadRowError(where, message, "lengths differ")
    return _without_padding(row, where, Tokens(ids, labels, weights))


def _without_padding(row: Row, where: str, tokens: Tokens) -> Tokens:
    """The row without what its `attention_mask` (or None) calls padding, before the tokens or after them."""
    if row.get("attention_mask") is None:
        return tokens
    mask = np.asarray(row["attention_mask"])
    if mask.ndim != 1 or mask.dtype.kind not in "iubf":
        raise BadRowError(where, "'attention_mask' is a list of 0 and 1", "wrong type")
    if len(mask) != len(tokens.input_ids):
        message = f"'attention_mask' has {len(mask)} entries, 'input_ids' {len(tokens.input_ids)}"
        raise BadRowError(where, message, "lengths differ")
    real = mask.nonzero()[0]
    if not len(real):
        raise Dropped("empty row")
    kept = slice(real[0], real[-1] + 1)
    if not mask[kept].all():
        raise BadRowError(where, "'attention_mask' hides tokens between others; it may hide padding", "wrong value")
    weights = None if tokens.loss_weights is None else tokens.loss_weights[kept]
    return Tokens(tokens.input_ids[kept], tokens.labels[kept], weights)


@dataclass(frozen=True)
class Format:
    """One row format.

    Attributes:
        keys: fields by which `auto` knows it.
        read: turns a row into its content.
        on_request: what `auto` says instead of reading such a row; empty: it reads it.
    """

    keys: tuple[str, ...]
    read: Callable[[Row, str], Content]
    on_request: str = ""


# in the order in which `auto` tries them
FORMATS: dict[str, Format] = {
    "tokens": Format(("input_ids",), read_tokens),
    "preference_chosen": Format(
        ("chosen", "rejected"),
        read_chosen,
        "a preference row; format: preference_chosen learns the chosen answers only",
    ),
    "messages": Format(("messages",), read_messages),
    "sharegpt": Format(("conversations",), read_conversations),
    "prompt_completion": Format(("prompt", "completion"), read_prompt_completion),
    "instruction": Format(("instruction", "output"), read_instruction),
    "text": Format(("text",), read_text),
}


def format_of(row: Row, where: str, wanted: str = "auto") -> str:
    """The name of a row's format.

    Raises:
        BadRowError: no format has these keys, the wanted one needs others, or the format has to be asked for.
    """
    if wanted != "auto":
        missing = [key for key in FORMATS[wanted].keys if key not in row]
        if missing:
            raise BadRowError(where, f"format '{wanted}' needs the field '{missing[0]}'; {has(row)}", "missing field")
        return wanted
    # a data set with one schema for mixed rows has every column everywhere, with nulls
    for present in (lambda key: row.get(key) is not None, lambda key: key in row):
        for name, kind in FORMATS.items():
            if all(map(present, kind.keys)):
                if kind.on_request:
                    raise BadRowError(where, kind.on_request, "preference row")
                return name
    expected = "; ".join(f"{name} ({', '.join(kind.keys)})" for name, kind in FORMATS.items())
    raise BadRowError(where, f"no known format; {has(row)}; formats: {expected}", "unknown format")


def read(row: Row, where: str, wanted: str = "auto") -> tuple[str, Content]:
    """The name of a row's format, and its content.

    Raises:
        BadRowError: something in the row is wrong.
        Dropped: the row is fine and teaches nothing.
    """
    name = format_of(row, where, wanted)
    return name, FORMATS[name].read(row, where)


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
