"""How long a row of Llama-3.1-8B fits which card with Hugging Face's usual QLoRA, predicted, beside Unsloth's table.

    python benchmarks/unsloth_table.py

Unsloth publishes the longest row for QLoRA of Llama-3.1-8B (rank 32 on all linear layers, one row per step) with its
own code and with "HF + FA2", by card. Its figures lie on straight lines to the token, 404.75 x (GB - 9.70) for HF and
4,718.9 x (GB - 7.37) for its own: a fit, not the edge of memory. Unit, allocator settings and versions are not
stated.

Here the same set-up is traced at full depth with each of `LENGTHS`: the model of transformers with flash attention,
NF4 with double quantisation, embedding, head and norms in float32 (as peft's `prepare_model_for_kbit_training` leaves
them), adapters in float32, bfloat16 autocast, every layer recomputed, 8-bit AdamW, and the plain loss on all logits.
Between two lengths reserved memory is taken as a straight line. CUDA itself is given half a GiB of the card. Writes
`results/unsloth_table.json` and `.md`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from environment import RESULTS, as_table, environment, table
from torch import nn

from lowmem import AdamW8bit, GradientCheckpointing, LoRA, MixedPrecision, Quantization, Strategy, TrainingConfig
from lowmem.config import ModelConfig
from lowmem.memory.allocator import CachingAllocator, replay
from lowmem.memory.estimate import CONTEXT_BYTES
from lowmem.memory.subject import Subject, model_config
from lowmem.strategy import Stage

MODEL = "meta-llama/Llama-3.1-8B"
CARDS = (8, 10, 12, 16, 24, 48, 80)
LENGTHS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 49152)


@dataclass
class Float32Rest(Strategy):
    """What is not quantised becomes float32, as peft's preparation for k-bit training does."""

    stage: ClassVar[Stage] = Stage.ADAPT  # given before lora, so that it meets the base alone

    def wrap_model(self, model: nn.Module, run: Any) -> nn.Module:
        for parameter in model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.to(torch.float32)
        return model


def subject(prepared: bool) -> Subject:
    strategies: list[Strategy] = [Quantization(format="nf4"), *([Float32Rest()] if prepared else [])]
    strategies += [LoRA(r=32, lora_alpha=32, target_modules="all-linear"), GradientCheckpointing()]
    strategies += [MixedPrecision(dtype="bfloat16"), AdamW8bit()]
    model = ModelConfig(MODEL, dtype="bfloat16")
    training = TrainingConfig(batch_size=1, max_length=max(LENGTHS))
    return Subject.of_config(model_config(model), model, training, strategies)


def reserved(prepared: bool) -> dict[str, list[int]]:
    """Allocator -> reserved bytes at each of the lengths."""
    found: dict[str, list[int]] = {"default": [], "expandable": []}
    for length in LENGTHS:
        trace = subject(prepared).trace([length])
        for name, sizes in found.items():
            sizes.append(replay(trace.events, CachingAllocator(None, name == "expandable")).peak_reserved)
        print(f"{length:>7,} tokens: {', '.join(f'{n} {s[-1] / 2**30:.2f} GiB' for n, s in found.items())}", flush=True)
    return found


def longest(sizes: Sequence[int], capacity: int) -> int | None:
    """The longest row for which reserved memory stays within `capacity`; null: not even the shortest length does."""
    best = None
    for (length, size), (more, larger) in pairwise(zip(LENGTHS, sizes, strict=True)):
        if size <= capacity:
            best = min(more, int(length + (more - length) * (capacity - size) / (larger - size)))
    return best


def line(slope: float, intercept: float, card: int) -> int | None:
    """A published line at a card of so many GB."""
    return int(slope * (card - intercept)) if card > intercept else None


def report(prepared: dict[str, list[int]], today: dict[str, list[int]]) -> list[dict[str, Any]]:
    rows = []
    for card in CARDS:
        decimal, binary = card * 10**9 - CONTEXT_BYTES, card * 2**30 - CONTEXT_BYTES
        rows.append(
            {
                "card": card,
                "published_hf": line(404.75, 9.70, card),
                "published_unsloth": line(4718.9, 7.37, card),
                "predicted_hf_decimal_default": longest(prepared["default"], decimal),
                "predicted_hf_default": longest(prepared["default"], binary),
                "predicted_hf_expandable": longest(prepared["expandable"], binary),
                "predicted_today_expandable": longest(today["expandable"], binary),
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    head = [
        "card",
        "Unsloth's line for HF + FA2",
        "predicted, GB, default allocator",
        "GiB, default",
        "GiB, expandable",
    ]
    head += ["16-bit embedding and head, GiB, expandable", "Unsloth's line for itself"]
    keys = ["published_hf", "predicted_hf_decimal_default", "predicted_hf_default", "predicted_hf_expandable"]
    keys += ["predicted_today_expandable", "published_unsloth"]
    return table(head, [[row["card"], *(f"{row[k]:,}" if row[k] else "none" for k in keys)] for row in rows])


def main() -> int:
    print("embedding, head and norms in float32:")
    prepared = reserved(True)
    print("in 16 bits:")
    today = reserved(False)
    rows, made = report(prepared, today), environment()
    facts = {"lengths": LENGTHS, "reserved_float32_rest": prepared, "reserved_16_bit_rest": today}
    (RESULTS / "unsloth_table.json").write_text(
        json.dumps({"rows": rows, **facts, "environment": made}, indent=1) + "\n", encoding="utf-8"
    )
    text = f"# Longest row for Llama-3.1-8B, QLoRA r = 32, one row per step\n\n{markdown(rows)}\n\n"
    text += "Made by `benchmarks/unsloth_table.py`, whose text says what is compared.\n\n" + as_table(made) + "\n"
    (RESULTS / "unsloth_table.md").write_text(text, encoding="utf-8")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
