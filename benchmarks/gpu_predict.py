"""Predicted and measured memory of runs on a CUDA card: what the check `predict` of `gpu_suite.py` starts.

    PYTORCH_ALLOC_CONF=expandable_segments:True python benchmarks/gpu_predict.py --out predicted.json

In a process of its own, as the allocator is set before CUDA starts. Every recipe is predicted without the card (the
meta device, the profile `cuda`), then run for three steps; SOLAR's shape runs under a limit of 24 GiB. On a CPU
(--tiny) everything but the bytes of the card is run.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_suite import FULL, GIB, TINY, Size, fit, fresh, make_on_device, on_cuda, quantised_solar, write

ALLOCATED, RESERVED = 0.01, 0.03  # largest errors
SOLAR_LIMIT = 24 * GIB


@dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
        strategies: as in a recipe file.
        dtype: of the weights.
        uneven: rows of several lengths.
        solar: SOLAR's shape with all its layers in NF4, under 24 GiB; else the medium model.
    """

    strategies: dict[str, dict[str, Any]]
    dtype: str = "bfloat16"
    uneven: bool = False
    solar: bool = False


NF4: dict[str, dict[str, Any]] = {"quantization": {}, "lora": {"r": 16}}
LEAN: dict[str, dict[str, Any]] = {"gradient_checkpointing": {}, "chunked_cross_entropy": {}}
RECIPES: dict[str, Recipe] = {
    "full, float32": Recipe({}, "float32"),
    "full, autocast": Recipe({"mixed_precision": {}}, "float32"),
    "full, autocast, checkpointing": Recipe({"mixed_precision": {}, "gradient_checkpointing": {}}, "float32"),
    "full, float16 autocast, chunked": Recipe(
        {"mixed_precision": {"dtype": "float16"}, "chunked_cross_entropy": {}}, "float32"
    ),
    "full, pure bfloat16": Recipe({"pure_bf16": {}}),
    "full, pure bfloat16, lean, in backward": Recipe({"pure_bf16": {}, **LEAN, "optimizer_in_backward": {}}),
    "full, 8-bit AdamW, lean": Recipe({"mixed_precision": {}, **LEAN, "adamw_8bit": {}}, "float32"),
    "full, paged 8-bit AdamW": Recipe({"pure_bf16": {}, "adamw_8bit": {"paged": True}}),
    "full, AdamW with foreach": Recipe({"adamw": {"fused": False}}, "float32"),
    "LoRA": Recipe({"lora": {"r": 16}}),
    "LoRA, dropout, autocast, averages": Recipe(
        {"lora": {"r": 16, "lora_dropout": 0.1}, "mixed_precision": {}, "ema": {}}
    ),
    "LoRA, lean, accumulation": Recipe({"lora": {"r": 16}, **LEAN, "gradient_accumulation": {"micro_batch_size": 1}}),
    "LoRA, packed": Recipe({"lora": {"r": 16}, "packing": {}}, uneven=True),
    "NF4": Recipe(NF4),
    "NF4, lean, autocast": Recipe({**NF4, **LEAN, "mixed_precision": {}}),
    "int8, checkpointing": Recipe(
        {"quantization": {"format": "int8"}, "lora": {"r": 16}, "gradient_checkpointing": {}}
    ),
    "SOLAR's shape in 24 GiB": Recipe(
        {**NF4, **LEAN, "mixed_precision": {}, "adamw_8bit": {}, "gradient_accumulation": {"micro_batch_size": 1}},
        solar=True,
    ),
}


def strategies_of(recipe: Recipe, without: tuple[str, ...] = ()) -> list[Any]:
    from lowmem.strategies import STRATEGIES

    return [STRATEGIES[name](**settings) for name, settings in recipe.strategies.items() if name not in without]


def shape_of(recipe: Recipe, size: Size) -> dict[str, Any]:
    return {**size.solar, "num_hidden_layers": size.whole_layers} if recipe.solar else size.medium


