"""What the tests share: small models, rows of different length, and a run in one call. Nothing needs the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the bounds are those of a CPU; a test of the card sets the variable

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowmem import Strategy, Trainer, TrainingConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One folder for all workers of a run, for `two_processes.once`."""
    own = tmp_path_factory.getbasetemp()
    os.environ["LOWMEM_TESTS_SHARED"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(autouse=True)
def collections() -> Iterator[None]:
    """Commands of some seconds switch Python's search for cycles off; the tests that follow in this process want it."""
    yield
    gc.enable()


VOCABULARY = 128
TRAINING = {
    "batch_size": 4,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "max_grad_norm": None,
    "max_length": 64,
    "shuffle": False,
}


def make_llama(dtype: torch.dtype = torch.float32, *, tied: bool = False, seed: int = 0, **config: Any) -> nn.Module:
    """Two layers of width 32, initialised widely enough for attention to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **config})).to(dtype)


def make_rows(number: int = 10, *, weighted: bool = False, seed: int = 0) -> list[dict[str, list[Any]]]:
    """Token ids of 5 to 29 tokens with a masked prompt; the weights are multiples of 1/4, exact in float32."""
    rng = random.Random(seed)
    rows: list[dict[str, list[Any]]] = []
    for _ in range(number):
        length, prompt = rng.randrange(5, 30), rng.randrange(1, 5)
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        row = {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}
        if weighted:
            row["loss_weights"] = [rng.randrange(1, 9) / 4 for _ in ids]  # type: ignore[assignment]
        rows.append(row)
    return rows


@dataclass
class Trained:
    """A finished run: its trainer, every step's metrics, and the weights before and after, by name."""

    trainer: Trainer
    steps: list[dict[str, Any]]
    before: dict[str, Tensor]
    result: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def weights(self) -> dict[str, Tensor]:
        return snapshot(self.trainer.model)

    @property
    def moved(self) -> dict[str, bool]:
        """Trainable name -> whether any of its values changed."""
        return {n: not torch.equal(self.before[n], p) for n, p in self.trainer.run.trainable.items()}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters by name, tied ones once."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def make_trainer(
    strategies: Sequence[Strategy] = (),
    *,
    model: nn.Module | None = None,
    rows: list[dict[str, list[Any]]] | None = None,
    observers: Sequence[Callable[[Any], None]] = (),
    eval_rows: list[dict[str, list[Any]]] | None = None,
    **training: Any,
) -> Trainer:
    """A trainer on the small model; `training` overrides the numbers above (batch 4, 3 steps, no clipping)."""
    return Trainer(
        make_llama() if model is None else model,
        make_rows() if rows is None else rows,
        eval_rows,
        training=TrainingConfig(**{**TRAINING, **training}),
        strategies=strategies,
        observers=observers,
    )


def run_training(strategies: Sequence[Strategy] = (), **options: Any) -> Trained:
    """`make_trainer`, then `.train()`."""
    steps: list[dict[str, Any]] = []

    def record(event: Any) -> None:
        if event.kind == "step":
            steps.append(event.metrics)

    record.on_every_rank = True  # type: ignore[attr-defined]
    trainer = make_trainer(strategies, **{**options, "observers": [*options.pop("observers", ()), record]})
    before = snapshot(trainer.model)
    result = trainer.train()
    return Trained(trainer, steps, before, result)


@pytest.fixture
def tiny_llama() -> Callable[..., nn.Module]:
    return make_llama


@pytest.fixture
def rows() -> list[dict[str, list[Any]]]:
    return make_rows()


@pytest.fixture
def weighted_rows() -> list[dict[str, list[Any]]]:
    return make_rows(weighted=True)


@pytest.fixture
def trainer() -> Callable[..., Trainer]:
    return make_trainer


@pytest.fixture
def train() -> Callable[..., Trained]:
    return run_training
