"""The numbers of the schedule reach the update, under every optimizer and wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training, snapshot
from torch import Tensor, nn

from lowmem import (
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    PureBF16,
    Quantization,
    Stage,
    Strategy,
    TrainingConfig,
)
from lowmem.schedule import lr_lambda
from lowmem.strategy import Loss

PLACES: dict[str, Callable[[], list[Strategy]]] = {
    "adamw": list,
    "adamw-unfused": lambda: [AdamW(fused=False)],
    "adamw-8bit": lambda: [AdamW8bit()],
    "in-backward": lambda: [OptimizerInBackward()],
    "in-backward+8bit": lambda: [OptimizerInBackward(), AdamW8bit()],
    "pure-bf16": lambda: [PureBF16()],
    "pure-bf16+8bit": lambda: [PureBF16(), AdamW8bit()],
    "pure-bf16+in-backward": lambda: [PureBF16(), OptimizerInBackward()],
    "pure-bf16+in-backward+8bit": lambda: [PureBF16(), OptimizerInBackward(), AdamW8bit()],
    "fp16": lambda: [MixedPrecision(dtype="float16", initial_scale=256.0)],
    "accumulation": lambda: [GradientAccumulation()],
    "lora": lambda: [LoRA(r=4)],
    "qlora+8bit": lambda: [Quantization(), LoRA(r=4), AdamW8bit()],
    "lora+in-backward": lambda: [LoRA(r=4), OptimizerInBackward()],
}
places = pytest.mark.parametrize("place", PLACES)


def wide_llama(**config: Any) -> nn.Module:
    return make_llama(hidden_size=64, intermediate_size=128, **config)


class Moves:
    """An observer that notes by how much the trainable weights have moved in each step."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}
        self.norms: list[float] = []

    def __call__(self, event: Any) -> None:
        if event.kind not in ("begin", "step"):
            return
        now = {n: p.detach().double() for n, p in event.trainer.run.trainable.items()}
        if event.kind == "step":
            self.norms.append(torch.stack([(now[n] - w).norm() for n, w in self.last.items()]).norm().item())
        self.last = {n: w.clone() for n, w in now.items()}