def lengths_of(recipe: Recipe, size: Size) -> list[int]:
    """Of the rows of one optimizer batch."""
    if recipe.solar:
        return [2 * size.solar_length] * size.solar_batch
    even = [size.length] * size.batch
    return [length // (1 + i % 3) for i, length in enumerate(2 * even)] if recipe.uneven else even


def numbers_of(recipe: Recipe, size: Size) -> dict[str, Any]:
    lengths = lengths_of(recipe, size)
    return {"batch_size": len(lengths), "max_length": max(lengths), "learning_rate": 1e-4, "max_grad_norm": None}


def predicted(recipe: Recipe, size: Size) -> tuple[int, int]:
    """Peak bytes, allocated and reserved."""
    import torch
    from transformers import LlamaConfig

    from lowmem import TrainingConfig
    from lowmem.loading import model_without_data
    from lowmem.memory.predict import judge, record

    config = LlamaConfig(**shape_of(recipe, size), dtype=getattr(torch, recipe.dtype))
    training = TrainingConfig(**numbers_of(recipe, size), shuffle=False)
    trace = record(model_without_data(config), training, strategies_of(recipe), "cuda", lengths_of(recipe, size))
    found = judge(trace, expandable=True, capacity=SOLAR_LIMIT if recipe.solar and on_cuda() else None)
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def measured(recipe: Recipe, size: Size) -> tuple[int | None, int | None]:
    """The same of three steps on the card; null without one."""
    import torch

    lengths = lengths_of(recipe, size)
    vocabulary = size.solar["vocab_size"] if recipe.solar else size.medium["vocab_size"]
    rows = [{"input_ids": [(7 * i + j) % (vocabulary - 1) + 1 for j in range(n)]} for i, n in enumerate(lengths)]
    if recipe.solar:
        model, left_out = quantised_solar(size), ("quantization",)
    else:
        model, left_out = make_on_device(shape_of(recipe, size), recipe.dtype), ()
    if recipe.solar and on_cuda():
        torch.cuda.set_per_process_memory_fraction(SOLAR_LIMIT / torch.cuda.get_device_properties(0).total_memory)
    try:
        got = fit(model, rows, strategies_of(recipe, left_out), **numbers_of(recipe, size))
    finally:
        if recipe.solar and on_cuda():
            torch.cuda.set_per_process_memory_fraction(1.0)
    return got.peak_allocated, got.peak_reserved


def compared(recipe: Recipe, size: Size) -> dict[str, Any]:
    """Both, their errors, and what went wrong."""
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        fresh()
        found["predicted"] = predicted(recipe, size)
        found["seconds_predicted"] = round(time.perf_counter() - start, 2)
        fresh()
        found["measured"] = measured(recipe, size)
    except Exception as problem:
        found["failed"] = f"{type(problem).__name__}: {problem}"
    gc.collect()
    found["seconds"] = round(time.perf_counter() - start, 2)
    pairs = zip(found.get("predicted", ()), found.get("measured", ()), strict=False)
    found["errors"] = [None if real is None else ours / real - 1 for ours, real in pairs]
    return found


def workspace_bytes() -> int:
    """Of one cuBLAS workspace here."""
    import torch

    from lowmem.memory.cards import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER

    hopper = on_cuda() and torch.cuda.get_device_capability() >= (9, 0)
    return CUBLAS_WORKSPACE_HOPPER if hopper else CUBLAS_WORKSPACE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="written after every recipe")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--only", default="", help="recipes whose names begin so")
    given = parser.parse_args()
    if on_cuda() and "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        print("gpu_predict: set PYTORCH_ALLOC_CONF=expandable_segments:True", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    with patch("lowmem.memory.trace.CUBLAS_WORKSPACE", workspace_bytes()):
        for name, recipe in RECIPES.items():
            if not name.startswith(given.only):
                continue
            results[name] = compared(recipe, TINY if given.tiny else FULL)
            write(given.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
