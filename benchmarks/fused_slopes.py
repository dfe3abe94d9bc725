"""Bytes that each further token of a row takes at the peak, with fused kernels and without; predicted, no GPU needed.

    python benchmarks/fused_slopes.py

Two layers of SOLAR 10.7B's shape in bfloat16, LoRA of rank 16 on all linear layers, chunked loss, one row per step.
Every figure is the difference between two traces of a step (`LENGTHS`), in live bytes on a card. Prints the table of
docs/strategies/fused_kernels.md.
"""

from __future__ import annotations

import sys

import torch
from environment import table

from lowmem import (
    ChunkedCrossEntropy,
    ChunkedLayers,
    FusedKernels,
    GradientCheckpointing,
    LoRA,
    Strategy,
    TiledMLP,
    TrainingConfig,
)
from lowmem.loading import model_without_data
from lowmem.memory.predict import record

LENGTHS = (16_384, 32_768)
BESIDE = {
    "nothing": list,
    "`gradient_checkpointing`": lambda: [GradientCheckpointing()],
    "`gradient_checkpointing`, `tiled_mlp`": lambda: [GradientCheckpointing(), TiledMLP()],
    "`gradient_checkpointing`, `chunked_layers`": lambda: [GradientCheckpointing(), ChunkedLayers()],
}
FUSED = {
    "without": list,
    "with": lambda: [FusedKernels()],
    "norms alone": lambda: [FusedKernels(rope=False, swiglu=False)],
}


def bytes_per_token(strategies: list[Strategy]) -> int:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config.dtype = torch.bfloat16
    peaks = []
    for length in LENGTHS:
        training = TrainingConfig(batch_size=1, max_length=length)
        trace = record(model_without_data(config), training, strategies, "cuda", [length])
        peaks.append(trace.peak()[0])
    return round((peaks[1] - peaks[0]) / (LENGTHS[1] - LENGTHS[0]))


def main() -> int:
    rows = []
    for name, others in BESIDE.items():
        found = [bytes_per_token([LoRA(r=16), ChunkedCrossEntropy(), *others(), *made()]) for made in FUSED.values()]
        rows.append([name, *(f"{size:,}" for size in found)])
    print(table(["beside it", *FUSED], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
