"""Checks and measures on one CUDA card what lowmem says about a GPU: results, bytes, time; within some minutes.

    python benchmarks/gpu_suite.py                           # the card, at most 8 minutes
    python benchmarks/gpu_suite.py --list                    # the checks and their time allowances
    python benchmarks/gpu_suite.py --only ladder,resume      # some of them (names, or beginnings of names)
    python benchmarks/gpu_suite.py --device cpu --tiny       # no GPU: runs the code paths, measures no bytes

Everything is made here: models are random, built from configs (no weights, no network), and rows are random token ids.
Each check starts from an emptied allocator with its peaks reset. No check starts whose allowance does not fit into what
is left of the budget, and those left out are named: the order is that of value, and all of them take longer than 8
minutes. `long_longest` takes about as long by itself (--only long_longest --minutes 9): attention grows with the square
of a row. A check that fails does not stop the others.

Writes benchmarks/results/gpu_suite-<card>.json after every check (on a CPU only where --out is given). Exit status:
0 all that ran has passed, 1 a check has failed, 2 nothing could run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path[:0] = [str(HERE.parent)]  # the checkout, whatever is installed

NO_NETWORK = """\
On a machine without package registries, bring what is missing as wheels (download them elsewhere for that machine's
Python and CPU, then install with pip's --no-index). A machine made for CUDA usually has torch, transformers and
safetensors, and often peft; those to bring are mostly bitsandbytes (its wheel holds CUDA code and is large), datasets,
pydantic with pydantic-core, annotated-types and typing-inspection, and ruamel.yaml. TRL is not needed.
Compile and flex_attention need triton and a C compiler. What is missing is printed at the start, and checks that need
it are reported as not run. lowmem itself is taken from the checkout and need not be installed.
"""
MODULES = ("numpy", "transformers", "safetensors", "pydantic", "ruamel.yaml")  # lowmem.Trainer imports them
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "triton", "numpy", "safetensors")
GIB = 1024**3


# -- what a check is --------------------------------------------------------------------------------------------------


class NotRunError(Exception):
    """A check, or the rest of it, makes no sense on this machine; the text says why."""


class OverTimeError(Exception):
    """The budget ended while a check was running."""


@dataclass
class Report:
    """What a check leaves: facts, bytes and tables; they stay when it fails half-way."""

    facts: dict[str, Any] = field(default_factory=dict)
    bytes: dict[str, int | None] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Size:
    """How large the models are.

    Attributes:
        small: for correctness.
        medium: for bytes that stand out against temporaries.
        solar: the shape of SOLAR 10.7B, without the number of layers.
        length, batch: tokens and rows of a step of the medium model.
        solar_length, solar_batch: the same for SOLAR's shape.
        solar_layers: of the ladder; null: as many as fit, 8 at most.
        whole_layers: of the whole SOLAR.
        inductor: whether Compile uses it; else `eager`, which only traces.
        few_layers: of SOLAR's shape, for fused kernels.
        shrink: lengths of long rows are divided by it.
    """

    small: dict[str, Any]
    medium: dict[str, Any]
    solar: dict[str, Any]
    length: int
    batch: int
    solar_length: int
    solar_batch: int
    solar_layers: int | None
    whole_layers: int
    inductor: bool
    few_layers: int
    shrink: int


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


WIDE = {"initializer_range": 0.1}  # wide enough for attention to matter in a small model
FULL = Size(
    small={**llama(64, 128, 4, 4, 2, 512), **WIDE},
    medium=llama(1024, 2816, 8, 16, 4, 32000),
    solar=llama(4096, 14336, 0, 32, 8, 32000),
    length=512,
    batch=4,
    solar_length=1024,
    solar_batch=2,
    solar_layers=None,
    whole_layers=48,
    inductor=True,
    few_layers=4,
    shrink=1,
)
TINY = Size(
    small={**llama(64, 128, 2, 4, 2, 128), **WIDE},
    medium=llama(64, 128, 3, 4, 2, 512),
    solar=llama(64, 128, 0, 4, 2, 512),
    length=32,
    batch=2,
    solar_length=32,
    solar_batch=2,
    solar_layers=2,
    whole_layers=3,
    inductor=False,
    few_layers=2,
    shrink=128,
)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        run: raises where something is wrong; `NotRunError` where it makes no sense here.
        seconds: allowance; a check starts only if so much of the budget is left.
        needs: modules without which it is not run.
    """

    name: str
    run: Callable[[Report, Size], None]
    seconds: int
    needs: tuple[str, ...] = ()


def require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


# -- models, rows, runs -----------------------------------------------------------------------------------------------


def on_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def device_name() -> str:
    return "cuda" if on_cuda() else "cpu"


def need_cuda() -> None:
    if not on_cuda():
        raise NotRunError("no CUDA")


def fresh() -> None:
    """As if nothing had run: garbage gone, allocator emptied, peaks reset, compiled code forgotten."""
    import torch

    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    gc.collect()
    if on_cuda():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sync() -> None:
    import torch

    if on_cuda():
        torch.cuda.synchronize()


def make_model(shape: dict[str, Any], dtype: str = "float32", *, attention: str | None = None, seed: int = 0) -> Any:
    """A random Llama, made on the CPU: the same on every device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    options = {"attn_implementation": attention} if attention else {}
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.float32, **options).to(
        getattr(torch, dtype)
    )


def make_on_device(shape: dict[str, Any], dtype: str, seed: int = 0) -> Any:
    """A random Llama, made where it computes: large ones take seconds there instead of minutes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    with torch.device(device_name()):
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=getattr(torch, dtype))


