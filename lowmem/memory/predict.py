"""What a recipe will need, before a weight is loaded: its own training step, run on the meta device and recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowmem.config import DataConfig, TrainingConfig
from lowmem.memory.allocator import CachingAllocator, replay
from lowmem.memory.meta import Device, on_meta
from lowmem.memory.trace import Storage, Trace
from lowmem.recipe import Recipe
from lowmem.strategy import Strategy

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Prediction:
    """Bytes a run will need.

    Attributes:
        peak_allocated_bytes: the most that is handed out at once, in the allocator's rounded sizes.
        peak_reserved_bytes: the most that the allocator takes from the card.
        phase: when the peak comes (`forward`, `backward`, `step` ...), and `operation`: what reaches it.
        ledger: category -> bytes at the peak.
        phases: phase -> its own peak of allocated bytes.
        holders: the largest groups of tensors at the peak: (bytes, count, what).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phase: str
    operation: str
    ledger: dict[str, int]
    phases: dict[str, int]
    holders: list[tuple[int, int, str]] = field(default_factory=list)


def meta_model(recipe: Recipe) -> nn.Module:
    """The recipe's model without data, in the dtype it would be loaded in."""
    from transformers import AutoModelForCausalLM

    from lowmem.model import load_model_config

    config = load_model_config(recipe.model)
    dtype = recipe.model.dtype if recipe.model.dtype != "auto" else (getattr(config, "dtype", None) or "float32")
    options = {"attn_implementation": recipe.model.attn_implementation} if recipe.model.attn_implementation else {}
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, **options
        )
    return model


def record(
    model: nn.Module, training: TrainingConfig, strategies: list[Strategy], device: Device, seq_length: int, rows: int
) -> Trace:
    """Two optimizer steps of `rows` rows of `seq_length` tokens, on the meta device."""
    from lowmem.trainer import Trainer

    data = [{"input_ids": torch.ones(seq_length, dtype=torch.int32).numpy()} for _ in range(rows)]
    numbers = replace(
        training,
        batch_size=rows,
        max_steps=2,
        max_length=seq_length,
        output_dir=None,
        eval_steps=None,
        save_steps=None,
        save_total_limit=None,
        metric_for_best_model=None,
        load_best_model_at_end=False,
    )
    with on_meta(device), Trace(device) as trace:
        _see_weights(trace, model)
        trainer = Trainer(model, data, training=numbers, strategies=strategies, data=DataConfig())
        _see_weights(trace, trainer.model)
        _label(trace, trainer)
        trainer.train()
        _label(trace, trainer)
    return trace


def _see_weights(trace: Trace, model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        trace.see(tensor)


def _label(trace: Trace, trainer: Any) -> None:
    from lowmem.memory.meter import _categories

    for label, tensors in _categories(trainer):
        for tensor in tensors:
            trace.see(tensor, label)
    if trainer.run.global_step:
        return

    def gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            trace.see(parameter.grad, "gradients")

    for parameter in trainer.run.trainable.values():
        parameter.register_post_accumulate_grad_hook(gradient)
    for name, phase in (("forward_backward", "forward"), ("step", "step")):
        setattr(trainer, name, _phased(trace, phase, getattr(trainer, name)))


def _phased(trace: Trace, phase: str, part: Any) -> Any:
    def phased(*args: Any) -> Any:
        with trace.during(phase):
            return part(*args)

    return phased


def judge(trace: Trace, expandable: bool, capacity: int | None = None, vocabulary: int = 0) -> Prediction:
    """What a trace means for a card."""
    allocator = replay(trace.events, CachingAllocator(capacity, expandable))
    _peak, index = trace.peak()
    number = trace.events[index][0]
    born = trace.storages[number]
    ledger: Counter[str] = Counter()
    for storage in trace.live_at(index):
        ledger[_category(storage, vocabulary)] += storage.size
    phases: dict[str, int] = {}
    live, now = 0, "load"
    for number, size in trace.events:
        live += size
        if size > 0:
            now = trace.storages[number].phase
        phases[now] = max(phases.get(now, 0), live)
    return Prediction(
        allocator.peak_allocated,
        allocator.peak_reserved,
        born.phase,
        born.op,
        dict(ledger.most_common()),
        phases,
        trace.holders(index)[:15],
    )


def _category(storage: Storage, vocabulary: int) -> str:
    if storage.label:
        return storage.label
    if vocabulary and vocabulary in storage.shape[-1:]:
        return "loss"
    return "activations" if storage.phase == "forward" else "temporaries"


def predict(
    recipe: Recipe, device: Device = "cuda", seq_length: int | None = None, expandable: bool = True
) -> Prediction:
    """What a recipe will need on a card.

    Args:
        recipe: its data are not read; rows are taken to be `seq_length` tokens long.
        device: the kind of device it will run on.
        seq_length: tokens per row; by default `training.max_length`.
        expandable: whether the allocator uses expandable segments.
    """
    model = meta_model(recipe)
    length = seq_length or recipe.training.max_length
    trace = record(model, recipe.training, recipe.strategies, device, length, recipe.training.batch_size)
    return judge(trace, expandable, vocabulary=int(getattr(model.config, "vocab_size", 0)))  # type: ignore[union-attr,arg-type]
