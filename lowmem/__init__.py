"""Fine-tune large language models on one GPU: composable memory techniques, exact by construction."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowmem.version import __version__

if TYPE_CHECKING:
    from lowmem.config import DataConfig, ModelConfig, TrainingConfig, WeightedPath
    from lowmem.errors import UserError
    from lowmem.loaded import load_run
    from lowmem.memory.rule_of_thumb import estimate_memory_usage
    from lowmem.observers import Event, Observer
    from lowmem.strategies import (
        DDP,
        EMA,
        FSDP2,
        AdamW,
        AdamW8bit,
        Adapter,
        ChunkedCrossEntropy,
        ChunkedLayers,
        Compile,
        DeepSpeedZeRO,
        FusedKernels,
        GradientAccumulation,
        GradientCheckpointing,
        GradientClipping,
        LoRA,
        MixedPrecision,
        OptimizerInBackward,
        Packing,
        PipelineParallel,
        PureBF16,
        Quantization,
        RetryOnOOM,
        StreamedWeights,
        TensorParallel,
        TiledMLP,
    )
    from lowmem.strategy import ConflictError, Stage, Strategy, Trait
    from lowmem.trainer import Trainer

# Importing torch takes seconds, and `lowmem --help` needs none of it: a public name is loaded when it is first used.
_HOME = {
    "Trainer": "trainer",
    **dict.fromkeys(("TrainingConfig", "ModelConfig", "DataConfig", "WeightedPath"), "config"),
    **dict.fromkeys(("Strategy", "Stage", "Trait", "ConflictError"), "strategy"),
    **dict.fromkeys(("Event", "Observer"), "observers"),
    "UserError": "errors",
    "load_run": "loaded",
    "estimate_memory_usage": "memory.rule_of_thumb",
    **dict.fromkeys(
        (
            "GradientAccumulation",
            "GradientCheckpointing",
            "MixedPrecision",
            "PureBF16",
            "LoRA",
            "Adapter",
            "Quantization",
            "AdamW",
            "AdamW8bit",
            "GradientClipping",
            "ChunkedCrossEntropy",
            "ChunkedLayers",
            "Packing",
            "PipelineParallel",
            "OptimizerInBackward",
            "EMA",
            "Compile",
            "DeepSpeedZeRO",
            "FusedKernels",
            "RetryOnOOM",
            "StreamedWeights",
            "TensorParallel",
            "TiledMLP",
            "DDP",
            "FSDP2",
        ),
        "strategies",
    ),
}

__all__ = [  # noqa: RUF022 - the order is the reader's: the trainer, the numbers, the strategies
    "Trainer",
    "TrainingConfig",
    "ModelConfig",
    "DataConfig",
    "WeightedPath",
    "Strategy",
    "Stage",
    "Trait",
    "ConflictError",
    "UserError",
    "Event",
    "Observer",
    "load_run",
    "estimate_memory_usage",
    "GradientAccumulation",
    "GradientCheckpointing",
    "MixedPrecision",
    "PureBF16",
    "LoRA",
    "Adapter",
    "Quantization",
    "AdamW",
    "AdamW8bit",
    "GradientClipping",
    "ChunkedCrossEntropy",
    "ChunkedLayers",
    "Packing",
    "OptimizerInBackward",
    "EMA",
    "Compile",
    "DeepSpeedZeRO",
    "FusedKernels",
    "RetryOnOOM",
    "StreamedWeights",
    "TensorParallel",
    "TiledMLP",
    "DDP",
    "FSDP2",
    "PipelineParallel",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"lowmem.{_HOME[name]}"), name)
    raise AttributeError(f"module 'lowmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