def make_rows(
    number: int, vocabulary: int, length: int | tuple[int, int] = (8, 60), seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of token ids; those of uneven length have a masked prompt and loss weights that float32 holds exactly."""
    import numpy as np

    draw, rows = np.random.default_rng(seed), []
    for _ in range(number):
        size = length if isinstance(length, int) else int(draw.integers(*length, endpoint=True))
        ids = draw.integers(0, vocabulary, size).astype(np.int32)
        row: dict[str, Any] = {"input_ids": ids, "labels": ids.copy()}
        if not isinstance(length, int):
            row["labels"][: int(draw.integers(1, 5))] = -100
            row["loss_weights"] = (draw.integers(1, 9, size) / 4).astype(np.float32)
        rows.append(row)
    return rows


@dataclass
class Fitted:
    """A finished run. Peaks are those of training alone, and null without CUDA."""

    trainer: Any
    steps: list[dict[str, Any]]
    step_seconds: list[float]
    peak_allocated: int | None
    peak_reserved: int | None
    start_allocated: int | None

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def above_start(self) -> int | None:
        """Peak above what was allocated (weights) when training began."""
        return (
            None
            if self.peak_allocated is None or self.start_allocated is None
            else self.peak_allocated - self.start_allocated
        )

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().clone() for name, p in self.trainer.run.trainable.items()}


def fit(
    model: Any,
    rows: list[dict[str, Any]],
    strategies: Sequence[Any] = (),
    *,
    observers: Sequence[Any] = (),
    resume_from: Any = None,
    **numbers: Any,
) -> Fitted:
    """A run of lowmem's Trainer on the device, with the time of every step and the peaks of the allocator."""
    import torch

    from lowmem import Trainer, TrainingConfig

    given = {"batch_size": 4, "max_steps": 3, "learning_rate": 1e-3, "max_grad_norm": None, "shuffle": False, **numbers}
    steps: list[dict[str, Any]] = []
    seconds: list[float] = []
    last = [0.0, 0]

    def watch(event: Any) -> None:
        if event.kind == "begin":
            fresh_peaks()
            last[1] = torch.cuda.memory_allocated() if on_cuda() else 0
        elif event.kind == "step":
            sync()
            steps.append(dict(event.metrics))
            seconds.append(time.perf_counter() - last[0])
        last[0] = time.perf_counter()

    trainer = Trainer(
        model, rows, training=TrainingConfig(**given), strategies=strategies, observers=[watch, *observers]
    )
    trainer.train(resume_from=resume_from)
    if not on_cuda():
        return Fitted(trainer, steps, seconds, None, None, None)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Fitted(trainer, steps, seconds, *peaks, int(last[1]))


def fresh_peaks() -> None:
    """Peaks from here on; what building the run has left in the allocator's cache is given back."""
    import torch

    if on_cuda():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def norm(tensors: dict[str, Any]) -> float:
    import torch

    return float(torch.stack([t.double().norm() for t in tensors.values()]).norm())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference of two equally long lists."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def fell(losses: Sequence[float], share: float) -> None:
    """The loss on a few rows shown again and again must fall by this share."""
    require(all(map(math.isfinite, losses)), f"a loss is not finite: {losses}")
    require(losses[-1] < (1 - share) * losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f} only")


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits every time; an operation that has none is an error.

    Not `warn_only`: attention kernels would then stay as they are.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def table(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mib(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**20:,.1f}"


# -- 1: exact strategies ----------------------------------------------------------------------------------------------

STEPS, BATCH = 3, 4  # ten rows: batches of 4, 4 and 2


def plain_loop(model: Any, rows: list[dict[str, Any]], rate: float, eps: float, max_norm: float | None) -> list[float]:
    """Fine-tuning written out in plain torch: what every exact strategy must equal. Trains in place."""
    import torch
    import torch.nn.functional as F

    device = torch.device(device_name())
    parameters = list(model.to(device).train().parameters())
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.01}]
    groups += [{"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, eps=eps, foreach=False, fused=False)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate * (STEPS - step) / STEPS
        batch = rows[step * BATCH : (step + 1) * BATCH]
        length = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        weights = torch.zeros(len(batch), length, dtype=torch.float64)
        for i, row in enumerate(batch):
            n = len(row["input_ids"])
            ids[i, :n], mask[i, :n] = torch.as_tensor(row["input_ids"]), 1
            labels[i, :n], weights[i, :n] = torch.as_tensor(row["labels"]), torch.as_tensor(row["loss_weights"])
        ids, mask, labels, weights = (t.to(device) for t in (ids, mask, labels, weights))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        targets = labels[:, 1:]
        weights = weights[:, 1:] * (targets != -100)
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
        loss = (each * weights.to(each.dtype)).sum() / weights.sum().to(each.dtype)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            total = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
            for p in parameters:
                p.grad.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
        optimizer.step()
        losses.append(loss.item())
    return losses


def exact_rows() -> dict[str, tuple[Callable[[], list[Any]], float | None]]:
    """Name -> the strategies, and max_grad_norm."""
    import lowmem as lm

    return {
        "no strategy": (list, None),
        "accumulation, 1 row": (lambda: [lm.GradientAccumulation()], None),
        "accumulation, 3 steps": (lambda: [lm.GradientAccumulation(steps=3)], None),
        "checkpointing": (lambda: [lm.GradientCheckpointing()], None),
        "checkpointing, every 2nd": (lambda: [lm.GradientCheckpointing(every_n_layers=2)], None),
        "chunked loss": (lambda: [lm.ChunkedCrossEntropy(chunk_size=16)], None),
        "packing": (lambda: [lm.Packing()], None),
        "EMA": (lambda: [lm.EMA(decay=0.9)], None),
        "optimizer in backward": (lambda: [lm.OptimizerInBackward()], None),
        "clipping": (list, 0.5),
        "compile, eager": (lambda: [lm.Compile(backend="eager")], None),  # inductor: the check `compile`
        "all that go together": (
            lambda: [
                lm.ChunkedCrossEntropy(chunk_size=16),
                lm.GradientCheckpointing(),
                lm.EMA(decay=0.9),
                lm.GradientAccumulation(steps=2),
                lm.Packing(),
            ],
            0.5,
        ),
    }


def exact(report: Report, size: Size, dtype: str) -> None:
    """Weights after 3 steps against the written-out loop; the error is measured against the way the weights went.

    In float32 AdamW gets eps = 1: its update is then proportional to the gradient, so that rounding noise in entries
    near zero is not blown up to whole steps (in two right loops alike). In float64 the usual eps is used.
    """
    import lowmem as lm
    from lowmem.strategies import STRATEGIES

    wide = dtype == "float64"
    tolerance, eps = (1e-9, 1e-8) if wide else (1e-5, 1.0)
    rows = make_rows(10, size.small["vocab_size"])
    shown = {s.name for make, _ in exact_rows().values() for s in make()} | {"adamw", "gradient_clipping"}
    missing = {name for name, cls in STRATEGIES.items() if cls.exact} - shown
    references: dict[Any, Any] = {}
    lines: list[list[object]] = []
    failed: list[str] = []
    for name, (make, max_norm) in exact_rows().items():
        rate = 1e-3 if wide else 2.0 if max_norm is None else 8.0
        if max_norm not in references:
            model = make_model(size.small, dtype)
            before = {n: p.detach().clone().to(device_name()) for n, p in model.named_parameters()}
            losses = plain_loop(model, rows, rate, eps, max_norm)
            after = dict(model.named_parameters())
            way = {n: after[n].detach() - before[n] for n in after}
            references[max_norm] = (losses, after, norm(way), norm(way) / norm(before))
        losses, expected, way, moved = references[max_norm]
        try:
            numbers = {"learning_rate": rate, "weight_decay": 0.01, "max_grad_norm": max_norm, "max_length": 64}
            got = fit(make_model(size.small, dtype), rows, [*make(), lm.AdamW(eps=eps)], **numbers)
            error = norm({n: w - expected[n].detach() for n, w in got.weights().items()}) / way
            loss_error = relative(got.losses, losses)
            report.facts[name] = {"error": error, "loss_error": loss_error, "moved": moved}
            good = error <= tolerance and loss_error <= tolerance
            lines.append([name, f"{error:.1e}", f"{loss_error:.1e}", "yes" if good else "NO"])
        except OverTimeError:
            raise
        except Exception as problem:  # the others are tried all the same
            good = False
            report.facts[name] = {"problem": f"{type(problem).__name__}: {problem}"}
            lines.append([name, "", "", f"NO: {type(problem).__name__}"])
        failed += [] if good else [name]
    report.facts["tolerance"] = tolerance
    report.tables.append(table([f"{dtype}, tolerance {tolerance:g}", "weights", "losses", "equal"], lines))
    require(not missing, f"no row here for the exact strategies {sorted(missing)}")
    require(not failed, f"not equal to the plain loop: {', '.join(failed)}")


def exact_fp32(report: Report, size: Size) -> None:
    """Every exact strategy equals the written-out loop in float32, with TF32 off."""
    import torch

    torch.set_float32_matmul_precision("highest")
    exact(report, size, "float32")


def exact_fp64(report: Report, size: Size) -> None:
    """The same in float64, where an error cannot hide in rounding."""
    exact(report, size, "float64")


# -- 2: mixed precision -----------------------------------------------------------------------------------------------


def mixed_precision(report: Report, size: Size) -> None:
    """bfloat16 and float16 autocast: losses near those of float32, and falling."""
    import lowmem as lm

    rows = make_rows(4, size.small["vocab_size"])
    numbers = {"max_steps": 12, "max_grad_norm": 1.0}
    plain = fit(make_model(size.small), rows, **numbers)
    for dtype, bound in (("bfloat16", 0.03), ("float16", 0.015)):
        got = fit(make_model(size.small), rows, [lm.MixedPrecision(dtype=dtype)], **numbers)
        off = relative(got.losses[:8], plain.losses[:8])
        report.facts[dtype] = {
            "loss_first": got.losses[0],
            "loss_last": got.losses[-1],
            "off_float32": off,
            "bound": bound,
        }
        fell(got.losses, 0.1)
        require(off <= bound, f"{dtype}: losses are off by {off:.4f}, more than {bound}")


def fp16_overflow(report: Report, size: Size) -> None:
    """A loss scale that overflows: the step is skipped, weights and schedule stay, the scale is halved."""
    import torch

    import lowmem as lm

    scale = 2.0**40
    seen: list[tuple[bool, float, bool]] = []
    before: dict[str, Any] = {}

    def watch(event: Any) -> None:
        if event.kind == "begin":
            before.update({n: p.detach().clone() for n, p in event.trainer.run.trainable.items()})
        if event.kind == "step":
            moved = any(not torch.equal(before[n], p) for n, p in event.trainer.run.trainable.items())
            seen.append((event.metrics["skipped"], event.metrics["loss_scale"], moved))

    rows = make_rows(4, size.small["vocab_size"])
    strategy = lm.MixedPrecision(dtype="float16", initial_scale=scale)
    numbers = {"max_steps": 40, "max_grad_norm": 1.0}
    got = fit(make_model(size.small), rows, [strategy, lm.EMA()], observers=[watch], **numbers)
    skipped = sum(was for was, _, _ in seen)
    report.facts |= {"skipped": skipped, "scale_first": scale, "scale_last": seen[-1][1], "losses": got.losses[::8]}
    require(seen[0][0], "a scale of 2^40 did not overflow: the check is void")
    require(skipped < len(seen), "no step was ever taken")
    first = next(i for i, (was, _, _) in enumerate(seen) if not was)
    require(not any(moved for _, _, moved in seen[:first]), "a skipped step has moved a weight")
    require(seen[first][2], "the first step that was taken has moved no weight")
    require(seen[first - 1][1] == scale / 2**first, "the scale was not halved at every skip")
    require(got.trainer.scheduler.last_epoch == len(seen) - skipped, "a skipped step has advanced the schedule")


# -- 3: quantised weights ---------------------------------------------------------------------------------------------


def quantized_lora(report: Report, size: Size) -> None:
    """NF4, FP4 and int8 with LoRA: losses near LoRA's on the same weights unquantised, and falling; the base stays."""
    import torch

    import lowmem as lm
    from lowmem.memory.rule_of_thumb import stored_bytes

    rows = make_rows(4, size.small["vocab_size"])
    numbers = {"max_steps": 12, "learning_rate": 1e-2, "max_grad_norm": 1.0}
    plain = fit(make_model(size.small, "bfloat16"), rows, [lm.LoRA(), lm.MixedPrecision()], **numbers)
    report.bytes["weights bfloat16 + LoRA"] = stored_bytes(plain.trainer.model)
    for name, bound in (("nf4", 0.06), ("fp4", 0.12), ("int8", 0.06)):
        base: dict[str, Any] = {}

        def keep(event: Any, base: dict[str, Any] = base) -> None:
            if event.kind == "begin":
                base.update(
                    {n: p.detach().clone() for n, p in event.trainer.model.named_parameters() if not p.requires_grad}
                )

        strategies = [lm.Quantization(format=name), lm.LoRA(), lm.MixedPrecision()]
        got = fit(make_model(size.small, "bfloat16"), rows, strategies, observers=[keep], **numbers)
        after = dict(got.trainer.model.named_parameters())
        off = relative(got.losses[:4], plain.losses[:4])
        report.facts[name] = {"loss_first": got.losses[0], "loss_last": got.losses[-1], "off_lora": off, "bound": bound}
        report.bytes[f"weights {name} + LoRA"] = stored_bytes(got.trainer.model)
        few = [n for n, p in base.items() if p.dtype in (torch.uint8, torch.int8)]
        require(bool(few), f"{name}: no weight is stored in few bits")
        require(all(torch.equal(base[n], after[n]) for n in base), f"{name}: a frozen weight has changed")
        fell(got.losses, 0.1)
        require(off <= bound, f"{name}: losses are off by {off:.4f}, more than {bound}")


def nf4_parity(report: Report, size: Size) -> None:
    """The same matrix in NF4 on CPU and card.

    Packed once and dequantised on both, it must be equal to the last bit of bfloat16 (tolerance 1e-6 in float32).
    Packed on each, values may fall on the other side of a tie: at most 1 in 10,000.
    """
    import torch

    from lowmem.libraries import import_bitsandbytes

    need_cuda()
    functional = import_bitsandbytes().functional
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024) * 0.02
    for dtype in (torch.float32, torch.bfloat16):
        for double in (False, True):
            source = weight.to(dtype)
            options = {"blocksize": 64, "compress_statistics": double, "quant_type": "nf4"}
            packed, state = functional.quantize_4bit(source.clone(), **options)
            here = functional.dequantize_4bit(packed, state).float()
            on_card, card_state = functional.quantize_4bit(source.cuda(), **options)
            own = functional.dequantize_4bit(on_card, card_state).float().cpu()
            state.to("cuda")
            there = functional.dequantize_4bit(packed.cuda(), state).float().cpu()
            size_of = float(here.abs().max())
            name = f"{str(dtype).removeprefix('torch.')}{', double quantised' if double else ''}"
            same_codes = float((here - there).abs().max()) / size_of
            other = float(((here - own).abs() > 0.01 * size_of).float().mean())
            report.facts[name] = {"same_codes_error": same_codes, "other_side_of_a_tie": other}
            bound = 1e-6 if dtype is torch.float32 else 2**-8
            require(same_codes <= bound, f"{name}: dequantised weights differ by {same_codes:.1e} of the largest")
            require(other <= 1e-4, f"{name}: {other:.1e} of the values got another code")


# -- 4: 8-bit Adam ----------------------------------------------------------------------------------------------------


def is_managed(pointer: int) -> bool | None:
    """Whether the CUDA driver says that an address is managed memory; null where it cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    answer = ctypes.c_uint(0)
    managed_attribute = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED
    failed = driver.cuPointerGetAttribute(ctypes.byref(answer), managed_attribute, ctypes.c_void_p(pointer))
    return None if failed else bool(answer.value)


def adamw_8bit(report: Report, size: Size) -> None:
    """8-bit moments take a quarter or so of the bytes, and the losses stay near AdamW's."""
    import torch

    import lowmem as lm

    rows = make_rows(4, size.small["vocab_size"])
    shape = {**size.small, "hidden_size": 256, "intermediate_size": 512}
    runs = {}
    for name, strategy in (("AdamW", lm.AdamW()), ("AdamW8bit", lm.AdamW8bit())):
        runs[name] = got = fit(make_model(shape), rows, [strategy], max_steps=8, learning_rate=3e-4, max_grad_norm=1.0)
        states = (got.trainer.optimizer.state[p] for p in got.trainer.run.trainable.values())
        report.bytes[f"moments {name}"] = sum(
            {
                t.untyped_storage().data_ptr(): t.nbytes
                for s in states
                for t in s.values()
                if isinstance(t, torch.Tensor)
            }.values()
        )
    off = relative(runs["AdamW8bit"].losses, runs["AdamW"].losses)
    report.facts |= {"off_adamw": off, "bound": 0.05, "losses": runs["AdamW8bit"].losses}
    fell(runs["AdamW8bit"].losses, 0.05)
    require(off <= 0.05, f"losses are off by {off:.4f}")
    require(report.bytes["moments AdamW8bit"] < 0.5 * report.bytes["moments AdamW"], "the moments are not smaller")


def paged(report: Report, size: Size) -> None:
    """Paged moments lie in managed memory, and a resumed run has them, and everything after, bit for bit."""
    import torch

    import lowmem as lm

    shape = {**size.small, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    rows = make_rows(10, shape["vocab_size"])

    def strategies() -> list[Any]:
        return [lm.AdamW8bit(paged=True)]

    interrupted(report, lambda: make_model(shape), rows, strategies, max_grad_norm=1.0)
    got = fit(make_model(shape), rows, strategies())
    moments = [got.trainer.optimizer.state[p]["state1"] for p in got.trainer.run.trainable.values()]
    large = [m for m in moments if m.numel() >= 100_000]  # bitsandbytes pages no smaller ones
    marked = sum(bool(getattr(m, "is_paged", False)) for m in large)
    report.facts |= {"large_moments": len(large), "marked_paged": marked}
    need_cuda()
    managed = [is_managed(m.data_ptr()) for m in large]
    report.facts["managed_by_the_driver"] = None if None in managed else sum(map(bool, managed))
    report.bytes["paged moments"] = sum(2 * m.nbytes for m in large)
    require(bool(large), "no moment is large enough to be paged: the check is void")
    require(marked == len(large), f"only {marked} of {len(large)} large moments are paged tensors")
    require(False not in managed, "the driver says that a paged moment is not managed memory")
    require(all(isinstance(m, torch.Tensor) for m in moments), "a moment is no tensor")


# -- 5: pure bfloat16, optimizer in backward --------------------------------------------------------------------------


def pure_bf16(report: Report, size: Size) -> None:
    """Stochastic rounding is unbiased on the device; training in bfloat16 stays near float32."""
    import torch

    import lowmem as lm
    from lowmem.ops.rounding import stochastic_round

    number, low, high = 1_000_000, 1.0, 1.0078125  # neighbours in bfloat16
    value = low + 0.3 * (high - low)
    rounded = stochastic_round(torch.full((number,), value, device=device_name())).float()
    up = float((rounded == high).double().mean())
    deviation = abs(up - 0.3) / math.sqrt(0.3 * 0.7 / number)
    report.facts |= {"share_rounded_up": up, "expected_share": 0.3, "standard_deviations_off": deviation}
    require(bool(((rounded == low) | (rounded == high)).all()), "a value was rounded to no neighbour")
    require(deviation < 5, f"stochastic rounding is biased: {up:.4f} went up instead of 0.3")

    rows, numbers = make_rows(4, size.small["vocab_size"]), {"max_steps": 12, "max_grad_norm": 1.0}
    plain = fit(make_model(size.small), rows, **numbers)
    got = fit(make_model(size.small), rows, [lm.PureBF16()], **numbers)
    off = relative(got.losses[:8], plain.losses[:8])
    dtypes = {str(p.dtype) for p in got.trainer.model.parameters()}
    report.facts |= {"loss_first": got.losses[0], "loss_last": got.losses[-1], "off_float32": off, "bound": 0.04}
    require(dtypes == {"torch.bfloat16"}, f"weights have the dtypes {dtypes}")
    fell(got.losses, 0.1)
    require(off <= 0.04, f"losses are off by {off:.4f}")


def in_backward_bytes(report: Report, size: Size) -> None:
    """Optimizer in backward: the peak falls by most of the gradients' bytes."""
    import lowmem as lm

    shape = {**size.medium, "vocab_size": min(2048, size.medium["vocab_size"])}
    rows = make_rows(3, shape["vocab_size"], 16)
    peaks = {}
    for name, strategies in (("plain", []), ("in backward", [lm.OptimizerInBackward()])):
        fresh()
        got = fit(make_model(shape), rows, strategies, batch_size=1)
        peaks[name] = got.peak_allocated
        report.facts[f"losses {name}"] = got.losses
        gradients = sum(p.nbytes for p in got.trainer.run.trainable.values())
        del got
    require(relative(*(report.facts[f"losses {name}"] for name in peaks)) < 1e-3, "the two do not train alike")
    report.bytes |= {f"peak allocated, {name}": peak for name, peak in peaks.items()} | {"all gradients": gradients}
    need_cuda()
    saved = peaks["plain"] - peaks["in backward"]
    report.bytes["saved"] = saved
    require(saved >= 0.5 * gradients, f"the peak fell by {mib(saved)} MiB; the gradients are {mib(gradients)} MiB")


# -- 6: packing -------------------------------------------------------------------------------------------------------


def isolation(report: Report, size: Size, attention: str, dtype: str) -> None:
    """Loss and gradient of a sample behind two different neighbours, and alone in its row."""
    import torch

    from lowmem.batches import collate
    from lowmem.loss import next_token_cross_entropy
    from lowmem.strategies.packing import join

    model = make_model(size.small, dtype, attention=attention).to(device_name()).train()
    probe, *others = make_rows(3, size.small["vocab_size"], 60, seed=1)
    for other in others:
        other["labels"] = other["labels"] * 0 - 100

    def gradient(sample: Any) -> tuple[float, dict[str, Any]]:
        model.zero_grad()
        inputs = {k: v.to(device_name()) for k, v in collate([sample]).items()}
        loss = next_token_cross_entropy(model, inputs)
        loss.backward()
        # the embeddings of the neighbours' tokens get no gradient, but padding and order of sums may differ
        return float(loss.detach()), {
            n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None
        }

    behind = [gradient(join([other, probe])) for other in others]
    alone = gradient(join([probe]))
    narrow = dtype != "float32"
    for name, (a, b), bound in (
        ("two neighbours", behind, 1e-3 if narrow else 1e-6),
        ("neighbour or alone", (behind[0], alone), 2e-2 if narrow else 1e-5),
    ):
        loss_error = abs(a[0] - b[0]) / abs(b[0])
        error = norm({n: a[1][n] - b[1][n] for n in b[1]}) / norm(b[1])
        report.facts[f"{attention}, {dtype}, {name}"] = {"loss": loss_error, "gradient": error, "bound": bound}
        require(
            max(loss_error, error) <= bound,
            f"{attention}, {dtype}, {name}: loss {loss_error:.1e}, gradient {error:.1e}",
        )
    require(all(bool(torch.isfinite(g).all()) for g in alone[1].values()), "a gradient is not finite")


def packing_sdpa(report: Report, size: Size) -> None:
    """Packed samples do not see each other with sdpa, in float32 and bfloat16."""
    isolation(report, size, "sdpa", "float32")
    isolation(report, size, "sdpa", "bfloat16")


def packing_flex(report: Report, size: Size) -> None:
    """The same with flex_attention, where it works; where it does not, the reason is kept and nothing has failed."""
    import lowmem as lm

    need_cuda()  # torch has no backward pass of it on a CPU
    try:
        isolation(report, size, "flex_attention", "float32")
        rows = make_rows(8, size.small["vocab_size"])
        packed = fit(make_model(size.small, attention="flex_attention"), rows, [lm.Packing()], max_length=128)
        plain = fit(make_model(size.small), rows, max_length=128)
    except (AssertionError, OverTimeError):
        raise
    except Exception as problem:
        raise NotRunError(
            f"flex_attention does not work here: {type(problem).__name__}: {first_line(problem)}"
        ) from problem
    report.facts["losses_off_unpacked"] = off = relative(packed.losses, plain.losses)
    require(off <= 1e-4, f"losses of packed rows under flex_attention are off by {off:.1e}")


# -- 7: bytes of the chunked loss and of checkpointing ----------------------------------------------------------------


def peaks_of(report: Report, size: Size, cases: dict[str, list[Any]]) -> dict[str, int | None]:
    """Peak above the weights for each list of strategies, on the medium model with LoRA in bfloat16."""
    import lowmem as lm

    rows = make_rows(size.batch * 3, size.medium["vocab_size"], size.length)
    losses, found = {}, {}
    for name, strategies in cases.items():
        fresh()
        model = make_model(size.medium, "bfloat16")
        numbers = {"batch_size": size.batch, "max_length": size.length}
        got = fit(model, rows, [lm.LoRA(r=8), lm.MixedPrecision(), *strategies], **numbers)
        losses[name], found[name] = got.losses, got.above_start
        report.bytes |= {f"peak allocated, {name}": got.peak_allocated, f"peak above weights, {name}": got.above_start}
        report.facts[f"step seconds, {name}"] = statistics.median(got.step_seconds[1:])
        del got, model
    a, b = losses.values()
    report.facts["losses_differ_by"] = relative(a, b)
    require(relative(a, b) < 0.01, f"the losses differ by {relative(a, b):.4f}")
    return found


def chunked_bytes(report: Report, size: Size) -> None:
    """ChunkedCrossEntropy: the peak falls by 4 bytes x tokens x vocabulary at least (logits in float32)."""
    import lowmem as lm

    chunked = [lm.GradientCheckpointing(), lm.ChunkedCrossEntropy()]
    found = peaks_of(report, size, {"plain loss": [lm.GradientCheckpointing()], "chunked loss": chunked})
    need_cuda()
    least = 4 * size.batch * size.length * size.medium["vocab_size"]
    saved = found["plain loss"] - found["chunked loss"]
    report.bytes |= {"saved": saved, "float32 logits": least}
    # a chunk of the logits is still there
    require(saved >= 0.7 * least, f"the peak fell by {mib(saved)} MiB; float32 logits are {mib(least)} MiB")


def checkpointing_bytes(report: Report, size: Size) -> None:
    """GradientCheckpointing: the peak above the weights falls to half or less."""
    import lowmem as lm

    without = [lm.ChunkedCrossEntropy()]
    found = peaks_of(report, size, {"without": without, "with": [lm.ChunkedCrossEntropy(), lm.GradientCheckpointing()]})
    need_cuda()
    share = found["with"] / found["without"]
    report.facts["share"] = share
    require(share <= 0.5, f"checkpointing leaves {share:.2f} of the peak above the weights")


def ledger(report: Report, size: Size) -> None:
    """The measured ledger of the first two steps against the allocator's own peak."""
    import torch

    import lowmem as lm
    from lowmem.memory.meter import MemoryLedger

    rows = make_rows(2 * size.batch, size.medium["vocab_size"], size.length)
    model = make_model(size.medium, "bfloat16")
    strategies = [lm.LoRA(r=8), lm.MixedPrecision(), lm.ChunkedCrossEntropy(), lm.GradientCheckpointing()]
    before = torch.cuda.memory_allocated() if on_cuda() else 0
    numbers = {"batch_size": size.batch, "max_length": size.length, "max_steps": 2}
    got = fit(model, rows, strategies, observers=[MemoryLedger()], **numbers)
    report.bytes |= got.trainer.result["memory_ledger"]
    report.bytes["ledger's peak"] = peak = sum(got.trainer.result["memory_ledger"].values())
    need_cuda()
    report.bytes["allocator's peak"] = allocated = got.peak_allocated - before
    report.facts["ledger_by_allocator"] = peak / allocated
    # the allocator also holds what an operation uses inside itself, cuBLAS's workspaces, and rounds sizes up
    require(0.7 <= peak / allocated <= 1.02, f"the ledger says {peak / allocated:.3f} of the allocator's peak")


# -- 8: compile -------------------------------------------------------------------------------------------------------


def compiled(report: Report, size: Size) -> None:
    """Compile: losses close to the plain run's, no silent fallback; time of the first step and of the later ones."""
    import torch

    import lowmem as lm

    backend = "inductor" if size.inductor else "eager"
    report.facts["backend"] = backend
    even = make_rows(4, size.small["vocab_size"], 48)
    uneven = make_rows(12, size.small["vocab_size"])
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for name, rows in (("rows of one length", even), ("rows of uneven length", uneven)):
            fresh()
            torch._dynamo.utils.counters.clear()
            got = fit(make_model(size.small), rows, [lm.Compile(backend=backend)], max_steps=3)
            graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs")
            off = relative(got.losses, fit(make_model(size.small), rows, max_steps=3).losses)
            report.facts[name] = {"losses_off": off, "graphs": graphs}
            require(off <= 1e-4, f"{name}: losses are off by {off:.1e}")
        rows = make_rows(size.batch, size.medium["vocab_size"], size.length)
        numbers = {"batch_size": size.batch, "max_length": size.length, "max_steps": 8}
        for name, strategies in (("plain", []), ("compiled", [lm.Compile(backend=backend)])):
            fresh()
            strategies = [lm.LoRA(r=8), lm.MixedPrecision(), lm.ChunkedCrossEntropy(), *strategies]
            got = fit(make_model(size.medium, "bfloat16"), rows, strategies, **numbers)
            times = {"first_step_seconds": got.step_seconds[0], "step_seconds": statistics.median(got.step_seconds[2:])}
            report.facts[name] = times
            report.bytes[f"peak above weights, {name}"] = got.above_start
            del got


# -- 9, 10: collation, resume -----------------------------------------------------------------------------------------


def pinned(report: Report, size: Size) -> None:
    """Pinned, non-blocking collation gives the device what blocking collation gives, while the device is busy."""
    import torch

    from lowmem.batches import collate, to_device

    rows = make_rows(400, 32000, (1, 700))
    batches = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    device = torch.device(device_name())
    busy = torch.randn(2048 if on_cuda() else 32, 2048 if on_cuda() else 32, device=device)
    got = []
    for inputs in to_device(batches, device):
        for _ in range(4):  # keeps the queue full, so that copies come late
            busy = (busy @ busy).clamp_(-1, 1)
        got.append({name: tensor.clone() for name, tensor in inputs.items()})
    sync()
    wrong = sum(
        not same(a, {n: t.to(device) for n, t in collate(b).items()}) for a, b in zip(got, batches, strict=True)
    )
    report.facts |= {"micro_batches": len(got), "different": wrong}
    require(len(got) == len(batches) and not wrong, f"{wrong} of {len(got)} micro-batches differ")
    need_cuda()


def interrupted(
    report: Report,
    model: Callable[[], Any],
    rows: list[dict[str, Any]],
    strategies: Callable[[], list[Any]],
    **numbers: Any,
) -> None:
    """Eight steps in one go (twice, to see that bits are reproducible at all) and resumed after the fourth step."""
    import torch

    numbers = {"max_steps": 8, "shuffle": True, "max_length": 64, **numbers}

    def states(run: Fitted) -> dict[str, Any]:
        found = {}
        for name, p in run.trainer.run.trainable.items():
            for key, value in run.trainer.optimizer.state[p].items():
                found[f"{name} {key}"] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
                )
        return found

    with tempfile.TemporaryDirectory(prefix="gpu_suite-") as folder, deterministic():
        one = fit(model(), rows, strategies(), output_dir=f"{folder}/one", save_steps=4, **numbers)
        two = fit(model(), rows, strategies(), **numbers)
        resumed = fit(model(), rows, strategies(), resume_from=f"{folder}/one/checkpoint-000004", **numbers)
        cursor = json.loads(Path(f"{folder}/one/checkpoint-000004/trainer.json").read_text(encoding="utf-8"))["cursor"]
        report.facts |= {
            "cursor_at_checkpoint": cursor,
            "uninterrupted_runs_equal": same(one.weights(), two.weights()) and same(states(one), states(two)),
            "weights_equal": same(one.weights(), resumed.weights()),
            "states_equal": same(states(one), states(resumed)),
            "losses_equal": one.losses[4:] == resumed.losses,
        }
    require(report.facts["uninterrupted_runs_equal"], "two uninterrupted runs already differ: the check is void")
    for what in ("weights", "states", "losses"):
        require(report.facts[f"{what}_equal"], f"{what} of the resumed run differ")


def resume(report: Report, size: Size) -> None:
    """Resume in the middle of an epoch, with dropout, bit for bit: LoRA in bfloat16, and all weights in float16."""
    import lowmem as lm

    rows = make_rows(22, size.small["vocab_size"])  # six steps an epoch; the checkpoint comes after the fourth
    shared = [lm.GradientCheckpointing, lm.EMA, lambda: lm.GradientAccumulation(steps=2)]
    cases = {
        "LoRA, bfloat16": (
            "bfloat16",
            lambda: [lm.LoRA(lora_dropout=0.1), lm.MixedPrecision(), *(s() for s in shared)],
        ),
        "all weights, float16": ("float32", lambda: [lm.MixedPrecision(dtype="float16"), *(s() for s in shared)]),
        "NF4 and LoRA": ("bfloat16", lambda: [lm.Quantization(), lm.LoRA(lora_dropout=0.1), *(s() for s in shared)]),
    }
    for name, (dtype, strategies) in cases.items():
        part = Report()
        report.facts[name] = part.facts
        interrupted(part, lambda dtype=dtype: make_model(size.small, dtype), rows, strategies, max_grad_norm=1.0)


# -- 11: SOLAR's shape -----------------------------------------------------------------------------------------------


def layers_that_fit(size: Size) -> int:
    """As many layers of SOLAR's shape as the first rung (no technique but LoRA) has room for, 1 to 8."""
    if size.solar_layers:
        return size.solar_layers
    import torch

    need_cuda()
    free = torch.cuda.mem_get_info()[0]
    tokens = size.solar_batch * size.solar_length
    outside = 2 * 2 * 32000 * 4096 + 16 * tokens * 32000  # embedding and head in bfloat16; logits and their kin
    layer = 2 * 218_112_000 + 700_000 * tokens  # weights in bfloat16; activations (generously)
    return max(1, min(8, int((0.8 * free - outside) / layer)))


def rungs() -> dict[str, Callable[[], list[Any]]]:
    """Each rung adds one technique."""
    import lowmem as lm

    def base() -> list[Any]:
        return [lm.LoRA(r=16), lm.MixedPrecision()]

    return {
        "LoRA, bfloat16": base,
        "+ checkpointing": lambda: [*base(), lm.GradientCheckpointing()],
        "+ chunked loss": lambda: [*base(), lm.GradientCheckpointing(), lm.ChunkedCrossEntropy()],
        "+ NF4": lambda: [*base(), lm.GradientCheckpointing(), lm.ChunkedCrossEntropy(), lm.Quantization()],
        "+ paged 8-bit Adam": lambda: [
            *base(),
            lm.GradientCheckpointing(),
            lm.ChunkedCrossEntropy(),
            lm.Quantization(),
            lm.AdamW8bit(paged=True),
        ],
    }


def ladder(report: Report, size: Size) -> None:
    """SOLAR's shape with some layers: peak bytes and tokens per second, one technique more at every rung."""
    import torch

    layers = layers_that_fit(size)
    shape = {**size.solar, "num_hidden_layers": layers}
    tokens = size.solar_batch * size.solar_length
    rows = make_rows(size.solar_batch, shape["vocab_size"], size.solar_length)
    report.facts |= {"layers": layers, "rows_per_step": size.solar_batch, "length": size.solar_length}
    numbers = {"batch_size": size.solar_batch, "max_length": size.solar_length, "max_steps": 6, "learning_rate": 1e-4}
    lines: list[list[object]] = []
    peaks: dict[str, int | None] = {}
    for name, strategies in rungs().items():
        fresh()
        try:
            got = fit(make_on_device(shape, "bfloat16"), rows, strategies(), **numbers)
        except torch.cuda.OutOfMemoryError:
            report.facts[name] = "out of memory"
            lines.append([name, "out of memory", "", ""])
            continue
        require(all(map(math.isfinite, got.losses)), f"{name}: a loss is not finite")
        speed = tokens / statistics.median(got.step_seconds[2:])
        peaks[name] = got.peak_allocated
        report.facts[name] = {"tokens_per_second": speed, "loss_first": got.losses[0], "loss_last": got.losses[-1]}
        report.bytes |= {f"allocated, {name}": got.peak_allocated, f"reserved, {name}": got.peak_reserved}
        lines.append([name, mib(got.peak_allocated), mib(got.peak_reserved), f"{speed:,.0f}"])
        del got
    head = f"SOLAR's shape, {layers} layers, {size.solar_batch} x {size.solar_length} tokens"
    report.tables.append(table([head, "peak allocated, MiB", "peak reserved, MiB", "tokens/s"], lines))
    require(bool(peaks), "no rung fits")
    if on_cuda():
        low = math.inf
        for name, peak in peaks.items():
            require(peak <= 1.01 * low, f"{name}: the peak has risen to {mib(peak)} MiB")
            low = peak
    else:
        raise NotRunError("no CUDA")  # everything but the bytes has run


def quantised_solar(size: Size) -> Any:
    """SOLAR's shape with random weights in NF4, built layer by layer."""
    import torch
    from torch import nn
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    import lowmem as lm
    from lowmem.run import Run

    device = torch.device(device_name())
    run = Run(lm.TrainingConfig(), device, frozenset())
    shape = {**size.solar, "num_hidden_layers": size.whole_layers}
    model = make_on_device({**shape, "num_hidden_layers": 1}, "bfloat16")
    config = LlamaConfig(**shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.num_hidden_layers = size.whole_layers
    model.model.layers = nn.ModuleList()
    for index in range(size.whole_layers):
        with device:
            part = nn.Module()
            part.layers = nn.ModuleList([LlamaDecoderLayer(config, index)]).to(torch.bfloat16)
        for parameter in part.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
        model.model.layers.append(lm.Quantization().wrap_model(part, run).layers[0])
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def whole_solar(report: Report, size: Size) -> None:
    """SOLAR with all its layers in NF4, built layer by layer, trained for a few steps with everything that saves."""
    import torch

    import lowmem as lm
    from lowmem.memory.rule_of_thumb import stored_bytes

    if on_cuda() and (free := torch.cuda.mem_get_info()[0]) < 12 * GIB:
        raise NotRunError(f"{free / GIB:.1f} GiB are free on the card; 12 are asked for")
    model = quantised_solar(size)
    report.bytes["weights"] = stored_bytes(model)
    fresh()
    rows = make_rows(1, size.solar["vocab_size"], size.solar_length)
    strategies = [lm.LoRA(r=16), lm.MixedPrecision(), lm.GradientCheckpointing(), lm.ChunkedCrossEntropy()]
    numbers = {"batch_size": 1, "max_length": size.solar_length, "max_steps": 4, "learning_rate": 1e-4}
    got = fit(model, rows, [*strategies, lm.AdamW8bit(paged=True)], **numbers)
    report.bytes |= {"peak allocated": got.peak_allocated, "peak reserved": got.peak_reserved}
    report.facts |= {
        "layers": size.whole_layers,
        "tokens_per_step": size.solar_length,
        "tokens_per_second": size.solar_length / statistics.median(got.step_seconds[1:]),
        "losses": got.losses,
    }
    require(all(map(math.isfinite, got.losses)), f"a loss is not finite: {got.losses}")
    need_cuda()


# -- 12: prediction ---------------------------------------------------------------------------------------------------


def predict(report: Report, size: Size) -> None:
    """Predicted peaks of many recipes beside the allocator's, with expandable segments: within 1 %, reserved 3 %."""
    import gpu_predict

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "predicted.json")
        kept = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}  # the size that users have
        environment = {**kept, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        command = [sys.executable, str(HERE / "gpu_predict.py"), "--out", str(out), *(["--tiny"] * (size is TINY))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        require(done.returncode == 0, done.stderr[-2000:])
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    lines: list[list[object]] = []
    wrong: list[str] = []
    for name, row in found.items():
        if "failed" in row:
            wrong.append(f"{name}: {row['failed']}")
            continue
        for i, (kind, limit_) in enumerate((("allocated", gpu_predict.ALLOCATED), ("reserved", gpu_predict.RESERVED))):
            report.bytes |= {f"{kind}, {name}": row["measured"][i], f"predicted {kind}, {name}": row["predicted"][i]}
            error = row["errors"][i]
            if error is not None and abs(error) > limit_:
                wrong.append(f"{name}: {kind} off by {error:+.2%}")
        errors = ["not measured" if e is None else f"{e:+.2%}" for e in row["errors"]]
        lines.append([name, *map(mib, row["measured"]), *errors])
    report.facts |= {"recipes": len(found), "seconds": {name: row["seconds"] for name, row in found.items()}}
    report.tables.append(
        table(["run", "allocated, MiB", "reserved, MiB", "allocated off by", "reserved off by"], lines)
    )
    require(not wrong, "; ".join(wrong))
    need_cuda()


# -- 13: long rows ----------------------------------------------------------------------------------------------------

CARD_BYTES, CUDA_BYTES = 24 * GIB, GIB // 2  # the card of the long recipe, and what CUDA itself takes of one
LONG_RECIPE = "solar-10.7b-qlora-24gb-long"
WORKSPACE_BYTES = 8 * 4096 * 1024  # of cuBLAS, as CUBLAS_WORKSPACE_CONFIG is set here


LONGEST = 242_688  # tokens: about the most that is called fitting with the strategies of that recipe


def called_fitting(predicted_reserved: int) -> bool:
    """Whether `lowmem estimate` says so: what lies within its tolerance is too close to call."""
    from lowmem.memory.choose import MARGIN

    return predicted_reserved * (1 + MARGIN) <= CARD_BYTES - CUDA_BYTES


@contextmanager
def a_small_card() -> Iterator[None]:
    """torch's allocator gets as much as a card of 24 GiB would leave it."""
    import torch

    if not on_cuda():
        yield
        return
    fresh()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (CARD_BYTES - CUDA_BYTES) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def host_pools() -> Iterator[list[Any]]:
    """The pools of host memory that strategies make inside."""
    from lowmem.ops.host_memory import HostPool

    found: list[Any] = []
    real = HostPool.__init__

    def made(pool: Any, *given: Any) -> None:
        real(pool, *given)
        found.append(pool)

    with patch.object(HostPool, "__init__", made):
        yield found


def foreseen(shape: dict[str, Any], strategies: Sequence[Any], length: int, numbers: dict[str, Any]) -> Any:
    """The prediction for one row per step on a card, with expandable segments."""
    import torch
    from transformers import LlamaConfig

    from lowmem import TrainingConfig
    from lowmem.loading import model_without_data
    from lowmem.memory.predict import judge, record

    model = model_without_data(LlamaConfig(**shape, dtype=torch.bfloat16))
    with patch("lowmem.memory.trace.CUBLAS_WORKSPACE", WORKSPACE_BYTES):
        trace = record(model, TrainingConfig(**numbers), strategies, "cuda", [length])
    return judge(trace, expandable=True)


def must_fit(called: bool, fitted: bool, peak_reserved: int | None) -> None:
    """What is called fitting has to fit."""
    usable = CARD_BYTES - CUDA_BYTES
    require(called, "the prediction does not call it fitting: the check is void")
    require(fitted, "it was called fitting, and the card's memory was not enough")
    require(peak_reserved is None or peak_reserved <= usable, f"{mib(peak_reserved)} MiB reserved, of {mib(usable)}")


def off_by(measured: int | None, predicted: int) -> float | None:
    return None if not measured else predicted / measured - 1


def long_rows(report: Report, size: Size, length: int) -> None:
    """One row per step with the strategies of the long recipe, on 24 GiB: what was predicted, and what it took."""
    import torch

    from lowmem.recipe import load_recipe

    def strategies(quantised: bool = False) -> list[Any]:
        found = load_recipe(LONG_RECIPE, check_files=False).strategies
        return [s for s in found if not (quantised and s.name == "quantization")]

    shape = {**size.solar, "num_hidden_layers": size.whole_layers}
    numbers = {"batch_size": 1, "max_length": length, "learning_rate": 1e-4, "max_grad_norm": 1.0}
    found = foreseen(shape, strategies(), length, numbers)
    fits = called_fitting(found.peak_reserved_bytes)
    report.facts |= {"tokens": length, "called_fitting": fits}
    report.bytes |= {
        "predicted allocated": found.peak_allocated_bytes,
        "predicted reserved": found.peak_reserved_bytes,
        "predicted pinned": found.pinned_bytes,
    }
    rows, got = make_rows(1, shape["vocab_size"], length), None
    with a_small_card(), host_pools() as pools:
        try:
            # one step above 64K tokens: at 250K it takes minutes
            steps = 3 if length <= 65_536 // size.shrink else 1
            got = fit(quantised_solar(size), rows, strategies(quantised=True), **{**numbers, "max_steps": steps})
        except torch.cuda.OutOfMemoryError as problem:
            report.facts["out of memory"] = first_line(problem)
        report.bytes["pinned"] = sum(pool.pinned_bytes for pool in pools) if on_cuda() else None
        report.bytes["pageable"] = sum(pool.pageable_bytes for pool in pools) if on_cuda() else None
        del pools[:]
    if got is not None:
        report.bytes |= {"peak allocated": got.peak_allocated, "peak reserved": got.peak_reserved}
        report.facts |= {
            "allocated_off_by": off_by(got.peak_allocated, found.peak_allocated_bytes),
            "reserved_off_by": off_by(got.peak_reserved, found.peak_reserved_bytes),
            "tokens_per_second": length / statistics.median(got.step_seconds[1:] or got.step_seconds),
            "losses": got.losses,
        }
        require(all(map(math.isfinite, got.losses)), f"a loss is not finite: {got.losses}")
    must_fit(fits, got is not None, report.bytes.get("peak reserved"))
    need_cuda()


def hf_rows(report: Report, size: Size, length: int) -> None:
    """The same row by transformers and peft: their checkpointing and loss, on 24 GiB; memory that ends is a result."""
    import torch

    report.facts["tokens"] = length
    ids = torch.as_tensor(make_rows(1, size.solar["vocab_size"], length)[0]["input_ids"]).long()[None]
    with a_small_card():
        try:
            peaks, seconds, losses = hf_steps(quantised_solar(size), ids.to(device_name()), steps=3)
        except torch.cuda.OutOfMemoryError as problem:
            report.facts["out of memory"] = first_line(problem)
            return
    report.bytes |= {"peak allocated": peaks[0], "peak reserved": peaks[1]}
    report.facts |= {"tokens_per_second": length / statistics.median(seconds[1:]), "losses": losses}
    require(all(map(math.isfinite, losses)), f"a loss is not finite: {losses}")
    need_cuda()


def hf_steps(model: Any, ids: Any, steps: int) -> tuple[list[int | None], list[float], list[float]]:
    """Peaks (allocated, reserved), seconds and losses of peft's way with 4-bit weights, as its guide shows it."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    from lowmem.libraries import import_bitsandbytes

    model.is_loaded_in_4bit = True  # as `from_pretrained` says it; peft asks
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    kind = import_bitsandbytes().optim
    optimizer = kind.PagedAdamW8bit(trained, lr=1e-4) if on_cuda() else torch.optim.AdamW(trained, lr=1e-4)
    seconds, losses = [], []
    fresh_peaks()
    for _ in range(steps):
        begin = time.perf_counter()
        with torch.autocast(device_name(), torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sync()
        seconds.append(time.perf_counter() - begin)
    if not on_cuda():
        return [None, None], seconds, losses
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], seconds, losses


# -- 14: fused kernels ------------------------------------------------------------------------------------------------


def fused(report: Report, size: Size, length: int) -> None:
    """FusedKernels beside nothing, TiledMLP and ChunkedLayers: measured peaks beside the predicted, within 1 %."""
    import gpu_predict

    import lowmem as lm

    shape = {**size.solar, "num_hidden_layers": size.few_layers}
    numbers = {"batch_size": 1, "max_length": length, "learning_rate": 1e-4, "max_grad_norm": None}
    rows = make_rows(1, shape["vocab_size"], length)
    beside = {
        "checkpointing": list,
        "+ tiled MLP": lambda: [lm.TiledMLP()],
        "+ chunked layers": lambda: [lm.ChunkedLayers()],
    }
    there = not on_cuda() or installed("liger_kernel")  # elsewhere than on CUDA the plain operations run
    kernels = {"": list, ", fused": lambda: [lm.FusedKernels()]} if there else {"": list}
    report.facts |= {"tokens": length, "layers": size.few_layers}
    lines: list[list[object]] = []
    wrong: list[str] = []
    for name, others in beside.items():
        losses: list[list[float]] = []
        for mark, more in kernels.items():

            def strategies(others: Any = others, more: Any = more) -> list[Any]:
                return [lm.LoRA(r=16), lm.ChunkedCrossEntropy(), lm.GradientCheckpointing(), *others(), *more()]

            found = foreseen(shape, strategies(), length, numbers)
            fresh()
            got = fit(make_on_device(shape, "bfloat16"), rows, strategies(), **numbers)
            losses.append(got.losses)
            case, error = name + mark, off_by(got.peak_allocated, found.peak_allocated_bytes)
            report.bytes |= {case: got.peak_allocated, f"predicted, {case}": found.peak_allocated_bytes}
            speed = length / statistics.median(got.step_seconds[1:])
            report.facts[case] = {"tokens_per_second": speed, "allocated_off_by": error}
            if error is not None and abs(error) > gpu_predict.ALLOCATED:
                wrong.append(f"{case}: allocated off by {error:+.2%}")
            shown = "not measured" if error is None else f"{error:+.2%}"
            lines.append([case, mib(got.peak_allocated), mib(found.peak_allocated_bytes), shown, f"{speed:,.0f}"])
            del got
        if (off := max(relative(each, losses[0]) for each in losses)) > 0.01:
            wrong.append(f"{name}: losses with fused kernels are off by {off:.4f}")
    head = f"SOLAR's shape, {size.few_layers} layers, {length:,} tokens"
    report.tables.append(table([head, "peak, MiB", "predicted, MiB", "off by", "tokens/s"], lines))
    require(not wrong, "; ".join(wrong))
    need_cuda()
    if not there:
        raise NotRunError("liger_kernel not installed: nothing was run with fused kernels")


# -- 15: several cards ------------------------------------------------------------------------------------------------


def on_all_cards(report: Report, size: Size, engine: str) -> None:
    """An engine on all cards (NCCL), full and LoRA: the losses of one process; tokens/s and bytes of every rank."""
    import distributed
    import torch

    if engine not in distributed.engines(quick=False):
        raise NotRunError("deepspeed not installed")
    cards = torch.cuda.device_count() if on_cuda() else 2
    if cards < 2:
        raise NotRunError("one card, and NCCL wants one for every process")
    report.facts["processes"] = cards
    lines: list[list[object]] = []
    wrong: list[str] = []
    for kind in distributed.SETS:
        alone = distributed.run("one process", kind, 1, tiny=size is TINY)
        ranks = distributed.run(engine, kind, cards, tiny=size is TINY)
        off = distributed.off_by(alone, ranks)
        if off > distributed.OFF_BY:
            wrong.append(f"{kind}: the loss is off by {off:.2g}")
        report.facts[kind] = {
            "loss_off_by": off,
            "tokens_per_second": ranks[0]["tokens_per_second"],
            "alone": alone[0]["tokens_per_second"],
        }
        if on_cuda():
            report.bytes[f"one process, {kind}"] = alone[0]["peak_bytes"]
            report.bytes |= {f"rank {n}, {kind}": rank["peak_bytes"] for n, rank in enumerate(ranks)}
        lines.append(
            [kind, f"{alone[0]['tokens_per_second']:,.0f}", f"{ranks[0]['tokens_per_second']:,.0f}", f"{off:.2g}"]
        )
    report.tables.append(table([f"{engine}, {cards} processes", "tokens/s alone", "tokens/s", "loss off by"], lines))
    require(not wrong, "; ".join(wrong))
    need_cuda()


# -- the table --------------------------------------------------------------------------------------------------------


def at(length: int, run: Callable[[Report, Size, int], None]) -> Callable[[Report, Size], None]:
    """A check with rows of one length."""

    def check(report: Report, size: Size) -> None:
        run(report, size, max(16, length // size.shrink))

    check.__doc__ = f"{length:,} tokens. {run.__doc__}"
    return check


def by(engine: str) -> Callable[[Report, Size], None]:
    """A check of one engine."""

    def check(report: Report, size: Size) -> None:
        on_all_cards(report, size, engine)

    check.__doc__ = f"{engine}. {on_all_cards.__doc__}"
    return check


LORA = ("peft", "bitsandbytes")
ENGINES = ("ddp", "fsdp_2", "tensor_parallel", "pipeline_parallel", "deepspeed_zero")
RUN_FOLDER = ("datasets", "bitsandbytes", "peft")  # a run folder notes the versions of all three

CHECKS = (
    Check("exact_fp32", exact_fp32, 40),
    Check("exact_fp64", exact_fp64, 30),
    Check("mixed_precision", mixed_precision, 10),
    Check("fp16_overflow", fp16_overflow, 10),
    Check("quantized_lora", quantized_lora, 15, LORA),
    Check("nf4_parity", nf4_parity, 10, ("bitsandbytes",)),
    Check("adamw_8bit", adamw_8bit, 10, ("bitsandbytes",)),
    Check("paged", paged, 20, RUN_FOLDER),
    Check("pure_bf16", pure_bf16, 15),
    Check("in_backward_bytes", in_backward_bytes, 15),
    Check("packing_sdpa", packing_sdpa, 10),
    Check("pinned", pinned, 10),
    Check("resume", resume, 30, RUN_FOLDER),
    *(Check(f"cards_{engine}", by(engine), 60, LORA) for engine in ENGINES),  # on one card they take no time
    Check("chunked_bytes", chunked_bytes, 20, LORA),
    Check("checkpointing_bytes", checkpointing_bytes, 20, LORA),
    Check("ledger", ledger, 15, LORA),
    Check("long_16k", at(16_384, long_rows), 50, LORA),
    Check("hf_4k", at(4_096, hf_rows), 40, LORA),
    Check("predict", predict, 150, LORA),
    Check("long_64k", at(65_536, long_rows), 150, LORA),
    Check("long_4k", at(4_096, long_rows), 40, LORA),
    Check("fused_4k", at(4_096, fused), 40, ("peft",)),
    Check("fused_16k", at(16_384, fused), 60, ("peft",)),
    Check("hf_8k", at(8_192, hf_rows), 40, LORA),
    Check("hf_16k", at(16_384, hf_rows), 60, LORA),
    Check("ladder", ladder, 90, LORA),
    Check("whole_solar", whole_solar, 90, LORA),
    Check("packing_flex", packing_flex, 60),
    Check("compile", compiled, 120, LORA),
    Check("long_longest", at(LONGEST, long_rows), 460, LORA),  # alone: --only long_longest --minutes 9
)


def carry_out(check: Check, size: Size, missing: set[str], seconds_left: float) -> dict[str, Any]:
    """Run a check, and say how it went; its allowance is the reason to start it, the budget the limit."""
    report, status, reason = Report(), "pass", ""
    start = time.perf_counter()
    absent = [name for name in check.needs if name in missing]
    if absent:
        status, reason = "not run", f"{', '.join(absent)} not installed"
    elif seconds_left < check.seconds:
        status, reason = "not run", f"{seconds_left:.0f} s of the budget left, {check.seconds} s allowed for it"
    else:
        try:
            with limit(seconds_left):
                fresh()
                check.run(report, size)
        except NotRunError as why:
            status, reason = "not run", str(why)
        except Exception as problem:
            status, reason = "fail", f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, AssertionError):
                traceback.print_exc()
        try:
            fresh()
        except Exception as problem:  # the card does not answer any more
            status, reason = "fail", reason or f"{type(problem).__name__}: {problem}"
    return {
        "name": check.name,
        "what": " ".join((check.run.__doc__ or "").split()),
        "status": status,
        "reason": reason,
        "seconds": round(time.perf_counter() - start, 3),
        "allowance_seconds": check.seconds,
        "facts": report.facts,
        "bytes": report.bytes,
        "tables": report.tables,
    }


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End what is running when the budget ends (where the system has alarms)."""

    def ring(*_: Any) -> None:
        raise OverTimeError("the budget ended while it ran")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- the machine ------------------------------------------------------------------------------------------------------


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def output_of(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(commit: str | None) -> dict[str, Any]:
    """Card, driver, versions, commit."""
    import torch

    from lowmem.version import __version__

    changed = output_of("git", "-C", str(HERE), "status", "--porcelain", "--", "../lowmem", "gpu_suite.py")
    head = output_of("git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD")
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if on_cuda() else None,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
        "cuda": torch.version.cuda,
        "compute_capability": list(torch.cuda.get_device_capability()) if on_cuda() else None,
        "memory_bytes": torch.cuda.mem_get_info()[1] if on_cuda() else None,
        "free_bytes_at_start": torch.cuda.mem_get_info()[0] if on_cuda() else None,
        "commit": commit or (head + (" with changes" if changed else "") if head else "unknown"),
        "python": platform.python_version(),
        "versions": {"lowmem": __version__, **{name: package(name) for name in PACKAGES}},
    }
    return found


@contextmanager
def lowmem_from_the_checkout() -> Iterator[None]:
    """Where lowmem is not installed, gives its metadata (a run folder notes the version) as an installation would."""
    from lowmem.version import __version__

    if package("lowmem") != "not installed":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gpu_suite-") as folder:
        info = Path(folder) / f"lowmem-{__version__}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: lowmem\nVersion: {__version__}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def plain_values(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain_values(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(v) for v in value]
    return value


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(plain_values(content), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [""])[0][:300]


def show(result: dict[str, Any]) -> None:
    """One check, for people."""
    print(f"{result['status']:<8} {result['name']:<20} {result['seconds']:7.1f} s  {result['reason']}")
    for name, size in result["bytes"].items():
        print(f"           {name}: {mib(size)}" + (" MiB" if size is not None else ""))
    for text in result["tables"]:
        print(text)
    sys.stdout.flush()


def chosen(only: str | None) -> list[Check]:
    if not only:
        return list(CHECKS)
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    for word in wanted:
        if not any(check.name.startswith(word) for check in CHECKS):
            sys.exit(f"gpu_suite: no check is called {word}; known: {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if any(check.name.startswith(word) for word in wanted)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=NO_NETWORK, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="the budget (default: 8)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto is cuda, or nothing runs"
    )
    parser.add_argument("--tiny", action="store_true", help="models so small that only the code paths are tried")
    parser.add_argument("--only", metavar="NAMES", help="checks to run, by name or beginning of a name, with commas")
    parser.add_argument("--layers", type=int, help="layers of the ladder's model (default: what fits, 8 at most)")
    parser.add_argument("--commit", help="what to note as the commit, where the folder is no git checkout")
    parser.add_argument("--out", type=Path, help="the JSON file (default: benchmarks/results/gpu_suite-<card>.json)")
    parser.add_argument("--list", action="store_true", help="name the checks, and stop")
    return parser.parse_args()


def main() -> int:
    start = time.perf_counter()
    given = arguments()
    if given.list:
        for check in CHECKS:
            print(f"{check.name:<20} {check.seconds:4d} s  {' '.join((check.run.__doc__ or '').split())}")
        return 0
    checks = chosen(given.only)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits every time
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `lowmem train` does
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if given.tiny:
            os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other cost more than they do here
    if absent := [name for name in ("torch", *MODULES) if not installed(name)]:
        print(f"gpu_suite: not installed: {', '.join(absent)}; see --help", file=sys.stderr)
        return 2
    if given.device != "cpu" and not on_cuda():
        print("gpu_suite: torch sees no CUDA; --device cpu --tiny tries the script itself", file=sys.stderr)
        return 2
    size = TINY if given.tiny else FULL
    if given.layers:
        size = replace(size, solar_layers=given.layers)
    missing = {name for check in checks for name in check.needs if not installed(name)}
    return run_all(checks, size, given, missing, start)


def run_all(checks: list[Check], size: Size, given: argparse.Namespace, missing: set[str], start: float) -> int:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    facts = machine(given.commit)
    print(json.dumps(facts, indent=1))
    if missing:
        print(f"not installed, so that some checks are not run: {', '.join(sorted(missing))} (see --help)")
    slug = re.sub(r"[^a-z0-9]+", "-", str(facts["gpu"]).lower()).strip("-")
    path = given.out or (RESULTS / f"gpu_suite-{slug}.json" if facts["gpu"] else None)
    content: dict[str, Any] = {
        "schema": 1,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "tiny": given.tiny,
        "budget_seconds": 60 * given.minutes,
        "machine": facts,
        "checks": [],
    }
    with lowmem_from_the_checkout():
        for check in checks:
            left = 60 * given.minutes - (time.perf_counter() - start)
            content["checks"].append(carry_out(check, size, missing, left))
            show(content["checks"][-1])
            content["seconds"] = round(time.perf_counter() - start, 1)
            content["summary"] = summary(content["checks"])
            write(path, content)
    print(f"\n{content['seconds']:.0f} s: " + ", ".join(f"{len(v)} {k}" for k, v in content["summary"].items()))
    for status in ("fail", "not run"):
        for name in content["summary"][status]:
            reason = next(c["reason"] for c in content["checks"] if c["name"] == name)
            print(f"{status}: {name} ({reason.splitlines()[0][:200]})")
    if path:
        print(f"written: {path}")
    return 1 if content["summary"]["fail"] else 0


def summary(results: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {s: [r["name"] for r in results if r["status"] == s] for s in ("pass", "fail", "not run")}


if __name__ == "__main__":
    sys.exit(main())
