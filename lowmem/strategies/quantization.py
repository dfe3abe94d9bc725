"""Quantization: frozen base weights in 4 or 8 bits, through bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.libraries import import_bitsandbytes
from lowmem.loading import is_gguf
from lowmem.model import as_plain_linear, fused_experts, linears, parent_of
from lowmem.run import Run
from lowmem.strategy import Stage, Strategy, Trait

# Columns of activations with a value beyond it are multiplied in 16 bits (Dettmers et al. 2022, arXiv:2208.07339).
_OUTLIERS = 6.0


@dataclass
class Quantization(Strategy):
    """QLoRA's base (Dettmers et al. 2023, arXiv:2305.14314): the linear layers of the decoder in few bits, all frozen.

    Embeddings, norms and the head stay as they are. Weights on disk in safetensors are quantised while they are read,
    one at a time, or taken as they are where they lie quantised; a GGUF file, or a model handed over in memory, layer
    by layer.

    Attributes:
        format: nf4, fp4 or int8.
        double_quant: quantise the 4-bit blocks' constants, too (0.4 bits per weight less); not for int8.
        compute_dtype: dtype of the matrix products of 4-bit weights; int8 multiplies integers.
    """

    stage: ClassVar[Stage] = Stage.QUANTIZE
    slot: ClassVar[str | None] = "base_weights"
    exact: ClassVar[bool] = False
    saves: ClassVar[str] = "weights: 0.516 bytes each (nf4, double quantised) or 1 (int8) instead of 2"
    costs: ClassVar[str] = "a dequantised copy of one layer's weight at a time; rounded base weights"
    period = 1
    remedy: ClassVar[str] = "add lora, whose adapters are trained beside the frozen weights"

    format: Literal["nf4", "fp4", "int8"] = "nf4"
    double_quant: bool = True
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.format == "int8" and (not self.double_quant or self.compute_dtype != "bfloat16"):
            raise UserError("quantization: double_quant and compute_dtype have no effect with int8; leave them out")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.TRAINABLE})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.TRAINABLE, Trait.PLAIN_WEIGHTS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if config.model is None or is_gguf(config.model):
            # Quantised in memory: layer by layer from the host, so that the card never holds the whole 16-bit model.
            return replace(config, device=torch.device("cpu") if run.device.type == "cuda" else config.device)
        wanted = {**config.from_pretrained, "quantization_config": self._for_transformers()}
        return replace(config, from_pretrained=wanted, one_by_one=run.notice)

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad = False
        for name, module in linears(model).items():
            if (linear := as_plain_linear(module)) is not None:
                parent, attribute = parent_of(model, name)
                setattr(parent, attribute, self._quantised(linear, run.device))
        bnb = import_bitsandbytes()
        inside = linears(model).values()
        found = [m for m in inside if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
        if not found:
            kinds = ", ".join(sorted({type(m).__name__ for m in inside})) or "none at all"
            raise UserError(
                f"quantization: {type(model).__name__} has no linear layer that could be quantised (its layers: "
                f"{kinds}); drop quantization"
            )
        for module in found:
            # bitsandbytes would repack the weights for its CPU inference kernel at the first evaluation, with rounded
            # constants: training after an evaluation would go on with other weights.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            if hasattr(module, "init_8bit_state"):
                module.init_8bit_state = MethodType(_init_8bit_state, module)
                if module.weight.is_meta:  # without data nobody can say which columns are outliers
                    module.state.threshold = 0.0  # type: ignore[union-attr]
        self._report(model, run)
        # What was loaded on the host follows; a model that transformers has quantised in place refuses `to`.
        elsewhere = any(p.device.type != run.device.type for p in model.parameters())
        return model.to(run.device) if elsewhere else model

    def _quantised(self, linear: nn.Linear, device: torch.device) -> nn.Module:
        bnb = import_bitsandbytes()
        size = (linear.in_features, linear.out_features)
        with torch.device("meta"):  # no memory for weights that are replaced at once
            new: Any
            if self.format == "int8":
                bias = linear.bias is not None
                new = bnb.nn.Linear8bitLt(*size, bias=bias, has_fp16_weights=False, threshold=_OUTLIERS)
            else:
                new = bnb.nn.Linear4bit(
                    *size,
                    bias=linear.bias is not None,
                    compute_dtype=getattr(torch, self.compute_dtype),
                    compress_statistics=self.double_quant,
                    quant_type=self.format,
                )
        if self.format == "int8":
            new.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
            new.weight = new.weight._quantize(device)
        else:
            new.weight = bnb.nn.Params4bit(
                linear.weight.data,
                requires_grad=False,
                compress_statistics=self.double_quant,
                quant_type=self.format,
                module=new,
            )
            new.weight = new.weight._quantize(device)
        new.bias = linear.bias
        return new.train(linear.training)  # type: ignore[no-any-return]

    def _for_transformers(self) -> Any:
        from transformers import BitsAndBytesConfig

        import_bitsandbytes()  # before transformers does
        if self.format == "int8":
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=_OUTLIERS)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.format,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=self.compute_dtype,
        )

    def _report(self, model: nn.Module, run: Run) -> None:
        """Say so where a large part of the weights is out of reach (fused experts are no linear layers)."""
        if left := fused_experts(model):
            run.notice(f"quantization: {left:,} weights of fused experts are no linear layers and stay 16-bit")


def _init_8bit_state(linear: Any) -> None:
    """bitsandbytes' own, but a weight that has lost its scales does not take away the layer's, and its bytes are those
    that it has now.

    On a CPU, peft's DoRA renews the weight at every pass (peft 0.21, `dequantize_module_weight`), without its scales;
    since then the weight may have been moved (`streamed_weights`), which what it remembers as `CB` does not follow.
    """
    linear.state.CB = linear.weight.data
    if linear.weight.SCB is not None:
        linear.state.SCB = linear.weight.SCB
    linear.weight.CB = linear.weight.SCB = None
