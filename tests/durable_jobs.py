"""What the durability tests train in processes of their own, and how those are killed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases.helpers import llama, numbers, rows
from new_process import command
from safetensors.torch import load_file

from lowmem import (
    EMA,
    AdamW8bit,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    PureBF16,
    Quantization,
    Strategy,
    Trainer,
    bookkeeping,
    checkpoint,
    durable,
    weights,
)
from lowmem import resume as resuming
from lowmem.run_folder import RunFolder

SETS: dict[str, Callable[[], list[Strategy]]] = {
    "float16_8bit": lambda: [MixedPrecision(dtype="float16"), AdamW8bit(), GradientAccumulation(steps=2)],
    "qlora_ema": lambda: [Quantization(), LoRA(r=4, lora_dropout=0.3), EMA(decay=0.9)],
    "plain": list,
    "bf16_dropout": lambda: [PureBF16(), AdamW8bit()],
}
STEPS = 7  # epochs of 4 steps over 14 rows: most kills are mid-epoch
SAVING = {module.__file__ for module in (bookkeeping, checkpoint, durable, resuming, weights)}


def train(out: Path, name: str, resume_from: Any = None, kill_at: int | None = None, wait: Path | None = None) -> int:
    """Train in `out`; optionally kill this very process at a line (counted from 1) of the code that saves.

    With `wait`, make that file after the first save, and stand still.

    Returns:
        Lines of that code that were run.
    """
    torch.set_num_threads(1)

    def observer(event: Any) -> None:
        if event.kind == "status":
            print(event.metrics["text"])
        if event.kind == "save" and wait:
            wait.touch()
            time.sleep(600)

    trainer = Trainer(
        llama(attention_dropout=0.2 if name == "bf16_dropout" else 0.0),
        train_dataset=rows(14, high=16),
        eval_dataset=rows(3, seed=1),
        training=numbers(
            max_steps=STEPS,
            lr_scheduler_type="cosine",
            logging_steps=2,
            eval_steps=1 if name == "qlora_ema" else 2,
            save_steps=1 if name == "qlora_ema" else 2,
            save_total_limit=2,
            load_best_model_at_end=name == "bf16_dropout",
            output_dir=str(out),
        ),
        strategies=SETS[name](),
        observers=[observer],
    )
    lines = _count_lines(kill_at)
    trainer.train(resume_from)
    sys.settrace(None)
    return lines[0]


def count_lines(out: Path, name: str, file: Path) -> None:
    file.write_text(str(train(out, name)))


def go_on(out: Path, name: str, kill_at: int | None = None) -> None:
    """Resume what a kill has left; where it left no checkpoint, start anew."""
    if out.exists() and not any(checkpoint.checkpoints(out)):
        assert not checkpoint.numbered(out)
        shutil.rmtree(out)
    train(out, name, resume_from=True if out.exists() else None, kill_at=kill_at)


def outcome(out: Path) -> dict[str, Any]:
    """All that two equal runs have in common: weights, states, curves, result."""
    found: dict[str, Any] = {}
    whole = checkpoint.checkpoints(out)
    for folder in [out / "model", *whole]:
        if folder in whole:
            durable.verify(folder)
        for file in sorted(folder.rglob("*")):
            name = str(file.relative_to(out))
            if file.suffix == ".safetensors":
                found |= {f"{name}:{key}": value for key, value in load_file(file).items()}
            elif file.suffix == ".pt":
                found |= _flat(name, torch.load(file, weights_only=True))
    run = RunFolder.open(out)
    found["result"] = {
        k: run.result.get(k) for k in ("train_loss", "eval_loss", "steps", "tokens", "notices", "stopped")
    }
    varying = ("seconds", "tokens_per_second", "eval_seconds", "path", "rss_bytes")
    lines = [{k: v for k, v in line.items() if k not in varying} for line in run.metrics()]
    found["curves"] = [line for line in lines if line["event"] != "save"]  # a kill may come between a save and its line
    found["folder"] = sorted(p.name for p in out.iterdir())
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert set(one) == set(other), sorted(set(one) ^ set(other))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in _flat(f"{name}:{key}", item).items()}
    return {name: value}


def _count_lines(kill_at: int | None) -> list[int]:
    seen = [0]

    def line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in SAVING else None)
    return seen


# -- other jobs -------------------------------------------------------------------------------------------------------


def mid_epoch(out: Path, name: str, stop_at: int | None) -> None:
    """12 rows shuffled, batch 2, dropout, cosine, 6 steps; goes on where a run already lies."""

    def stop(event: Any) -> None:
        if event.kind == "save" and event.metrics["step"] == stop_at:
            os._exit(0)

    trainer = Trainer(
        llama(attention_dropout=0.1),
        train_dataset=rows(12),
        training=numbers(batch_size=2, max_steps=6, lr_scheduler_type="cosine", save_steps=3, output_dir=str(out)),
        strategies=SETS[name](),
        observers=[stop],
    )
    trainer.train(resume_from=True if out.exists() else None)


def killed_between_files(out: Path, name: str, step: int) -> None:
    """Train; in the save of a step, die after the model's file."""
    original = checkpoint.save_weights

    def save_weights(model: Any, folder: Path, state: Any = None) -> None:
        original(model, folder, state)
        if f"{step:06d}" in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_weights = save_weights  # type: ignore[assignment]
    train(out, name)


def one_step(out: Path, steps: int) -> None:
    """A model of 50 million weights, trained to a step and saved; goes on where a run already lies."""
    model = llama(vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12)
    assert 45e6 < sum(p.numel() for p in model.parameters()) < 55e6
    training = numbers(max_steps=steps, save_steps=1, output_dir=str(out), save_total_limit=1)
    trainer = Trainer(model, train_dataset=rows(4, high=8), training=training)
    trainer.train(resume_from=True if out.exists() else None)


def replace_folder(place: Path, kill_at: int) -> None:
    lines = _count_lines(kill_at)
    with durable.new_folder(place, sealed=True) as partial:
        (partial / "file").write_text("new")
    del lines


def limited(recipe: Path, file_bytes: int, from_step: int, *overrides: str) -> None:
    """`lowmem train`, with files that may not grow beyond a size from the save of a step on."""
    original = Trainer.save_checkpoint

    def save(trainer: Trainer, folder: Path) -> None:
        if trainer.run.global_step >= from_step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        original(trainer, folder)

    Trainer.save_checkpoint = save  # type: ignore[method-assign]
    command("train", str(recipe), *overrides)
