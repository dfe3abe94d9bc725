"""A conversation with a model: its history, answers shown as they come, a terminal or a pipe to talk through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TextIO

from transformers.generation.streamers import BaseStreamer

from lowmem.answers import Sampling, continued, prompt_ids
from lowmem.errors import UserError
from lowmem.loaded import LoadedRun
from lowmem.model import context_length

Say = Callable[[str], None]
COMMANDS = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer, Ctrl-D leaves"
_BROKEN = "\ufffd"  # what bytes decode to that are no whole character


class Conversation:
    """Keeps what was said, and lets the model answer.

    Args:
        loaded: the model.
        system: a system message before everything else.
        max_new_tokens: tokens after which an answer is cut; null: 512, and half of a small context at most.
        sampling: how tokens are drawn; null for greedy answers.
        notice: is told when the beginning had to be forgotten.

    Attributes:
        messages: the history, with the system message.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        system: str | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        notice: Say = print,
    ) -> None:
        loaded.require_tokenizer()
        self.loaded, self.sampling, self.notice = loaded, sampling, notice
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self.start)
        self.context = context_length(loaded.model)
        self.max_new_tokens = max_new_tokens or min(512, (self.context or 1024) // 2)
        if self.context is not None and self.max_new_tokens >= self.context:
            raise UserError(f"max_new_tokens: {max_new_tokens:,} do not fit into a context of {self.context:,} tokens")

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self.start)

    def ask(self, text: str, say: Say) -> str:
        """Answer; pieces of the answer go to `say` as they come.

        Ctrl-C ends the answer, and what was said so far counts. Without an answer the question is forgotten, too.

        Raises:
            UserError: the question alone is longer than the context, or the chat template refuses the messages.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        streamer = Streamer(self.loaded.tokenizer, say)
        try:
            row = self._fit()
            with self.loaded.inference() as model:
                continued(model, self.loaded.tokenizer, [row], self.max_new_tokens, self.sampling, streamer)
        except UserError:
            self.messages = before
            raise
        except KeyboardInterrupt:
            streamer.end()
        answer = streamer.text.strip()
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages = before
        return answer

    def _fit(self) -> list[int]:
        """Token ids of the history, without its oldest turns where it is too long."""
        forgotten, first = 0, len(self.start)
        while True:
            row = prompt_ids(self.loaded.tokenizer, self.messages)
            if self.context is None or len(row) + self.max_new_tokens <= self.context:
                break
            turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if len(turns) < 2:
                raise UserError(
                    f"the question has {len(row):,} tokens; with {self.max_new_tokens:,} for the answer that is more "
                    f"than the model's context of {self.context:,}"
                )
            del self.messages[first : turns[1]]
            forgotten += 1
        if forgotten:
            self.notice(
                f"the conversation is longer than the model's context: the first {forgotten} turns are forgotten"
            )
        return row


class Streamer(BaseStreamer):  # type: ignore[misc]
    """Gives text on as tokens come; a character whose bytes are not all there yet waits for the rest."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.ids: list[int] = []
        self.text = ""
        self.in_prompt = True

    def put(self, value: Any) -> None:
        """Called by transformers: first with the prompt, then with every new token."""
        if self.in_prompt:
            self.in_prompt = False
            return
        self.ids.extend(value.flatten().tolist())
        self._show(self._decoded().rstrip(_BROKEN))

    def end(self) -> None:
        """Show what was still waiting."""
        self._show(self._decoded())

    def _decoded(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _show(self, text: str) -> None:
        new = text[len(self.text) :]
        if new:
            self.text = text
            self.say(new)


def talk(conversation: Conversation, lines: Iterator[str | None], out: TextIO, notice: Say) -> None:
    """Answer line by line until the lines end or one says `/quit`.

    Args:
        conversation: to go on with.
        lines: what the user types; null stands for an interrupted line.
        out: where answers go.
        notice: where remarks go.
    """

    def say(piece: str) -> None:
        out.write(piece)
        out.flush()

    for line in lines:
        text = (line or "").strip()
        if line is None:
            notice(COMMANDS)
        elif text == "/quit":
            return
        elif text == "/reset":
            conversation.reset()
            notice("the conversation is forgotten")
        elif text.startswith("/"):
            notice(f"unknown command {text.split()[0]}: {COMMANDS}")
        elif text:
            try:
                conversation.ask(text, say)
            except UserError as error:
                notice(str(error))
            say("\n")


def typed_lines(source: TextIO) -> Iterator[str | None]:
    """Lines from a terminal, with a prompt and line editing, or from a pipe; null where Ctrl-C ended a line."""
    if not source.isatty():
        yield from (line.rstrip("\n") for line in source)
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
            yield None
        except EOFError:
            print()
            return
