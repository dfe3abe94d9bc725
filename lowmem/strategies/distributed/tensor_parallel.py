"""Tensor parallelism: a part of every layer on every card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.config import LoadConfig
from lowmem.errors import UserError
from lowmem.model import call, unwrapped
from lowmem.run import Run, device_kind
from lowmem.strategies.distributed.tensor_plan import STYLES, tensor_plan
from lowmem.strategy import Stage, Strategy, Trait

# What older modules of transformers count by; with a plan of transformers', it counts by what it is given.
_COUNTS = ("num_heads", "num_key_value_heads")


@dataclass
class TensorParallel(Strategy):
    """Linear layers in parts, by heads and by columns of the MLP (Shoeybi et al. 2019, arXiv:1909.08053), as DTensor.

    Which layers are cut, transformers' plan of the model says. Where it has none, the names of the layers do, and the
    logits of a few tokens must stay the same. Matrices of LoRA are cut with the layers that they stand beside.
    Embedding, norms and head are whole on every rank of a group, and all of them compute the same rows.

    Attributes:
        size: ranks that share a layer; null: all that were started. What is left shares the rows (`fsdp_2`).
    """

    stage: ClassVar[Stage] = Stage.KERNEL
    slot: ClassVar[str | None] = "tensor_parallel"
    saves: ClassVar[str] = "weights, gradients, states and insides of layers: every rank holds its part of them"
    costs: ClassVar[str] = "hidden states are sent twice per layer and pass, and gradients once per cut layer"
    period = 1
    remedy: ClassVar[str] = "drop it, or tensor_parallel"

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise UserError("tensor_parallel.size: counts from 1")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.STATIC_PARAMS, Trait.PLAIN_WEIGHTS})

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.SHARED})

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.ONE_PROCESS, Trait.DENSE_PARAMS, Trait.PURE_BLOCKS, Trait.WHOLE_LAYERS})

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        if run.world.size == 1:
            return config
        size = self.size or run.world.size
        run.world.claim("tensor", size, self.name)
        if size == 1:
            return config
        here = config.device if run.device.type == "meta" else "cpu"
        return replace(config, device=here, on_host=device_kind(run.device) == "cuda")

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        size = run.world.group_size("tensor")
        if size == 1:
            return model
        from lowmem.ops.cut import bring

        plan, given = tensor_plan(model, size)
        tried = not given and run.device.type != "meta"  # a prediction has no logits
        before = _few_logits(model) if tried else None
        _cut_all(model, plan, run)
        bring(model, run.device)
        if not given:
            _share_counts(model, plan, size)
        if before is not None:
            _require_same(model, before)
        return model


def _cut_all(model: nn.Module, plan: dict[str, str], run: Run) -> None:
    from lowmem.ops.cut import cut_linear, sum_gradients

    mesh, inner = run.world.mesh["tensor"], unwrapped(model)
    for kind in {str(config.peft_type.value) for config in getattr(model, "peft_config", {}).values()} - {"LORA"}:
        raise UserError(f"tensor_parallel: an adapter of {kind} does not know of layers in parts; use lora, or fsdp_2")
    for name, style in plan.items():
        module = inner.get_submodule(name)
        if style not in STYLES:
            for part in module.modules():  # peft's copy of it, too
                sum_gradients(part, mesh)
            continue
        side, whole_around = STYLES[style]
        for linear in _linears(name, module, side):
            cut_linear(linear, side, mesh, run.device, whole_around=whole_around)
        if side == "inputs" and not whole_around:
            _cut_dropout(module, mesh)


def _linears(name: str, module: Any, side: str) -> list[nn.Linear]:
    """The layer itself, and of LoRA the matrices on the side that is cut.

    Raises:
        UserError: something else stands in its place.
    """
    found = [module]
    if hasattr(module, "lora_variant"):  # peft's layer: what is not a variant is base(x) + B(A(x)) * scale
        for variant in module.lora_variant.values():
            raise UserError(
                f"tensor_parallel: {type(variant).__name__} of peft (on {name}) looks at whole weights; set use_dora: "
                "false, or use fsdp_2"
            )
        matrices = module.lora_B if side == "outputs" else module.lora_A
        found = [module.base_layer, *matrices.values()]
    for linear in found:
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
            raise UserError(
                f"tensor_parallel: {name} is a {type(linear).__name__}, and only plain linear layers can be cut; use "
                "fsdp_2"
            )
    return found


def _cut_dropout(module: Any, mesh: Any) -> None:
    from lowmem.ops.cut import DropoutOfPart

    dropouts = getattr(module, "lora_dropout", {})
    for adapter, dropout in dropouts.items():
        if p := getattr(dropout, "p", 0.0):
            dropouts[adapter] = DropoutOfPart(p, mesh).train(dropout.training)


# -- plans of our own -------------------------------------------------------------------------------------------------


def _share_counts(model: nn.Module, plan: dict[str, str], size: int) -> None:
    """Modules that say how many heads they have now have their share."""
    for parent in {name.rpartition(".")[0] for name in plan}:
        module: Any = unwrapped(model).get_submodule(parent)
        for key in _COUNTS:
            if isinstance(count := getattr(module, key, None), int) and count % size == 0:
                setattr(module, key, count // size)


@torch.no_grad()
def _few_logits(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device)[None]
    training = model.training
    model.eval()
    try:
        return call(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).float().cpu()
    finally:
        model.train(training)


def _require_same(model: nn.Module, before: Tensor) -> None:
    """A plan that nobody has tried is tried on a few tokens.

    Raises:
        UserError: the logits are others.
    """
    try:
        after = _few_logits(model)
        tolerance = 32 * torch.finfo(next(model.parameters()).dtype).eps * float(before.abs().max())
        what = f"its logits differ by {float((after - before).abs().max()):.2g}"
        good = float((after - before).abs().max()) <= tolerance
    except (RuntimeError, TypeError) as error:
        good, what = False, " ".join(str(error).split())[:200]
    if not good:
        raise UserError(
            f"tensor_parallel: transformers has no plan for {type(unwrapped(model)).__name__}, and cut by the names of "
            f"its layers it does not compute the same ({what}); use fsdp_2"
        )
