"""The strategies: one file each. The table below is the whole registry."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem.config import TrainingConfig
from lowmem.strategies.accumulation import GradientAccumulation
from lowmem.strategies.adamw import AdamW
from lowmem.strategies.adamw_8bit import AdamW8bit
from lowmem.strategies.adapter import Adapter
from lowmem.strategies.checkpointing import GradientCheckpointing
from lowmem.strategies.chunked_layers import ChunkedLayers
from lowmem.strategies.chunked_loss import ChunkedCrossEntropy
from lowmem.strategies.clipping import GradientClipping
from lowmem.strategies.compile import Compile
from lowmem.strategies.distributed.ddp import DDP
from lowmem.strategies.distributed.deepspeed import DeepSpeedZeRO
from lowmem.strategies.distributed.fsdp import FSDP2
from lowmem.strategies.distributed.pipeline import PipelineParallel
from lowmem.strategies.distributed.tensor_parallel import TensorParallel
from lowmem.strategies.ema import EMA
from lowmem.strategies.fused_kernels import FusedKernels
from lowmem.strategies.in_backward import OptimizerInBackward
from lowmem.strategies.lora import LoRA
from lowmem.strategies.mixed_precision import MixedPrecision
from lowmem.strategies.packing import Packing
from lowmem.strategies.pure_bf16 import PureBF16
from lowmem.strategies.quantization import Quantization
from lowmem.strategies.retry_on_oom import RetryOnOOM
from lowmem.strategies.streamed_weights import StreamedWeights
from lowmem.strategies.tiled_mlp import TiledMLP
from lowmem.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "quantization": Quantization,
    "lora": LoRA,
    "adapter": Adapter,
    "fused_kernels": FusedKernels,
    "chunked_cross_entropy": ChunkedCrossEntropy,
    "chunked_layers": ChunkedLayers,
    "tiled_mlp": TiledMLP,
    "streamed_weights": StreamedWeights,
    "gradient_checkpointing": GradientCheckpointing,
    "compile": Compile,
    "adamw": AdamW,
    "adamw_8bit": AdamW8bit,
    "pure_bf16": PureBF16,
    "optimizer_in_backward": OptimizerInBackward,
    "gradient_clipping": GradientClipping,
    "ema": EMA,
    "mixed_precision": MixedPrecision,
    "retry_on_oom": RetryOnOOM,
    "gradient_accumulation": GradientAccumulation,
    "packing": Packing,
    "ddp": DDP,
    "pipeline_parallel": PipelineParallel,
    "tensor_parallel": TensorParallel,
    "fsdp_2": FSDP2,
    "deepspeed_zero": DeepSpeedZeRO,
}


def with_defaults(strategies: Sequence[Strategy], training: TrainingConfig) -> list[Strategy]:
    """The given strategies, with an optimizer where there is none, and clipping for `max_grad_norm`."""
    full = list(strategies)
    if not any(strategy.slot == AdamW.slot for strategy in full):
        full.append(AdamW())
    if training.max_grad_norm is not None:
        full.append(GradientClipping(training.max_grad_norm))
    return full


__all__ = [
    "DDP",
    "EMA",
    "FSDP2",
    "STRATEGIES",
    "AdamW",
    "AdamW8bit",
    "Adapter",
    "ChunkedCrossEntropy",
    "ChunkedLayers",
    "Compile",
    "DeepSpeedZeRO",
    "FusedKernels",
    "GradientAccumulation",
    "GradientCheckpointing",
    "GradientClipping",
    "LoRA",
    "MixedPrecision",
    "OptimizerInBackward",
    "Packing",
    "PipelineParallel",
    "PureBF16",
    "Quantization",
    "RetryOnOOM",
    "StreamedWeights",
    "TensorParallel",
    "TiledMLP",
    "with_defaults",
]
