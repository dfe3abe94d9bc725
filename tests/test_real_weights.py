"""A pretrained model: SmolLM2 learns a small task, and its adapter works in plain peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases.helpers import Log
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem import (
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    ModelConfig,
    Quantization,
    Trainer,
    TrainingConfig,
)
from lowmem.fetch import fetch

pytestmark = pytest.mark.slow

PLACES = ["Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Seoul", "Paris", "Delhi", "Turin", "Kyiv", "Accra", "Dakar"]


def chats() -> list[dict]:
    """A fixed answer format that the model does not know."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"A trip to {place} costs {17 * n + 40} euros."},
                {"role": "assistant", "content": f"<<{place.upper()}|{17 * n + 40}>>"},
            ]
        }
        for n, place in enumerate(PLACES, start=1)
    ]


@pytest.fixture(scope="module")
def weights() -> Path:
    return fetch("smollm2")


def plain_base(weights: Path) -> torch.nn.Module:
    """Loaded by transformers alone."""
    torch.manual_seed(0)
    if weights.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32").eval()
    return AutoModelForCausalLM.from_pretrained(weights, dtype="float32").eval()


def fine_tune(folder: Path, *strategies, **changes) -> tuple[Trainer, list[float]]:
    log = Log()
    rows = chats()
    trainer = Trainer(
        ModelConfig("smollm2", dtype="float32"),
        train_dataset=rows,
        eval_dataset=rows[:6],
        training=TrainingConfig(
            **{
                "batch_size": 6,
                "max_steps": 6,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "constant",
                "max_length": 96,
                "logging_steps": 1,
                "output_dir": str(folder),
                **changes,
            }
        ),
        strategies=[*strategies, GradientCheckpointing(), GradientAccumulation(), ChunkedCrossEntropy()],
        observers=[log],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, [before, *log.all("step", "loss"), trainer.result["eval_loss"]]


def test_the_adapter_answers_the_same_in_plain_peft(weights, tmp_path):
    trainer, losses = fine_tune(tmp_path / "run", LoRA(r=8))
    assert losses[-1] < 0.6 * losses[0], losses
    assert trainer.train_dataset.report.supervised_tokens > 60
    with torch.no_grad():
        ids = torch.tensor([trainer.train_dataset[0]["input_ids"].tolist()])
        expected = trainer.model(input_ids=ids).logits
        untouched = plain_base(weights)
        plain = untouched(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(untouched, tmp_path / "run" / "model").eval()
        got = loaded(input_ids=ids).logits
    assert torch.equal(got, expected)
    assert (got - plain).abs().max() > 0.1  # the adapter does something
    assert {p.name for p in (tmp_path / "run" / "model").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer_config.json",
    }


def test_beside_four_bit_weights(weights, tmp_path):
    """The base is rounded in training only: on the exact weights the adapter has learnt the task, too."""
    _, losses = fine_tune(tmp_path / "run", Quantization(compute_dtype="float32"), LoRA(r=8))
    assert losses[-1] < 0.6 * losses[0], losses
    base = PeftModel.from_pretrained(plain_base(weights), tmp_path / "run" / "model")
    own = Trainer(
        base.requires_grad_(True),
        eval_dataset=chats()[:6],
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "run" / "model"),
        training=TrainingConfig(max_length=96),
    )
    assert own.evaluate()["eval_loss"] < 0.7 * losses[0]
