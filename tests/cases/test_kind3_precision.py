"""Kind 3: precision."""

from __future__ import annotations

import json

import pytest
import torch

from cases.helpers import (
    ONE_TARGET,
    SGD,
    FactorOnLoss,
    KeepGradients,
    Log,
    SlopeLoss,
    Weights,
    llama,
    numbers,
    rows,
    train,
    weights,
)
from lowmem import (
    EMA,
    AdamW8bit,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    PureBF16,
    Trainer,
    UserError,
)
from lowmem.checkpoint import checkpoints
from lowmem.checks import NonFiniteError

FP16 = {"dtype": "float16"}


def trainable_dtypes(trainer: Trainer) -> set[torch.dtype]:
    return {p.dtype for p in trainer.run.trainable.values()}


# -- C-301 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_disk", [True, False])
def test_c301_adapters_are_float32_beside_float16_weights(tmp_path, from_disk):
    model = llama(torch.float16)
    if from_disk:
        model.save_pretrained(tmp_path / "base")
        model = str(tmp_path / "base")
    log = Log()
    trainer = train(model, rows(12), LoRA(r=4), MixedPrecision(**FP16), observers=[log], max_grad_norm=1.0)
    assert trainable_dtypes(trainer) == {torch.float32}
    assert {p.dtype for p in trainer.model.parameters() if not p.requires_grad} == {torch.float16}
    assert log.all("step", "skipped") == [False] * 3


# -- C-302 ------------------------------------------------------------------------------------------------------------


def slope_run(precision: dict, bound: float | None, slope: float = 0.5):
    log = Log()
    trainer = train(
        Weights(torch.ones(1)), ONE_TARGET, SlopeLoss(slope), SGD(), MixedPrecision(**precision), observers=[log],
        batch_size=1, max_steps=1, learning_rate=1.0, max_grad_norm=bound,
    )  # fmt: skip
    return 1.0 - trainer.model.w.item(), log


def test_c302_gradients_are_clipped_in_true_units():
    moved, log = slope_run({"initial_scale": 65536.0, **FP16}, bound=1.0)
    assert moved == pytest.approx(0.5, abs=1e-6)
    assert log.all("step", "grad_norm") == pytest.approx([0.5], abs=1e-6)
    assert log.all("step", "loss") == pytest.approx([0.5], abs=1e-6)  # and so is the loss


def test_c302_a_norm_above_the_bound_is_cut_to_it():
    moved, log = slope_run(FP16, bound=1.0, slope=4.0)
    assert moved == pytest.approx(1.0, abs=1e-5)
    assert log.all("step", "grad_norm") == pytest.approx([4.0], abs=1e-5)


# -- C-303 ------------------------------------------------------------------------------------------------------------


def test_c303_an_overflow_is_skipped_everywhere(tmp_path):
    seen: list[dict] = []
    rates, log = SGD(), Log()

    def snapshot(event) -> None:
        if event.kind in ("begin", "step"):
            assert all(p.grad is None for p in event.trainer.run.trainable.values())
            average = {n: a.clone() for n, a in event.trainer.strategies[ema_at].state_dict()["average"].items()}
            seen.append({"weights": weights(event.trainer.model), "average": average})

    trainer = Trainer(
        llama(),
        train_dataset=rows(40),
        training=numbers(
            max_steps=5, warmup_steps=3, learning_rate=0.1, max_grad_norm=1.0, output_dir=str(tmp_path / "run")
        ),
        strategies=[
            MixedPrecision(**FP16),
            FactorOnLoss({2: float("inf")}),
            rates,
            EMA(decay=0.5),
            GradientAccumulation(),
        ],
        observers=[snapshot, log],
    )
    ema_at = [s.name for s in trainer.strategies].index("ema")
    trainer.train()
    assert log.all("step", "skipped") == [False, True, False, False, False]
    assert log.all("step", "loss_scale") == [65536.0, 32768.0, 32768.0, 32768.0, 32768.0]
    assert all(torch.equal(w, seen[1]["weights"][n]) for n, w in seen[2]["weights"].items())
    assert all(torch.equal(a, seen[1]["average"][n]) for n, a in seen[2]["average"].items())
    assert any(not torch.equal(w, seen[2]["weights"][n]) for n, w in seen[3]["weights"].items())
    assert trainer.scheduler.last_epoch == len(rates.rates) == 4
    assert rates.rates == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1])  # the skipped step did not use up a rate
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("skipped") for line in lines if line["event"] == "log"] == [False, True, False, False, False]


# -- C-304 ------------------------------------------------------------------------------------------------------------


