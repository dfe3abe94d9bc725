"""Small models, rows and strategies shared by the case tests. They depend on no fixture."""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from new_process import completed
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem import Event, Stage, Strategy, Trainer, TrainingConfig
from lowmem.cli import main

torch.set_num_threads(1)

REPO = Path(__file__).resolve().parents[2]


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """The model T of the cases: two layers, width 64, 90,432 parameters."""
    torch.manual_seed(seed)
    numbers = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**numbers)).to(dtype)


def row(*ids: int, masked: int = 0) -> dict[str, list[int]]:
    """A tokenised row; the first `masked` tokens have no label."""
    return {"input_ids": list(ids), "labels": [-100] * masked + list(ids[masked:])}


def rows(number: int = 12, low: int = 5, high: int = 30, masked: int = 3, vocabulary: int = 128, seed: int = 0) -> list:
    """Random rows of uneven length."""
    draw = random.Random(seed)
    return [
        row(*(draw.randrange(vocabulary) for _ in range(draw.randrange(low, high))), masked=masked)
        for _ in range(number)
    ]


def numbers(**changes: Any) -> TrainingConfig:
    """Training numbers for a few steps: no clipping, no shuffling surprises."""
    return TrainingConfig(
        **{
            "batch_size": 4,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "max_grad_norm": None,
            "max_length": 64,
            "logging_steps": 1,
            **changes,
        }
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference between two sets of equally named tensors."""
    assert one.keys() == other.keys()
    return max((a.double() - other[n].double()).abs().max().item() for n, a in one.items())


def train(model: nn.Module, data: Any, *strategies: Strategy, observers: Any = (), **changes: Any) -> Trainer:
    """A trainer that has trained."""
    trainer = Trainer(
        model, train_dataset=data, training=numbers(**changes), strategies=list(strategies), observers=observers
    )
    trainer.train()
    return trainer


class Log:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def all(self, kind: str, key: str) -> list[Any]:
        """One metric of every event of a kind."""
        return [event.metrics.get(key) for event in self.events if event.kind == kind]


# -- strategies of a user's own ---------------------------------------------------------------------------------------


@dataclass
class SGD(Strategy):
    """Plain gradient descent, which counts its steps and keeps the learning rates it was given."""

    stage: ClassVar[Stage] = Stage.UPDATE
    slot: ClassVar[str | None] = "optimizer"

    rates: list[float] = field(default_factory=list, init=False)

    def wrap_optimizer(self, make: Any, run: Any) -> Any:
        def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=run.config.learning_rate)
            optimizer.register_step_pre_hook(lambda opt, *_: self.rates.append(opt.param_groups[0]["lr"]))
            return optimizer

        return sgd


@dataclass
class KeepGradients(Strategy):
    """Copies all gradients right before each update."""

    stage: ClassVar[Stage] = Stage.CLIP

    steps: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def wrap_step(self, step: Any, run: Any) -> Any:
        def keep() -> None:
            self.steps.append({n: p.grad.detach().clone() for n, p in run.trainable.items() if p.grad is not None})
            step()

        return keep


@dataclass
class FactorOnLoss(Strategy):
    """Multiplies the loss of chosen steps (counted from 1): NaN and infinity poison them, 0 empties their gradient."""

    stage: ClassVar[Stage] = Stage.OFFLOAD  # around whatever computes the loss

    factors: dict[int, float] = field(default_factory=dict)

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        def changed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            return loss(model, inputs) * self.factors.get(run.global_step + 1, 1.0)

        return changed


@dataclass
class SeeMicroBatches(Strategy):
    """Records the shape of every forward that has a backward, step by step."""

    stage: ClassVar[Stage] = Stage.OFFLOAD  # around whatever computes the loss

    steps: list[tuple[int, tuple[int, ...]]] = field(default_factory=list, init=False)
    first_tokens: list[list[int]] = field(default_factory=list, init=False)

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        def seen(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            if torch.is_grad_enabled():
                self.steps.append((run.global_step, tuple(inputs["input_ids"].shape)))
                self.first_tokens.append(inputs["input_ids"][:, 0].tolist())
            return loss(model, inputs)

        return seen

    def windows(self) -> list[int]:
        """Micro-batches of every optimizer step, in order."""
        order = [step for step, _ in self.steps]
        return [order.count(step) for step in dict.fromkeys(order)]


class Weights(nn.Module):
    """A vector that is the whole model; its loss is given by `SlopeLoss`."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.w.expand(*input_ids.shape, -1)


@dataclass
class SlopeLoss(Strategy):
    """The loss `slope * sum(w)` for a `Weights` model: a gradient that is known beforehand."""

    stage: ClassVar[Stage] = Stage.KERNEL
    slot: ClassVar[str | None] = "loss"

    slope: float = 0.5

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        return lambda model, inputs: self.slope * model.w.float().sum()


ONE_TARGET = [row(1, 2)]  # one row with one target token: the divisor is 1


# -- the command line -------------------------------------------------------------------------------------------------


def cli(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """`lowmem ...` in a process of its own, without a hub and without colours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    environment.pop("FORCE_COLOR", None)
    if not env:
        return completed(*arguments, cwd=cwd, env=environment)
    return subprocess.run(  # what is imported may look at its variables
        [sys.executable, "-m", "lowmem", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def here(*arguments: str) -> Done:
    """The same command inside this process, which saves the seconds of importing torch."""
    out, err, old = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["lowmem", *arguments]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as left:
        code = left.code or 0
    finally:
        sys.argv = old
    return Done(code, out.getvalue(), err.getvalue())