@places
def test_the_schedule_reaches_the_update(place: str) -> None:
    """Two steps of warm-up: at rate 0 nothing moves, then all that is trained does; the last rates are small again."""
    moves = Moves()
    run = run_training(
        PLACES[place](),
        model=wide_llama(),
        rows=make_rows(4),
        observers=[moves],
        learning_rate=2e-2,
        max_steps=8,
        warmup_steps=2,
    )
    rates = [step["learning_rate"] for step in run.steps]
    assert rates == pytest.approx([2e-2 * f for f in (0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])
    assert moves.norms[0] == 0.0
    assert all(norm > 0 for norm in moves.norms[1:])
    assert all(run.moved.values())
    assert moves.norms[7] < 0.5 * moves.norms[2]


@places
def test_the_update_is_proportional_to_the_rate(place: str) -> None:
    """The first step at 4 times the rate goes 4 times as far (bfloat16 rounds at random, so nearly so)."""
    norms = []
    for rate in (5e-3, 2e-2):
        moves = Moves()
        options = {
            "learning_rate": rate,
            "max_steps": 2,
            "warmup_steps": 1,
            "lr_scheduler_type": "constant_with_warmup",
        }
        run_training(PLACES[place](), model=wide_llama(), rows=make_rows(4), observers=[moves], **options)
        assert moves.norms[0] == 0.0
        norms.append(moves.norms[1])
    assert norms[1] / norms[0] == pytest.approx(4, rel=0.05 if "bf16" in place else 1e-3)


@places
def test_groups_and_state_are_the_live_ones(place: str) -> None:
    """A rate of zero written into the groups stops the update, and every stepped parameter has its state."""
    trainer = make_trainer(PLACES[place](), model=wide_llama(), rows=make_rows(4), max_steps=2)
    trainer.train()
    trained = list(trainer.run.trainable.values())
    grouped = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(trained)
    for parameter in trained:
        assert parameter in trainer.optimizer.state
        moments = [t for t in trainer.optimizer.state[parameter].values() if isinstance(t, Tensor) and t.numel() > 1]
        assert moments
        assert all(moment.count_nonzero() for moment in moments)
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert all(p not in trainer.optimizer.state for p in frozen), "C-807: frozen weights cost no optimizer state"
    assert all(p.grad is None for p in frozen)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    before = snapshot(trainer.model)
    trainer.model.train()
    trainer.forward_backward([[trainer.train_dataset[0]]], 1.0)
    trainer.optimizer.step()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


# -- C-802: decay -----------------------------------------------------------------------------------------------------


@dataclass
class NoGradient(Strategy):
    """Multiplies the loss by zero: gradients exist and are zero, so only the decay is left."""

    stage = Stage.KERNEL

    def wrap_loss(self, loss: Loss, run: Any) -> Loss:
        return lambda model, inputs: loss(model, inputs) * 0.0


@pytest.mark.parametrize(
    "make",
    [list, lambda: [OptimizerInBackward()], lambda: [AdamW8bit()], lambda: [AdamW8bit(), OptimizerInBackward()]],
    ids=["adamw", "in-backward", "8bit", "8bit-in-backward"],
)
def test_norms_do_not_decay(make: Callable[[], list[Strategy]]) -> None:
    """C-802: 5 norms with 320 values stay; every matrix and embedding is multiplied by 1 - 0.1 * 0.1."""
    run = run_training([*make(), NoGradient()], model=wide_llama(), max_steps=1, learning_rate=0.1, weight_decay=0.1)
    spared = [name for name, p in run.trainer.run.trainable.items() if torch.equal(run.before[name], p)]
    assert len(spared) == 5
    assert sum(run.before[name].numel() for name in spared) == 320
    assert all("norm" in name for name in spared)
    for name, weight in run.weights.items():
        if name not in spared:
            torch.testing.assert_close(weight, run.before[name] * 0.99, rtol=1e-6, atol=0)


def test_norms_and_biases_of_any_name_are_spared() -> None:
    """GPT-2 calls its norms ln_1, ln_2 and ln_f, and its matrices are no nn.Linear."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=128, n_positions=64, attn_pdrop=0, embd_pdrop=0)
    )
    run = run_training([NoGradient()], model=model, max_steps=1, learning_rate=0.1, weight_decay=0.1)
    spared = {name for name, p in run.trainer.run.trainable.items() if torch.equal(run.before[name], p)}
    assert spared == {name for name, p in model.named_parameters() if p.ndim == 1}
    assert {"transformer.ln_f.weight", "transformer.h.0.ln_1.weight", "transformer.h.0.attn.c_attn.bias"} <= spared


# -- C-801: the schedule ----------------------------------------------------------------------------------------------


def test_warm_up_is_in_optimizer_steps() -> None:
    """C-801: 100 micro-batches, 4 per step, 5 steps of warm-up: 25 rates, whatever the split."""
    expected = [0.0, 0.2, 0.4, 0.6, 0.8, *(1 - i / 20 for i in range(20))]
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 100
    for strategies in ([], [GradientAccumulation()], [GradientAccumulation(steps=2)]):
        options = {"max_steps": None, "num_train_epochs": 1, "warmup_steps": 5, "learning_rate": 1e-4}
        run = run_training(strategies, rows=rows, **options)
        assert [step["learning_rate"] / 1e-4 for step in run.steps] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 3}, {"warmup_ratio": 0.25}], ids=str)
def test_schedules_are_those_of_transformers(kind: str, warmup: dict[str, Any]) -> None:
    from transformers import get_scheduler

    if kind == "constant" and warmup:
        pytest.skip("refused: constant has no warm-up")
    total = 12
    config = TrainingConfig(lr_scheduler_type=kind, learning_rate=1.0, **warmup)  # type: ignore[arg-type]
    ours = [lr_lambda(config, total)(step) for step in range(total)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = warmup.get("warmup_steps") or -(-total * warmup.get("warmup_ratio", 0) // 1)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=int(steps), num_training_steps=total)
    expected = []
    for _ in range(total):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert ours == pytest.approx(expected)


def test_a_step_that_the_loss_scaler_skips_does_not_advance_the_schedule() -> None:
    run = run_training([MixedPrecision(dtype="float16", initial_scale=2.0**30)], max_steps=20, warmup_steps=2)
    taken = [step for step in run.steps if not step["skipped"]]
    assert len(taken) < 20
    assert [s["learning_rate"] for s in taken[:3]] == pytest.approx([0.0, 5e-4, 1e-3])


# -- where the update runs --------------------------------------------------------------------------------------------


def test_in_backward_is_the_same_update_as_at_the_step() -> None:
    """C-805, with one micro-batch: equal weights, tied ones and a chunked loss among them, for both optimizers."""
    for optimizer in (AdamW, AdamW8bit):
        for tied in (False, True):
            runs = [
                run_training([optimizer(), ChunkedCrossEntropy(chunk_size=8), *placed], model=wide_llama(tied=tied))
                for placed in ([], [OptimizerInBackward()])
            ]
            for name, weight in runs[0].weights.items():
                torch.testing.assert_close(runs[1].weights[name], weight, rtol=1e-6, atol=1e-7)


def test_settings_of_the_optimizers_arrive() -> None:
    for make in (AdamW, AdamW8bit):
        for place in ([], [OptimizerInBackward()], [PureBF16()]):
            trainer = make_trainer([make(betas=(0.5, 0.6), eps=1e-3), *place], weight_decay=0.25, learning_rate=0.125)
            groups = trainer.optimizer.param_groups
            for group in groups:
                assert tuple(group["betas"]) == (0.5, 0.6)
                assert group["eps"] == 1e-3
                assert group["lr"] == 0.125
            trained = trainer.run.trainable.values()
            decays = [group["weight_decay"] for group in groups for _ in group["params"]]
            assert sorted(decays) == sorted(0.25 if p.ndim >= 2 else 0.0 for p in trained)
            if place:  # one group per parameter, in order
                assert decays == [0.25 if p.ndim >= 2 else 0.0 for p in trained]
