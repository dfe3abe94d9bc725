"""Kind 1: loss, gradients, accumulation."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases.helpers import SGD, KeepGradients, Log, SeeMicroBatches, largest_difference, llama, row, rows, train, weights
from lowmem import ChunkedCrossEntropy, GradientAccumulation, Trainer, TrainingConfig, UserError

UNEVEN = [row(*range(10, 14 + supervised), masked=4) for supervised in (1, 3, 12)]


def token_losses(model: nn.Module, data: list) -> list[Tensor]:
    """The loss of every supervised token, row by row, each row alone."""
    losses = []
    for sample in data:
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none"))
    return losses


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def right_gradient(data: list = UNEVEN) -> dict[str, Tensor]:
    model = llama(torch.float64)
    return gradients(torch.cat(token_losses(model, data)).mean(), model)


def one_step(model: nn.Module, data: list, *strategies, **changes) -> dict[str, Tensor]:
    kept = KeepGradients()
    train(model, data, kept, SGD(), *strategies, batch_size=len(data), max_steps=1, learning_rate=1.0, **changes)
    return kept.steps[0]


# -- C-101 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 2}, {"steps": 3}])
def test_c101_tokens_count_equally(split):
    strategies = [GradientAccumulation(**split)] if split else []
    assert largest_difference(one_step(llama(torch.float64), UNEVEN, *strategies), right_gradient()) < 1e-10


def test_c101_a_mean_of_means_would_be_seen():
    model = llama(torch.float64)
    wrong = gradients(torch.stack([losses.mean() for losses in token_losses(model, UNEVEN)]).mean(), model)
    right = right_gradient()
    flat = [torch.cat([g.flatten() for g in side.values()]) for side in (wrong, right)]
    assert F.cosine_similarity(*flat, dim=0) < 0.9


def test_c101_loss_weights_count_like_tokens():
    """A row with loss weights is divided by their sum, not by its number of tokens."""
    weighted = [{**UNEVEN[2], "loss_weights": [0.25] * 16}, {**UNEVEN[1], "loss_weights": [2.0] * 7}]
    model = llama(torch.float64)
    one, other = token_losses(model, weighted)
    expected = gradients((0.25 * one.sum() + 2.0 * other.sum()) / (0.25 * len(one) + 2.0 * len(other)), model)
    got = one_step(llama(torch.float64), weighted, GradientAccumulation(micro_batch_size=1))
    assert largest_difference(got, expected) < 1e-10


# -- C-102, C-103 -----------------------------------------------------------------------------------------------------


def test_c102_the_short_window_at_the_end_is_used():
    data = [row(*range(5 + i, 11 + i)) for i in range(8)] + [row(100, 101, 102), row(103, 104, 105)]
    start = weights(llama())["model.embed_tokens.weight"]
    sgd, seen = SGD(), SeeMicroBatches()
    trainer = train(
        llama(), data, sgd, seen, GradientAccumulation(), batch_size=4, max_steps=None, shuffle=False, learning_rate=0.1
    )
    assert len(sgd.rates) == trainer.run.global_step == 3
    assert seen.windows() == [4, 4, 2]
    moved = (weights(trainer.model)["model.embed_tokens.weight"] - start).abs().sum(1) > 0
    assert moved[[100, 101, 103, 104]].all()  # the last token of a row is predicted, never read
    assert not moved[[110, 120]].any()


def test_c103_a_window_ends_with_the_epoch():
    seen, sgd = SeeMicroBatches(), SGD()
    train(
        llama(), rows(7), seen, sgd, GradientAccumulation(), batch_size=3, max_steps=None, num_train_epochs=2,
    )  # fmt: skip
    assert seen.windows() == [3, 3, 1, 3, 3, 1]
    assert len(sgd.rates) == 6


def test_c103_every_row_comes_once_an_epoch():
    data = [row(i, i + 1, i + 2) for i in range(7)]
    seen = SeeMicroBatches()
    train(llama(), data, seen, GradientAccumulation(), batch_size=3, max_steps=None, num_train_epochs=2)
    order = [first for batch in seen.first_tokens for first in batch]
    assert sorted(order[:7]) == sorted(order[7:]) == list(range(7))
    assert order[:7] != order[7:]  # a new order every epoch


# -- C-104 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_c104_the_logged_loss_does_not_depend_on_the_split(steps):
    data = rows(8)
    with torch.no_grad():
        expected = torch.cat(token_losses(llama(), data)).mean().item()
    log = Log()
    train(
        llama(), data, GradientAccumulation(steps=steps), observers=[log], batch_size=8, max_steps=2, learning_rate=0.0
    )
    assert log.all("step", "loss") == pytest.approx([expected] * 2, abs=1e-5)
    assert log.all("log", "loss") == pytest.approx([expected] * 2, abs=1e-5)


def test_c104_a_log_line_is_the_mean_of_its_steps():
    log = Log()
    trainer = train(llama(), rows(8), observers=[log], max_steps=5, logging_steps=2)
    steps = log.all("step", "loss")
    assert log.all("log", "step") == [2, 4, 5]  # the last step is logged, too
    assert log.all("log", "loss") == pytest.approx([sum(steps[:2]) / 2, sum(steps[2:4]) / 2, steps[4]])
    assert trainer.result["train_loss"] == pytest.approx(sum(steps) / 5)


# -- C-105 ------------------------------------------------------------------------------------------------------------


class NoKeywords(nn.Module):
    """A model as people write them: no keyword arguments, and a loss that is a mean."""

    def __init__(self, must_have_labels: bool = False) -> None:
        super().__init__()
        self.inner = llama(torch.float64)
        if must_have_labels:
            self.forward = self.with_labels  # type: ignore[method-assign]

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)

    def with_labels(self, input_ids, labels, attention_mask=None):
        return NoKeywords.forward(self, input_ids, attention_mask, labels)


def test_c105_a_model_without_a_token_count():
    got = one_step(NoKeywords(), UNEVEN, GradientAccumulation(micro_batch_size=1))
    expected = {f"inner.{name}": grad for name, grad in right_gradient().items()}
    assert largest_difference(got, expected) < 1e-10


def test_c105_a_model_that_insists_on_labels_is_refused():
    with pytest.raises(UserError, match=r"NoKeywords\.forward must return logits without labels"):
        one_step(NoKeywords(must_have_labels=True), UNEVEN)


def test_c105_a_model_without_logits_is_refused():
    class OnlyLoss(NoKeywords):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return SimpleNamespace(loss=super().forward(input_ids).logits.mean())

    with pytest.raises(UserError, match="no logits"):
        one_step(OnlyLoss(), UNEVEN)


def test_c105_a_model_without_a_head_it_names_is_refused_by_the_chunked_loss():
    with pytest.raises(UserError, match="head"):
        one_step(NoKeywords(), UNEVEN, ChunkedCrossEntropy())


# -- C-106 ------------------------------------------------------------------------------------------------------------


def test_c106_max_steps_counts_optimizer_steps():
    sgd, seen = SGD(), SeeMicroBatches()
    trainer = train(llama(), rows(64), sgd, seen, GradientAccumulation(), batch_size=4, max_steps=5)
    assert len(sgd.rates) == trainer.run.global_step == trainer.result["steps"] == trainer.scheduler.last_epoch == 5
    assert len(seen.steps) == 20
    assert (trainer.cursor.epoch, trainer.cursor.consumed) == (0, 20)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 6), (0.5, 2), (1 / 3, 1)])
def test_c106_epochs_may_be_a_fraction(epochs, steps):
    sgd = SGD()
    train(llama(), rows(10), sgd, max_steps=None, num_train_epochs=epochs)
    assert len(sgd.rates) == steps == math.ceil(epochs * 3)


# -- C-107 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("extra", [[], [ChunkedCrossEntropy(chunk_size=8)], [GradientAccumulation()]], ids=len)
def test_c107_the_evaluation_loss_does_not_depend_on_its_batches(size, extra):
    data = [row(*range(3, 7 + 3 * i), masked=3) for i in range(1, 10)]  # 4, 7, ... supervised tokens
    model = llama()
    with torch.no_grad():
        expected = torch.cat(token_losses(model, data))
    trainer = Trainer(
        model,
        train_dataset=data,
        eval_dataset=data,
        training=TrainingConfig(eval_batch_size=size, max_length=64),
        strategies=extra,
    )
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert found["eval_tokens"] == len(expected)


def test_c107_a_long_row_weighs_more_than_a_short_one():
    data = [row(1, 2), row(*range(20, 36))]  # 1 and 15 targets
    model = llama()
    with torch.no_grad():
        short, long = (losses.sum().item() for losses in token_losses(model, data))
    loss = Trainer(model, eval_dataset=data, training=TrainingConfig(eval_batch_size=1)).evaluate()["eval_loss"]
    assert loss == pytest.approx((short + long) / 16, abs=1e-5)
    assert abs(loss - (short + long / 15) / 2) > 1e-4
