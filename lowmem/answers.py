"""Answers to prompts: greedy or sampled, in batches; and how many held-out ones are right before and after training."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from lowmem.data import prompts_and_answers
from lowmem.data.render import plain_prompt
from lowmem.data.rows import Chat
from lowmem.durable import write_text
from lowmem.errors import UserError
from lowmem.model import context_length, learned_positions, unwrapped
from lowmem.observers import Event

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

# a text as it is; messages; messages with tools
Prompt: TypeAlias = str | list[dict[str, Any]] | Chat
_NEW_TOKENS = 256


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_p: only the likeliest tokens that together have this probability are drawn from.
        seed: makes the draw repeatable (for the same prompts and batch size).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"temperature: above 0, or 0 for greedy answers; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: above 0, up to 1; got {self.top_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise UserError(f"seed: a number of 64 bits; got {self.seed}")

    @classmethod
    def of(cls, temperature: float | None, top_p: float | None, seed: int | None) -> Sampling | None:
        """What was asked for; null for greedy answers (no temperature, or 0).

        Raises:
            UserError: a setting that has no effect on greedy answers, or one out of range.
        """
        if not temperature:
            for name, value in (("top_p", top_p), ("seed", seed)):
                if value is not None:
                    raise UserError(f"{name}: has no effect on greedy answers; give a temperature above 0, too")
            return None
        return cls(temperature, 1.0 if top_p is None else top_p, seed)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch draws from the seed; afterwards as if nothing had been drawn."""
        with torch.random.fork_rng(enabled=self.seed is not None):
            if self.seed is not None:
                torch.manual_seed(self.seed)
            yield


class ExactMatch:
    """Observer: the share of held-out prompts answered to the letter, in `result` before and after training.

    Args:
        source: a data file of prompts with reference answers.
        batch_size: prompts answered at once.
    """

    on_every_rank = True  # all ranks answer together, as each may hold a part of the model

    def __init__(self, source: str, batch_size: int = 100) -> None:
        self.source = source
        self.batch_size = batch_size
        self.before: list[str] | None = None

    def __call__(self, event: Event) -> None:
        """Answer at `begin` and at `finish`."""
        if event.kind == "begin":
            left_out: Counter[str] = Counter()
            self.pairs = prompts_and_answers(self.source, event.trainer.data, lambda why: left_out.update([why]))
            if left_out:
                reasons = ", ".join(f"{number} {why}" for why, number in left_out.most_common())
                event.trainer.run.notice(f"data.exact_match: {left_out.total()} rows left out: {reasons}")
            self.before = self._first_answers(event)
        elif event.kind == "finish":
            self._report(event.trainer, self._answer(event.trainer, "after"))

    def _first_answers(self, event: Event) -> list[str]:
        """Those of the untrained model: made now, or, in a resumed run, taken from its folder."""
        folder = event.trainer.books.folder
        kept = folder / "answers_before.json" if folder else None
        rows = hashlib.sha256(json.dumps(self.pairs, default=str).encode()).hexdigest()
        there = kept is not None and kept.is_file()
        event.trainer.world.wait()  # before it is written
        if kept and there:
            found = json.loads(kept.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found["rows"] != rows:
                raise UserError(
                    f"data.exact_match: {self.source} has other rows than those answered before the first step "
                    f"({kept}); give these again, or start anew"
                )
            return list(found["answers"])
        if event.metrics["step"]:
            raise UserError("data.exact_match: the resumed run has no answers_before.json, made before its first step")
        answers = self._answer(event.trainer, "before")
        if kept and event.trainer.world.is_main:
            write_text(kept, json.dumps({"rows": rows, "answers": answers}, ensure_ascii=False, indent=1))
        return answers

    def _answer(self, trainer: Trainer, moment: str) -> list[str]:
        trainer.emit("status", text=f"answering {len(self.pairs)} held-out prompts {moment} training")
        with trainer.inference() as model:
            return answer_all(model, trainer.tokenizer, self.pairs, self.batch_size)

    def _report(self, trainer: Trainer, after: list[str]) -> None:
        references = [answer.strip() for _, answer in self.pairs]
        assert self.before is not None
        trainer.result["exact_match_before"] = share(self.before, self.pairs)
        trainer.result["exact_match_after"] = share(after, self.pairs)
        trainer.result["exact_match_rows"] = len(references)
        answers = [
            {"prompt": shown(prompt), "reference": reference, "before": before, "after": answer}
            for (prompt, _), reference, before, answer in zip(self.pairs, references, self.before, after, strict=True)
        ]
        trainer.result["samples"] = answers[:3]
        if (folder := trainer.books.folder) and trainer.world.is_main:
            lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
            (folder / "answers.jsonl").write_text("".join(lines), encoding="utf-8")


def answer_all(
    model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[Prompt, str]], batch_size: int = 100
) -> list[str]:
    """Greedy answers to the prompts of (prompt, reference answer) pairs."""
    longest = longest_answer(tokenizer, pairs)
    prompts = [prompt for prompt, _ in pairs]
    if learned_positions(model) is not None:
        fitting(model, tokenizer, prompts, longest)
    return generate(model, tokenizer, prompts, longest, batch_size)


