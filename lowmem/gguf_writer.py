"""Writes a model in transformers' format as a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lowmem.base_weights import SafetensorsWeights
from lowmem.errors import UserError
from lowmem.gguf_layout import Layout
from lowmem.gguf_tokenizer import write_tokenizer
from lowmem.loading import model_without_data

Quantization = Literal["f32", "f16", "bf16", "q8_0"]


def write_gguf(
    source: Path, target: Path, quantization: Quantization, tokenizer: Any, name: str, base: Path | None = None
) -> list[str]:
    """Convert a model of the Llama or Qwen2 family, tensor by tensor.

    Args:
        source: a folder in transformers' format, with safetensors.
        target: the file to write.
        quantization: of the matrices; vectors are float32.
        tokenizer: goes into the file.
        name: of the model, for whoever reads the file.
        base: the GGUF file the model came from, if it did.

    Returns:
        Notices about what the format cannot say.

    Raises:
        UserError: another family, another kind of tokenizer or rotary embedding, numbers too large for float16.
    """
    import gguf
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(source)
    layout = Layout(config)
    notices = _check(config)
    model = model_without_data(config)
    weights = SafetensorsWeights(source, list(model.state_dict()), model.base_model_prefix, None)
    writer = gguf.GGUFWriter(target, layout.architecture)
    _describe(writer, config, quantization, name)
    write_tokenizer(writer, tokenizer, config.vocab_size, base)
    plan = []
    for tensor_name in weights.keys:
        in_file = layout.gguf_name(tensor_name)
        if in_file is None:
            raise UserError(f"gguf: {tensor_name} has no place in the architecture {layout.architecture}")
        shape = tuple(model.get_parameter(tensor_name).shape)
        kind = _kind(shape, quantization)
        size = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(in_file, size, np.dtype(np.uint8), int(np.prod(size)), kind)
        plan.append((tensor_name, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor_name, kind in plan:
        tensor = weights.read(weights.keys[tensor_name]).to(torch.float32).numpy()
        rows = layout.to_gguf(tensor_name, tensor)
        writer.write_tensor_data(_packed(np.ascontiguousarray(rows), kind, tensor_name))
    writer.close()
    return notices


def _kind(shape: tuple[int, ...], quantization: Quantization) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[quantization.upper()]
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    # a row is packed in blocks, and must be made of whole ones
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def _packed(rows: NDArray[np.float32], kind: Any, name: str) -> NDArray[Any]:
    import gguf

    with np.errstate(over="ignore"):  # told below
        packed: NDArray[Any] = gguf.quantize(rows, kind)
    if packed.dtype == np.float16 and not np.isfinite(packed).all():
        raise UserError(f"gguf: {name} has numbers beyond 65,504, the largest of float16; use bf16 or f32")
    return packed


def _check(config: Any) -> list[str]:
    """Notices; refuses what would be another model on the other side."""
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotary.get("rope_type", "default")
    if kind != "default":
        raise UserError(f"gguf: rotary embeddings of type {kind} are not supported; only the default ones are")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UserError(f"gguf: the activation {config.hidden_act} is not supported; only silu is")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings and getattr(config, "use_sliding_window", True):
        return [f"gguf: the format says nothing of the sliding window of {window} tokens; longer texts differ"]
    return []


def _describe(writer: Any, config: Any, quantization: Quantization, name: str) -> None:
    import gguf

    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = getattr(config, "rope_parameters", None) or {}
    writer.add_type("model")
    writer.add_name(name)
    files = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[files[quantization]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rotary.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
