"""After the first step with a rate above zero a weight has moved, or the run stops and says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import make_llama, make_trainer, run_training
from torch import nn
from torch.optim import Optimizer

from lowmem import (
    AdamW8bit,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    PureBF16,
    Stage,
    Strategy,
    Trainer,
    UserError,
)
from lowmem.checks import FirstUpdate
from lowmem.strategy import MakeOptimizer, Step


@dataclass
class Swallows(Strategy):
    """A strategy with a fault: the step never reaches the optimizer."""

    stage = Stage.CLIP

    def wrap_step(self, step: Step, run: Any) -> Step:
        return lambda: None


@dataclass
class UpdatesCopies(Strategy):
    """A strategy with the fault that a first draft of pure_bf16 had: the optimizer holds copies of the weights."""

    stage = Stage.PLACEMENT

    def wrap_optimizer(self, make: MakeOptimizer, run: Any) -> MakeOptimizer:
        def over_copies(parameters: list[nn.Parameter]) -> Optimizer:
            return make([nn.Parameter(p.detach().clone()) for p in parameters])

        return over_copies


@dataclass
class LosesGradients(Strategy):
    """A strategy with a fault: it clears the gradients before the step."""

    stage = Stage.CLIP

    def wrap_step(self, step: Step, run: Any) -> Step:
        def cleared() -> None:
            for parameter in run.trainable.values():
                parameter.grad = None
            step()

        return cleared


@pytest.mark.parametrize("fault", [Swallows, UpdatesCopies, LosesGradients])
@pytest.mark.parametrize(
    "partners", [[], [LoRA], [PureBF16], [AdamW8bit], [GradientAccumulation]], ids=lambda p: p[0].__name__ if p else "-"
)
def test_an_update_that_goes_nowhere_is_caught(fault: type[Strategy], partners: list[type[Strategy]]) -> None:
    with pytest.raises(UserError, match="step 1: no trainable weight has moved") as caught:
        run_training([fault(), *(p() for p in partners)])
    assert "two strategies do not work together" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rate_too_small_for_the_weights_is_caught() -> None:
    """1e-30 changes no float32 weight; nobody should wait for the end of such a run."""
    with pytest.raises(UserError, match="learning rate is too small for the weights' dtype"):
        run_training(learning_rate=1e-30)


def test_no_gradient_at_all_is_caught() -> None:
    """The only trainable weight is one that the loss does not depend on."""
    model = make_llama()
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.unused = nn.Parameter(torch.ones(3))
    model.model.norm.weight.requires_grad = True
    model.model.norm.register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    model.model.norm.forward = lambda hidden: hidden * (model.model.norm.weight * 0 + 1)
    with pytest.raises(UserError, match="no trainable weight has moved"):
        run_training(model=model)


@pytest.mark.parametrize("place", [[], [OptimizerInBackward], [PureBF16], [AdamW8bit], [LoRA]], ids=str)
def test_a_warm_up_that_begins_at_zero_is_no_error(place: list[type[Strategy]]) -> None:
    run = run_training([p() for p in place], warmup_steps=2, max_steps=3)
    assert run.steps[0]["learning_rate"] == 0.0
    assert any(run.moved.values())


def test_a_fault_behind_a_warm_up_is_caught_at_the_first_step_that_counts() -> None:
    with pytest.raises(UserError, match="step 2: no trainable weight has moved"):
        run_training([LosesGradients()], warmup_steps=2, max_steps=6)


def test_a_skipped_step_is_no_error_and_the_one_after_is_looked_at() -> None:
    float16 = {"dtype": "float16", "initial_scale": 2.0**30}
    run = run_training([MixedPrecision(**float16)], max_steps=16)
    assert run.steps[0]["skipped"]
    assert any(run.moved.values())
    with pytest.raises(UserError, match="no trainable weight has moved"):
        run_training([MixedPrecision(**float16), LosesGradients()], max_steps=16)


def test_one_moving_weight_is_enough() -> None:
    """Rows of an embedding that no token meets, and LoRA's A at the first step, stay where they are for a while."""
    model = make_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == "model.embed_tokens.weight"
    run = run_training(model=model, max_steps=1)
    assert run.moved == {"model.embed_tokens.weight": True}
    assert run_training([LoRA()], max_steps=1).steps


def test_it_costs_no_copy_of_the_weights() -> None:
    """Sums, not copies: what the check holds is a number per tensor."""
    trainer = make_trainer()
    check = FirstUpdate(trainer.run)
    assert check.before is not None
    assert all(isinstance(value, float) for value in check.before)
    assert len(check.before) == len(trainer.run.trainable)


@pytest.mark.parametrize("bad", [{"input_ids": [1, 2, 9_999]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 9_999]}])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_token_ids_beyond_the_model_s_are_refused(bad, split):
    good = [{"input_ids": [1, 2, 3]}]
    sets = (good, [*good, bad]) if split == "eval" else ([*good, bad], good)
    with pytest.raises(UserError, match=r"(token id|label) 9999, and the model knows .* another tokenizer"):
        Trainer(make_llama(), *sets)
