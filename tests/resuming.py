"""Runs that stop in the middle and go on, shared by the tests of checkpoints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from cases.helpers import llama, numbers, rows

from lowmem import Trainer
from lowmem.checkpoint import checkpoints

DATA = rows(14, high=16)  # batches of 4: an epoch has 4 steps, the last one short; step 3 is in its middle


class Stopped(Exception):  # noqa: N818
    """Stands for a killed process."""


def stop_after(step: int):
    def observer(event) -> None:
        if event.kind == "save" and event.metrics["step"] == step:
            raise Stopped

    return observer


def run(
    folder: Path | None,
    *strategies,
    stop: int | None = None,
    resume=None,
    dtype=torch.float32,
    log=None,
    model=None,
    eval_data=None,
    **changes,
) -> Trainer:
    trainer = Trainer(
        llama(dtype) if model is None else model,
        train_dataset=DATA,
        eval_dataset=eval_data,
        training=numbers(
            **{
                "max_steps": 6,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 1,
                "save_steps": 3 if folder else None,
                "output_dir": str(folder) if folder else None,
                **changes,
            }
        ),
        strategies=[type(s)(**s.settings()) for s in strategies],
        observers=[*([stop_after(stop)] if stop else []), *([log] if log else [])],
    )
    with suppress(Stopped):
        trainer.train(resume_from=resume)
    return trainer


def interrupted(folder: Path, *strategies, **changes) -> Path:
    run(folder, *strategies, stop=3, **changes)
    assert [p.name for p in checkpoints(folder)] == ["checkpoint-000003"]
    return folder / "checkpoint-000003"


def assert_equal_runs(one: Trainer, other: Trainer) -> None:
    """Bit for bit: weights, optimizer state, what strategies remember, the rate and the place in the data."""
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for name, parameter in one.run.trainable.items():
        a, b = one.optimizer.state[parameter], other.optimizer.state[other.run.trainable[name]]
        assert a.keys() == b.keys(), name
        for key, value in a.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == b[key].dtype, (name, key)
                assert torch.equal(value, b[key]), (name, key)
            else:
                assert value == b[key], (name, key)
    for a, b in zip(one.strategies, other.strategies, strict=True):
        assert str(a.state_dict()) == str(b.state_dict())
    assert [g["lr"] for g in one.optimizer.param_groups] == [g["lr"] for g in other.optimizer.param_groups]
    assert (one.cursor.epoch, one.cursor.consumed) == (other.cursor.epoch, other.cursor.consumed)
    assert one.result["train_loss"] == other.result["train_loss"]
    assert (one.tokens, one.supervised_tokens) == (other.tokens, other.supervised_tokens)


class Losses:
    """Replaces the evaluation loss by a given series."""

    def __init__(self, *series: float) -> None:
        self.series = list(series)

    def install(self, trainer: Trainer) -> Trainer:
        trainer.evaluate = lambda dataset=None: {  # type: ignore[method-assign]
            "eval_loss": self.series.pop(0), "eval_tokens": 1, "eval_seconds": 0.0,
        }  # fmt: skip
        return trainer


def with_losses(folder: Path, *series: float, strategies=(), **changes) -> Trainer:
    trainer = Trainer(
        llama(),
        train_dataset=DATA,
        eval_dataset=rows(2),
        training=numbers(max_steps=len(series), eval_steps=1, save_steps=1, output_dir=str(folder), **changes),
        strategies=list(strategies),
    )
    Losses(*series).install(trainer).train()
    return trainer