def longest_answer(tokenizer: Any, pairs: Sequence[tuple[Prompt, str]]) -> int:
    """The most tokens an answer may have: a longer one than the longest reference is wrong anyway."""
    return int(max(len(tokenizer(answer)["input_ids"]) for _, answer in pairs)) + 8


def share(answers: Sequence[str], pairs: Sequence[tuple[Prompt, str]]) -> float:
    """The share of answers that are, but for white space around them, the reference answer to the letter."""
    return sum(a == r.strip() for a, (_, r) in zip(answers, pairs, strict=True)) / len(pairs)


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling | None = None,
) -> list[str]:
    """Answers in the order of the prompts: greedy, or drawn as `sampling` says.

    Args:
        model: in evaluation mode.
        tokenizer: renders chat prompts with its template.
        prompts: texts, lists of messages, or chats.
        max_new_tokens: tokens after which an answer is cut.
        batch_size: prompts per call; like lengths go together.
        sampling: null for greedy answers.
    """
    rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    answers: dict[int, str] = {}
    for batch in _batches(rows, batch_size):
        output = continued(model, tokenizer, [rows[i] for i in batch], max_new_tokens, sampling)
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        answers.update({i: text.strip() for i, text in zip(batch, texts, strict=True)})
    return [answers[i] for i in range(len(rows))]


@torch.no_grad()
def continued(
    model: nn.Module,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    streamer: Any = None,
) -> torch.Tensor:
    """The tokens that follow each row, (rows, new tokens), padded behind their end; the KV cache is used."""
    stops = stop_tokens(model, tokenizer)
    inputs, mask = _left_padded(rows, stops[0])
    device = next(model.parameters()).device
    # The model's own generation config may name other values; null leaves them at its.
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling else {}
    with (sampling or Sampling()).drawing():
        output = model.generate(  # type: ignore[operator]
            input_ids=inputs.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            use_cache=True,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            do_sample=sampling is not None,
            **{**dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "typical_p")), **drawn},
            eos_token_id=stops,
            pad_token_id=stops[0],
            streamer=streamer,
        )
    new: torch.Tensor = output[:, inputs.shape[1] :]
    return new


def fitting(model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], wanted: int | None) -> int:
    """How many new tokens each answer may have: `wanted`, or by default 256 and fewer where the context ends.

    Raises:
        UserError: prompt and answer do not fit into the model's context.
    """
    context = context_length(model)
    if context is None:
        return wanted or _NEW_TOKENS
    lengths = [len(prompt_ids(tokenizer, prompt)) for prompt in prompts]
    longest = max(lengths, default=0)
    room = context - longest
    if room < (wanted or 1):
        raise UserError(
            f"prompt {lengths.index(longest) + 1} has {longest:,} tokens and the model's context {context:,}: there is "
            f"room for {max(room, 0):,} new tokens" + ("; lower max_new_tokens" if room > 0 else "; shorten the prompt")
        )
    return wanted or min(_NEW_TOKENS, room)


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, up to where the answer begins.

    Raises:
        UserError: the chat template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    messages, tools = (prompt.messages, prompt.tools) if isinstance(prompt, Chat) else (prompt, None)
    if getattr(tokenizer, "chat_template", None) is None:
        if tools:
            raise UserError("the tokenizer has no chat template, and a prompt with tools needs one")
        return list(tokenizer(plain_prompt(messages))["input_ids"])
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise UserError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's and the model's own."""
    own = getattr(getattr(unwrapped(model), "generation_config", None), "eos_token_id", None)
    stops = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    found = list(dict.fromkeys(s for s in stops if s is not None))
    if not found:
        raise UserError("tokenizer: it has no end-of-sequence token, so no answer would ever end")
    return found


def _batches(rows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = [[pad] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def shown(prompt: Prompt) -> str:
    """A prompt for people: its last message."""
    if isinstance(prompt, str):
        return prompt
    return str((prompt.messages if isinstance(prompt, Chat) else prompt)[-1]["content"])
