"""Writes a model with quantised weights, one tensor after the other, in the layout of transformers and bitsandbytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.config import LoadConfig, ModelConfig, TrainingConfig
from lowmem.errors import UserError
from lowmem.loading import load_model_config, load_tokenizer, loading_errors, model_without_data
from lowmem.model import linears
from lowmem.one_by_one import NotOneByOneError, load_one_by_one
from lowmem.run import Run, pick_device
from lowmem.shards import ShardWriter, require_space, whole_or_nothing
from lowmem.stored_quantization import stored_settings
from lowmem.strategies.quantization import Quantization

_BYTES = {"int8": 1.01, "nf4": 0.57, "fp4": 0.57}  # of a quantised weight with its scales, at most
# what bitsandbytes stores beside a weight
_PARTS = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"),
)


def quantize(
    model: ModelConfig, out: str | Path, strategy: Quantization, *, shard_bytes: int = 5_000_000_000
) -> dict[str, Any]:
    """Quantise a model as a run with this strategy would, and write it; transformers loads what is written as it is.

    In memory at once: one weight as it is stored, and what it becomes; where transformers fuses experts, one layer's.

    Args:
        model: what is quantised; weights in safetensors.
        out: the folder to be made; it appears whole or not at all.
        strategy: the format.
        shard_bytes: largest file of weights.

    Returns:
        out, format, double_quant (null for int8), dtype (of what is not quantised), bytes, seconds.

    Raises:
        UserError: `out` exists, the disk is too small, the model is quantised already, lacks weights, or cannot be read
            one weight at a time.
    """
    start = time.perf_counter()
    config = load_model_config(model)
    if stored_settings(config) is not None:
        raise UserError(f"quantize: {model.name_or_path}: its weights are quantised already")
    place = Path(out).expanduser()
    run = Run(TrainingConfig(), pick_device(None), frozenset())
    load = strategy.configure(LoadConfig.of(model, run.device), run)
    load.from_pretrained["output_loading_info"] = True
    with whole_or_nothing(place) as folder:
        skeleton = model_without_data(config)
        require_space(place, _most_bytes(skeleton, strategy.format))
        folder.mkdir()
        writer = ShardWriter(folder, list(_keys(skeleton)), shard_bytes)
        try:
            with loading_errors(model.name_or_path):
                quantised, report = load_one_by_one(load, _Writing(writer))
        except NotOneByOneError as error:
            raise UserError(f"quantize: {model.name_or_path}: {error}; it takes a model in safetensors") from error
        if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
            raise UserError(f"quantize: {model.name_or_path}: no fitting weights for {', '.join(wrong[:3])}")
        for name, buffer in quantised.state_dict().items():
            if not buffer.is_meta and name not in writer.weight_map:  # what is no parameter
                writer.add(name, buffer)
        writer.close()
        quantised.config.architectures = [type(quantised).__name__]
        quantised.config.save_pretrained(folder)
        if quantised.can_generate():
            quantised.generation_config.save_pretrained(folder)
        tokenizer = load_tokenizer(model)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return {
        "out": str(place),
        "format": strategy.format,
        "double_quant": None if strategy.format == "int8" else strategy.double_quant,
        "dtype": str(quantised.config.dtype).removeprefix("torch."),
        "bytes": writer.total_bytes,
        "seconds": time.perf_counter() - start,
    }


class _Writing:
    """Writes parameters as they come, and leaves their shapes in the model."""

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer

    def __call__(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """See `one_by_one.Place`."""
        for key, tensor in stored_parts(name, parameter):
            self.writer.add(key, tensor)
        holder = getattr(parameter, "module", None)
        if holder is not None:  # bitsandbytes' 4-bit layers hold their weight's scales, too
            holder.quant_state = None
        left = nn.Parameter(torch.empty_like(parameter.data, device="meta"), requires_grad=False)
        left._is_hf_initialized = True  # type: ignore[attr-defined]
        return left


def stored_parts(name: str, parameter: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for a parameter in a file, by their keys: those of bitsandbytes' layers' state dicts."""
    yield name, parameter.data
    if getattr(parameter, "quant_state", None) is not None:
        for key, tensor in parameter.quant_state.as_dict(packed=True).items():
            yield f"{name}.{key}", tensor
    elif getattr(parameter, "SCB", None) is not None:
        yield f"{name.removesuffix('weight')}SCB", parameter.SCB
        yield f"{name.removesuffix('weight')}weight_format", torch.tensor(0, dtype=torch.uint8)


def _keys(skeleton: nn.Module) -> Iterator[str]:
    """All keys that may be written."""
    for name in skeleton.state_dict():
        yield name
        if name.endswith("weight"):
            yield from (f"{name}.{part}" for part in _PARTS)
            yield from (f"{name.removesuffix('weight')}{part}" for part in ("SCB", "weight_format"))


def _most_bytes(skeleton: nn.Module, format: str) -> int:
    """Bytes that the output takes at most, but for headers."""
    inside = {id(p) for module in linears(skeleton).values() for p in module.parameters() if p.dim() > 1}
    return int(sum(p.numel() * (_BYTES[format] if id(p) in inside else 4) for p in skeleton.parameters()))
