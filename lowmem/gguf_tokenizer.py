"""A transformers tokenizer as GGUF metadata: tokens, types, merges or scores, special ids, pre-tokenizer, template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lowmem.errors import UserError

# How a byte-level tokenizer cuts text before it merges -> the name that llama.cpp knows the cut by
# (convert_hf_to_gguf.py of llama.cpp; the same names stand in transformers' integrations/gguf).
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA_3: "llama-bpe", _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


def write_tokenizer(writer: Any, tokenizer: Any, rows: int, base: Path | None = None) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        writer: `gguf.GGUFWriter`, before its header is written.
        tokenizer: a fast tokenizer of transformers: byte-level BPE, or BPE with byte fallback (SentencePiece's).
        rows: of the embedding; rows without a token get an unused one.
        base: the GGUF file the model came from, if it did; its name for the pre-tokenizer is kept.

    Raises:
        UserError: another kind of tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"gguf: {type(tokenizer).__name__} is no fast tokenizer, and only those are supported")
    state = json.loads(backend.to_str())
    model, byte_level = state["model"], _is_byte_level(state)
    if model["type"] != "BPE" or not (byte_level or model.get("byte_fallback")):
        raise UserError(f"gguf: the tokenizer's model is {model['type']}; supported: byte-level BPE, SentencePiece BPE")
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(tokens) >= rows:
        raise UserError(f"gguf: the tokenizer has token {max(tokens)}, and the embedding {rows} rows")
    numbers = range(rows)
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_tokenizer_pre(_pre_tokenizer(state, base) if byte_level else "default")
    writer.add_token_list([tokens.get(n, f"[PAD{n}]") for n in numbers])
    writer.add_token_types(
        [_kind(n, tokens, added, tokenizer.unk_token_id if not byte_level else None) for n in numbers]
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if byte_level:
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores(_scores(tokens, merges, rows))
        writer.add_add_space_prefix(tokenizer.tokenize("a")[:1] != ["a"])
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    around = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and around[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and around[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(portable_template(tokenizer.chat_template))


def portable_template(template: str) -> str:
    """A chat template without the marks of generated text, which only transformers knows; its output is the same."""
    return _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)


def _is_byte_level(state: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(state.get("decoder"))) or any(
        step["type"] == "ByteLevel" for step in _steps(state.get("pre_tokenizer"))
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part.get("pretokenizers") or part.get("decoders") or [part])


def _pre_tokenizer(state: dict[str, Any], base: Path | None) -> str:
    if base is not None:
        import gguf

        field = gguf.GGUFReader(base).fields.get("tokenizer.ggml.pre")
        if field is not None:
            return str(field.contents())
    steps = _steps(state.get("pre_tokenizer"))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := _SPLITS.get(steps[0]["pattern"].get("Regex", ""))):
        return name
    raise UserError(
        f"gguf: the tokenizer cuts text ({' and '.join(kinds) or 'not at all'}) in a way that has no name here; "
        f"supported: gpt-2, smollm, {', '.join(_SPLITS.values())}"
    )


def _kind(number: int, tokens: dict[int, str], added: dict[int, Any], unknown: int | None) -> int:
    from gguf import TokenType

    if number not in tokens:
        return int(TokenType.UNUSED)
    if number == unknown:
        return int(TokenType.UNKNOWN)
    if number in added:
        return int(TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED)
    byte = unknown is not None and re.fullmatch(r"<0x[0-9A-F]{2}>", tokens[number])
    return int(TokenType.BYTE if byte else TokenType.NORMAL)


def _scores(tokens: dict[int, str], merges: list[str], rows: int) -> list[float]:
    """SentencePiece joins the pair with the highest score first; so the score is minus the rank of the merge."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", ""), len(ranks))
    last = float(len(ranks))
    return [-float(ranks.get(tokens.get(n, ""), last)) if tokens.get(n, "") in ranks else -last for n in range(rows)]