def hundred_small_updates(*strategies) -> torch.Tensor:
    trainer = train(
        Weights(torch.ones(2048, dtype=torch.bfloat16)), ONE_TARGET, SlopeLoss(1.0), SGD(), *strategies,
        batch_size=1, max_steps=100, learning_rate=1e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    return trainer.model.w.detach()


def test_c304_small_updates_survive_in_bfloat16():
    w = hundred_small_updates(PureBF16())
    assert w.dtype == torch.bfloat16
    assert w.float().mean().item() == pytest.approx(0.9, abs=2e-3)
    assert (w.float() - 0.9).abs().max() < 0.1  # a walk of 100 steps, each up or down by less than 1/256
    assert len(w.unique()) > 3


def test_c304_small_updates_survive_in_backward_too():
    w = hundred_small_updates(PureBF16(), OptimizerInBackward())
    assert w.float().mean().item() == pytest.approx(0.9, abs=2e-3)


def test_c304_plain_bfloat16_is_raised_to_float32():
    w = hundred_small_updates()
    assert w.dtype == torch.float32
    assert w.tolist() == pytest.approx([0.9] * 2048, abs=1e-5)


# -- C-305 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "extra",
    [[], [GradientAccumulation()], [EMA()], [PureBF16()], [OptimizerInBackward()], [OptimizerInBackward(), PureBF16()]],
    ids=lambda extra: "+".join(s.name for s in extra) or "plain",
)
def test_c305_a_bad_step_stops_the_run_and_touches_nothing(tmp_path, bad, extra):
    seen = []
    log = Log()

    def snapshot(event) -> None:
        if event.kind == "step":
            seen.append(weights(event.trainer.model))

    with pytest.raises(NonFiniteError, match=r"step 3.*(nan|inf).*weights were not updated"):
        train(
            llama(), rows(24), FactorOnLoss({3: bad}), *extra, observers=[snapshot, log],
            max_steps=6, save_steps=1, output_dir=str(tmp_path / "run"),
        )  # fmt: skip
    assert len(seen) == 2
    assert all(torch.isfinite(w).all() for w in seen[-1].values())
    last = log.events[-1].trainer
    assert all(torch.equal(w, seen[-1][n]) for n, w in weights(last.model).items())
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000001", "checkpoint-000002"]


def test_c305_a_bad_gradient_stops_the_run_before_the_update():
    """The loss is fine, its gradient is not: the norm tells."""

    class BentLoss(SlopeLoss):
        def wrap_loss(self, loss, run):
            # sqrt(0) is 0, and its slope infinite
            return lambda model, inputs: (model.w - model.w.detach()).abs().sum().sqrt() + model.w.sum()

    model = Weights(torch.ones(4))
    with pytest.raises(NonFiniteError, match=r"step 1: the gradient's norm is nan"):
        train(model, ONE_TARGET, BentLoss(), batch_size=1, max_grad_norm=1.0)
    assert torch.equal(model.w, torch.ones(4))


# -- C-306 ------------------------------------------------------------------------------------------------------------


def test_c306_trained_weights_are_float32_unless_asked_otherwise(tmp_path):
    llama(torch.bfloat16).save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["dtype"] == "bfloat16"
    trainer = train(str(tmp_path / "base"), rows(8), MixedPrecision(), max_steps=1, output_dir=str(tmp_path / "run"))
    assert trainable_dtypes(trainer) == {torch.float32}
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "float32"


def test_c306_pure_bfloat16_when_asked(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    trainer = train(str(tmp_path / "base"), rows(8), PureBF16(), max_steps=1, output_dir=str(tmp_path / "run"))
    assert trainable_dtypes(trainer) == {torch.bfloat16}
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    for state in trainer.optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_c306_the_matrix_products_run_in_bfloat16(tmp_path):
    model, dtypes = llama(), set()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, i, out: dtypes.add(out.dtype))
    train(model, rows(8), MixedPrecision(), max_steps=1)
    assert dtypes == {torch.bfloat16}


def test_two_precisions_are_refused():
    with pytest.raises(UserError, match=r"pure_bf16 and mixed_precision|mixed_precision and pure_bf16"):
        train(llama(), rows(4), MixedPrecision(), PureBF16())


def test_a_scaler_and_the_optimizer_in_backward_are_refused():
    with pytest.raises(UserError, match=r"mixed_precision needs all gradients.*optimizer_in_backward.*bfloat16"):
        train(llama(), rows(4), MixedPrecision(**FP16), OptimizerInBackward())


def test_moments_in_eight_bits_work_with_float16():
    kept = KeepGradients()
    trainer = train(llama(), rows(12), MixedPrecision(**FP16), AdamW8bit(), kept)
    assert all(torch.isfinite(g).all() for step in kept.steps for g in step.values())
    assert trainable_dtypes(trainer) == {torch.float32}
