"""The configurations of `predictor_on_cpu.py`: small random models, a step of a fraction of a second each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Some 3 to 10 million weights each, with the marks of the real model: grouped heads, tied embeddings, biases, soft
# caps, windows, experts. Windows are shorter than the rows, so that they have to be masked.
_SMALL = {"vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 1024}
_GATED = {**_SMALL, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_GATED, "tie_word_embeddings": False},
    "qwen2": {**_GATED, "tie_word_embeddings": True},
    "qwen3": {**_GATED, "head_dim": 48, "tie_word_embeddings": True},
    "mistral": {**_GATED, "sliding_window": 100, "tie_word_embeddings": False},
    "gemma2": {**_GATED, "head_dim": 32, "sliding_window": 100},
    "gemma3_text": {**_GATED, "head_dim": 32, "sliding_window": 100, "sliding_window_pattern": 2},
    "phi3": {**_GATED, "num_key_value_heads": 8, "pad_token_id": 0},
    "mixtral": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 4000, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 1024},
    "gpt_neox": {**_SMALL, "intermediate_size": 1024, "num_attention_heads": 8},
    "opt": {**_SMALL, "ffn_dim": 1024, "num_attention_heads": 8, "word_embed_proj_dim": 256},
    "olmo2": _GATED,
    "granite": {**_GATED, "logits_scaling": 8.0},
}

HALF: dict[str, Any] = {"dtype": "bfloat16"}
EVEN = (256, 256, 256, 256)
UNEVEN = (300, 40, 170, 90, 220, 60)
SHORT = (90, 60, 120, 70, 40, 100, 30, 80)


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        strategies: as in a recipe.
        lengths: tokens of each row of the optimizer batch.
        dtype: of the weights before any strategy.
        attention: `attn_implementation` of the model.
        evaluate: lengths of the rows of an evaluation before the training, whose peak it is; none without rows.
        training: numbers beside the batch.
    """

    architecture: str
    strategies: dict[str, dict[str, Any]] = field(default_factory=dict)
    lengths: tuple[int, ...] = EVEN
    dtype: str = "float32"
    attention: str = "sdpa"
    evaluate: tuple[int, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Words for a table."""
        words = [f"{key}({_short(value)})" if value else key for key, value in self.strategies.items()] or ["plain"]
        marks = [self.dtype] if self.dtype != "float32" else []
        marks += [self.attention] if self.attention != "sdpa" else []
        marks += ["uneven rows"] if len(set(self.lengths)) > 1 else []
        marks += ["evaluation"] if self.evaluate else []
        marks += [_short(self.training)] if self.training else []
        return f"{self.architecture}: {' + '.join(words)}" + (f"; {', '.join(marks)}" if marks else "")


def _short(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _case(architecture: str, *strategies: str, **options: Any) -> Case:
    return Case(architecture, {key: value for name in strategies for key, value in _NAMED[name].items()}, **options)


_NAMED: dict[str, dict[str, dict[str, Any]]] = {
    "autocast": {"mixed_precision": {}},
    "fp16": {"mixed_precision": {"dtype": "float16", "initial_scale": 64.0}},
    "bf16": {"pure_bf16": {}},
    "lora": {"lora": {"r": 8}},
    "dora": {"lora": {"r": 8, "use_dora": True}},
    "dropout": {"lora": {"r": 8, "lora_dropout": 0.1}},
    "nf4": {"quantization": {}, "lora": {"r": 8}},
    "nf4-dora": {"quantization": {}, "lora": {"r": 8, "use_dora": True}},
    "nf4-dropout": {"quantization": {}, "lora": {"r": 8, "lora_dropout": 0.1}},
    "fp4": {"quantization": {"format": "fp4", "double_quant": False}, "lora": {"r": 8}},
    "int8-dora": {"quantization": {"format": "int8"}, "lora": {"r": 8, "use_dora": True}},
    "int8": {"quantization": {"format": "int8"}, "lora": {"r": 8}},
    "checkpointing": {"gradient_checkpointing": {}},
    "every-2nd": {"gradient_checkpointing": {"every_n_layers": 2}},
    "chunked": {"chunked_cross_entropy": {"chunk_size": 128}},
    "accumulation": {"gradient_accumulation": {"micro_batch_size": 2}},
    "steps-3": {"gradient_accumulation": {"steps": 3}},
    "packing": {"packing": {}},
    "8bit": {"adamw_8bit": {}},
    "foreach": {"adamw": {"fused": False}},
    "in-backward": {"optimizer_in_backward": {}},
    "ema": {"ema": {}},
    "compile": {"compile": {"backend": "eager"}},
}
CASES: tuple[Case, ...] = (
    # one strategy, or none
    _case("llama"),
    _case("llama", "checkpointing"),
    _case("llama", "every-2nd"),
    _case("llama", "chunked"),
    _case("llama", "lora"),
    _case("llama", "foreach"),
    _case("llama", "in-backward"),
    _case("llama", "ema"),
    _case("llama", "8bit"),
    _case("llama", "bf16"),
    _case("llama", "compile"),
    _case("llama", lengths=UNEVEN),
    _case("llama", "steps-3", lengths=UNEVEN),
    _case("llama", "accumulation", lengths=SHORT, training={"max_grad_norm": 1.0}),
    _case("llama", attention="eager"),
    _case("llama", evaluate=(700,) * 6, lengths=(40, 40)),
    _case("llama", "dora"),
    _case("llama", "dropout"),
    # architectures
    _case("qwen2", "checkpointing", "chunked"),
    _case("qwen3", training={"max_grad_norm": 0.5}),
    _case("mistral", "checkpointing", lengths=UNEVEN),
    _case("gemma2", "checkpointing", attention="eager"),
    _case("gemma3_text", "chunked", "lora"),
    _case("phi3", "lora", "checkpointing"),
    _case("mixtral", "lora", "checkpointing", **HALF),
    _case("gpt2"),
    _case("gpt2", "lora", "checkpointing", evaluate=(500, 500, 400, 30), lengths=(60, 60)),
    _case("gpt_neox", "in-backward", "checkpointing"),
    _case("opt", "8bit"),
    _case("olmo2", "ema", "lora"),
    _case("granite", "chunked"),
    # autocast
    _case("llama", "autocast"),
    _case("llama", "autocast", "checkpointing"),
    _case("llama", "autocast", "lora", "checkpointing", "chunked"),
    _case("llama", "fp16", lengths=(64, 64)),
    _case("llama", "fp16", "lora", "ema", lengths=(64, 64)),
    _case("qwen2", "autocast", "chunked"),
    _case("qwen3", "autocast", "8bit", "checkpointing"),
    _case("gemma2", "autocast", "lora", attention="eager"),
    _case("gemma3_text", "autocast", "checkpointing"),
    _case("gpt2", "autocast"),
    _case("phi3", "autocast", "in-backward"),
    _case("mistral", "autocast", "lora", evaluate=(600, 600, 500), lengths=(50, 70)),
    _case("opt", "autocast", "steps-3", lengths=UNEVEN),
    _case("gpt_neox", "autocast", "ema"),
    # NF4
    _case("llama", "nf4", **HALF),
    _case("llama", "nf4", "checkpointing", "chunked", "8bit", **HALF),
    _case("llama", "nf4", "autocast", "checkpointing", **HALF),
    _case("llama", "nf4-dora", **HALF),
    _case("llama", "nf4-dropout", "checkpointing", **HALF),
    _case("qwen2", "nf4", "packing", "autocast", lengths=SHORT, **HALF),
    _case("qwen3", "nf4", "chunked", **HALF),
    _case("mistral", "nf4", "accumulation", "checkpointing", lengths=UNEVEN, **HALF),
    _case("gemma2", "nf4", "checkpointing", attention="eager", **HALF),
    _case("gemma3_text", "nf4", "8bit", **HALF),
    _case("phi3", "nf4", "every-2nd", **HALF),
    _case("opt", "nf4", "ema", **HALF),
    _case("llama", "fp4", "checkpointing", **HALF),
    _case("llama", "int8", **HALF),
    _case("llama", "int8", "checkpointing", "chunked", **HALF),
    _case("llama", "int8-dora", "checkpointing", **HALF),
    # packed
    _case("llama", "packing", lengths=SHORT),
    _case("llama", "packing", "checkpointing", "chunked", lengths=SHORT),
    _case("qwen3", "packing", "accumulation", lengths=SHORT, training={"max_length": 300}),
    _case("mistral", "packing", "lora", lengths=SHORT),
    _case("gemma3_text", "packing", "autocast", "lora", "checkpointing", lengths=SHORT),
    _case("olmo2", "packing", "bf16", lengths=SHORT),
    _case("phi3", "packing", "in-backward", lengths=SHORT),
)
