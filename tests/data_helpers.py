"""Small tokenizers, chat templates and rows shared by the tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from lowmem import DataConfig
from lowmem.data import tokenize
from lowmem.data.read import read_rows

SPECIALS = ("<bos>", "<eos>", "<pad>", "<u>", "<a>")
CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<a>{% endif %}"
UNMARKED = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def byte_tokenizer(template: str | None = CHAT, bos: bool = False, trim: bool = False, **names: str) -> Any:
    """One token per byte, and the special tokens; `bos` adds a post-processor that prepends it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)] if trim else []
    if bos:
        steps.append(
            processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))])
        )
    if steps:
        inner.post_processor = processors.Sequence(steps)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", **names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(kind: str, size: int = 400) -> Any:
    """A small BPE that merges a space or a line break with what follows it."""
    inner = Tokenizer(models.BPE())
    if kind == "metaspace":
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        alphabet = []
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "regex")
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = [f"Question: what is number {n}?\nAnswer: number {n} is blue, of course.\n" for n in range(20)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<bos>", "<eos>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    inner.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")


class SlowTokenizer(PreTrainedTokenizer):
    """Pairs of characters, without offsets."""

    def __init__(self, **kwargs: Any):
        super().__init__(bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<u>", "<a>"], **kwargs)

    @property
    def vocab_size(self) -> int:
        return 1 << 17

    def get_vocab(self) -> dict[str, int]:
        return dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [text[start : start + 2] for start in range(0, len(text), 2)]

    def _convert_token_to_id(self, token: str) -> int:
        return sum(ord(char) << (8 * place) for place, char in enumerate(token)) + (1 << 16)

    def _convert_id_to_token(self, index: int) -> str:
        value = index - (1 << 16)
        return chr(value & 255) + (chr(value >> 8) if value >> 8 else "")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def supervised(row: Any, tokenizer: Any) -> str:
    labels = row["labels"]
    assert (labels[labels != -100] == row["input_ids"][labels != -100]).all()
    return str(tokenizer.decode(labels[labels != -100].tolist(), clean_up_tokenization_spaces=False))


def talk(*contents: str | None) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def one(row: dict[str, Any], tokenizer: Any, max_length: int = 512, **settings: Any) -> Any:
    dataset = tokenize([row], tokenizer, DataConfig(**settings), max_length)
    assert len(dataset) == 1
    return dataset[0]


KOREAN = talk("안녕 👋🏽", "네, 반가워요 😀", "bye", "안녕히")
KOREAN_ANSWERS = "네, 반가워요 😀<eos>안녕히<eos>"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(source: Any) -> list[str]:
    return [row["text"] for row, _ in read_rows(source)]
