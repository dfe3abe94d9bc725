"""Small base models on disk, with a tokenizer beside them, for tests that reload, merge and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "<a>{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}<u>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKS = ("<bos>", "<eos>", "<pad>", "<u>", "<a>")
VOCABULARY = 300


def byte_tokenizer(merges: int = 20) -> PreTrainedTokenizerFast:
    """256 bytes, some merges, and five marks; fewer tokens than the models have rows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*MARKS, *alphabet])}
    pairs = [("e", letter) for letter in "abcdefghijklmnopqrstuvwxyz"][:merges]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    return tokenizer


def save_base(folder: Path, model: nn.Module, tokenizer: Any = None, **options: Any) -> Path:
    """A base model as it lies on a disk."""
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: nn.Module, ids: list[int] | None = None) -> Tensor:
    """Logits of one row (1, length, vocabulary)."""
    device = next(model.parameters()).device
    row = torch.tensor([ids or [5, 17, 60, 99, 3, 41, 77, 120, 8, 64]], device=device)
    return model.eval()(input_ids=row).logits.float().cpu()


def plain(folder: Path, **options: Any) -> nn.Module:
    """What transformers alone makes of a folder; every weight must be there, and none too many."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference."""
    assert one.shape == other.shape
    return (one - other).abs().max().item()
