"""Kind 8: optimizer and schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from cases.helpers import SGD, FactorOnLoss, Log, SeeMicroBatches, largest_difference, llama, rows, train, weights
from lowmem import (
    AdamW8bit,
    ChunkedCrossEntropy,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    OptimizerInBackward,
    Packing,
    PureBF16,
    UserError,
)

# -- C-801 ------------------------------------------------------------------------------------------------------------

CURVE = [0, 0.2, 0.4, 0.6, 0.8] + [1 - step / 20 for step in range(20)]  # 5 steps up, 20 down


@pytest.mark.parametrize("extra", [[], [PureBF16()]], ids=["plain", "rounded"])
def test_c801_warm_up_counts_optimizer_steps(extra):
    sgd, log = SGD(), Log()
    train(
        llama(), rows(100, high=8), sgd, GradientAccumulation(), *extra, observers=[log], batch_size=4, max_steps=None,
        warmup_steps=5, learning_rate=1.0, max_grad_norm=1e-3,
    )  # fmt: skip
    assert log.all("step", "learning_rate") == pytest.approx(CURVE)
    if not extra:  # with stand-ins every parameter has an optimizer of its own
        assert sgd.rates == pytest.approx(CURVE)


def test_c801_the_curve_reaches_the_update_in_backward():
    sgd, log = SGD(), Log()
    train(
        llama(), rows(25, high=8), sgd, OptimizerInBackward(), observers=[log], batch_size=1, max_steps=None,
        warmup_ratio=0.2, learning_rate=1.0,
    )  # fmt: skip
    assert log.all("step", "learning_rate") == pytest.approx(CURVE)
    tensors = len(list(llama().parameters()))
    assert sgd.rates == pytest.approx([rate for rate in CURVE for _ in range(tensors)])


# -- C-802 ------------------------------------------------------------------------------------------------------------


def after_an_empty_step(model: nn.Module, *strategies, **changes) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    before = weights(model)
    trainer = train(
        model, rows(4), FactorOnLoss({1: 0.0}), *strategies, max_steps=1, learning_rate=0.1, weight_decay=0.1, **changes
    )
    return {name: (before[name], after) for name, after in weights(trainer.model).items()}


@pytest.mark.parametrize("extra", [[], [OptimizerInBackward()]], ids=["plain", "in_backward"])
def test_c802_norms_do_not_decay(extra):
    pairs = after_an_empty_step(llama(torch.float64), *extra)
    spared = {name for name, (before, after) in pairs.items() if torch.equal(before, after)}
    assert spared == {name for name in pairs if "norm" in name}
    assert len(spared) == 5
    assert sum(pairs[name][0].numel() for name in spared) == 320
    for name, (before, after) in pairs.items():
        if name not in spared:  # embedding and head decay, as the field's description says
            assert torch.allclose(after, before * 0.99, rtol=1e-14, atol=0), name


def test_c802_norms_by_other_names_and_biases_do_not_decay():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # GPT-2 starts its biases at 0, which decay would not move
            parameter.add_(0.1)
    pairs = after_an_empty_step(model)
    spared = {name for name, (before, after) in pairs.items() if torch.equal(before, after)}
    assert {"transformer.ln_f.weight", "transformer.h.0.ln_1.bias", "transformer.h.0.attn.c_attn.bias"} <= spared
    assert spared == {name for name, (before, _) in pairs.items() if before.dim() == 1}


def test_c802_eight_bit_adamw_decays_like_the_other():
    pairs = after_an_empty_step(llama(), AdamW8bit())
    assert all(torch.equal(before, after) for name, (before, after) in pairs.items() if "norm" in name)
    assert all(torch.allclose(after, before * 0.99) for name, (before, after) in pairs.items() if "norm" not in name)


# -- C-803 ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """An embedding of 19,200 values, a linear layer of 8,192, and tensors below 4,096."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, 64)
        self.wide = nn.Linear(64, 128)
        self.thin = nn.Linear(128, 16)
        self.back = nn.Linear(16, 64)
        self.head = nn.Linear(64, 300, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.head(hidden + self.back(torch.tanh(self.thin(torch.tanh(self.wide(hidden))))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "extra",
    [[], [OptimizerInBackward()], [PureBF16()], [OptimizerInBackward(), PureBF16()]],
    ids=lambda extra: "+".join(s.name for s in extra) or "plain",
)
def test_c803_embeddings_keep_moments_of_32_bits(extra, tied):
    trainer = train(Small(tied), rows(12, vocabulary=300), AdamW8bit(), *extra)
    dtypes = {name: trainer.optimizer.state[p]["state1"].dtype for name, p in trainer.run.trainable.items()}
    assert dtypes["embed.weight"] == torch.float32
    assert dtypes["wide.weight"] == torch.uint8
    assert {dtypes[name] for name in ("wide.bias", "thin.weight", "thin.bias", "back.weight")} == {torch.float32}
    if not tied:
        assert dtypes["head.weight"] == torch.uint8


def test_c803_a_second_run_is_not_taken_in_by_the_first():
    """A table keyed by id(parameter) would outlive its parameters and hit others at the same address."""
    for _ in range(3):
        test_c803_embeddings_keep_moments_of_32_bits([], False)


def test_c803_paged_moments_without_a_card_give_a_notice():
    trainer = train(Small(), rows(4, vocabulary=300), AdamW8bit(paged=True))
    assert [
        text for text in trainer.result["notices"] if text.startswith("adamw_8bit.paged: cpu has no managed memory")
    ]


# -- C-805 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [{"steps": 4}, {"micro_batch_size": 1}])
def test_c805_in_backward_refuses_accumulation(split):
    with pytest.raises(
        ConflictError, match=r"gradient_accumulation needs all gradients.*optimizer_in_backward takes that away; drop"
    ):
        train(llama(), rows(4), SGD(), OptimizerInBackward(), GradientAccumulation(**split))


def test_c805_in_backward_refuses_clipping_and_says_how_to_switch_it_off():
    with pytest.raises(ConflictError, match=r"gradient_clipping needs.*optimizer_in_backward.*set max_grad_norm: null"):
        train(llama(), rows(4), OptimizerInBackward(), max_grad_norm=1.0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "extra", [[], [GradientCheckpointing()], [ChunkedCrossEntropy(chunk_size=8)], [Packing()]], ids=str
)
def test_c805_in_backward_equals_plain_descent(tied, extra):
    options = {"learning_rate": 0.1, "max_steps": 4}
    plain = train(llama(torch.float64, tie_word_embeddings=tied), rows(16), SGD(), *extra, **options)
    sgd = SGD()
    fused = train(
        llama(torch.float64, tie_word_embeddings=tied), rows(16), sgd, OptimizerInBackward(), *extra, **options
    )
    assert largest_difference(weights(plain.model), weights(fused.model)) == 0
    assert len(sgd.rates) == 4 * len(list(fused.model.parameters()))  # one update per parameter and step


def test_c805_no_gradient_is_left_after_backward():
    trainer = train(llama(), rows(4), SGD(), OptimizerInBackward(), max_steps=1)
    batch = [trainer.train_dataset[0]]
    trainer.model.train()
    trainer.forward_backward([batch], 1.0)
    assert all(p.grad is None for p in trainer.model.parameters())


# -- C-807 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [[], [AdamW8bit()], [OptimizerInBackward()], [GradientCheckpointing(), ChunkedCrossEntropy()]],
    ids=lambda extra: "+".join(s.name for s in extra) or "plain",
)
def test_c807_frozen_parameters_cost_nothing(extra):
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("model.layers.1.")
    before = weights(model)
    grads = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: grads.append(name))
    trainer = train(model, rows(20), *extra, max_steps=5)
    active = {name for name in before if name.startswith("model.layers.1.")}
    assert set(trainer.run.trainable) == active == set(grads)
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in trainer.run.trainable.values()
    }
    assert len(trainer.optimizer.state) == len(active)
    moved = {name for name, w in weights(trainer.model).items() if not torch.equal(w, before[name])}
    assert moved == active
    assert all(p.grad is None for name, p in trainer.model.named_parameters() if name not in active)


def test_c807_nothing_to_train_is_refused():
    model = llama().requires_grad_(False)
    with pytest.raises(UserError, match="no parameter is trainable"):
        train(model, rows(4))


def test_weights_that_do_not_move_are_reported():
    """A rate too small for float32 weights: training would seem to run, and change nothing."""
    with pytest.raises(UserError, match="no trainable weight has moved"):
        train(llama(), rows(4), SGD(), learning_rate=1e-30)


def test_every_parameter_gets_one_update_per_backward():
    hooks: list[str] = []
    model = llama(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: hooks.append(name))
    seen = SeeMicroBatches()
    train(model, rows(8), seen, ChunkedCrossEntropy(chunk_size=4), GradientCheckpointing(), max_steps=2)
    assert len(seen.steps) == 2
    assert all(hooks.count(name) == 2 for name, _ in model.named_parameters())
