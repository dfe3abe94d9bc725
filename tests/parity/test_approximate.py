"""Approximate strategies: each against plain training or against the same arithmetic written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Trained, make_llama, make_rows, make_trainer, run_training, snapshot
from registry import APPROXIMATE, Row, together
from torch import nn

from lowmem import (
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
)

STEPS = 8


def wide_llama(dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """Wide enough for the 8-bit optimizer to use 8 bits (4,096 values and more)."""
    return make_llama(dtype, hidden_size=64, intermediate_size=128, **config)


# -- against the run without it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", APPROXIMATE, ids=lambda row: row.id)
def test_losses_stay_near_the_run_without_it(row: Row) -> None:
    partners = [partner() for partner in row.partners]
    plain = run_training(partners, model=wide_llama(), max_steps=STEPS)
    approximate = run_training(together(row), model=wide_llama(), max_steps=STEPS)
    worst = max(abs(a - b) / b for a, b in zip(approximate.losses, plain.losses, strict=True))
    assert row.bound is not None
    assert worst <= row.bound
    assert approximate.losses[-1] < plain.losses[0]
    # An adapter starts as nothing; everything else rounds from the first step on: an equal loss means it did nothing.
    if row.key == "lora":
        assert approximate.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
        assert approximate.losses[-1] != plain.losses[-1]
    else:
        assert approximate.losses != plain.losses


# -- LoRA against a loop with peft ------------------------------------------------------------------------------------

VARIANTS = {
    "lora": {"r": 8, "lora_alpha": 16},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
    "some-modules": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "head-in-full": {"r": 4, "modules_to_save": ["lm_head"]},
}


def peft_by_hand(base: nn.Module, rows: list[dict[str, list[Any]]], start: dict[str, Any], **lora: Any) -> Any:
    """Three steps of AdamW on peft's adapters, in plain torch, from the adapter weights `start`."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"r": 16, "lora_alpha": 32, "target_modules": targets, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**{**settings, **lora}))
    assert not model.load_state_dict(start, strict=False).unexpected_keys
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    model.train()
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 5e-3 * (3 - step) / 3
        total, targets_seen = torch.zeros(()), 0
        for row in rows[step * 4 : step * 4 + 4]:
            labels = torch.tensor(row["labels"][1:])
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets_seen += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / targets_seen).backward()
        optimizer.step()
    return model


def lora_run(dtype: torch.dtype, partners: tuple[Any, ...] = (), eps: float = 1e-8, **lora: Any) -> Trained:
    return run_training([LoRA(**lora), *partners, AdamW(eps=eps)], model=make_llama(dtype), learning_rate=5e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "partners",
    [(), (ChunkedCrossEntropy, GradientCheckpointing, GradientAccumulation, Packing)],
    ids=["alone", "with-exact-ones"],
)
def test_lora_is_that_of_peft(variant: str, partners: tuple[Any, ...]) -> None:
    """float64 to 1e-9: the same parameters, scale, frozen weights and update as peft's own adapters."""
    settings = VARIANTS[variant]
    run = lora_run(torch.float64, tuple(partner() for partner in partners), **settings)
    start = {name: run.before[name] for name in run.trainer.run.trainable}
    expected = peft_by_hand(make_llama(torch.float64), make_rows(), start, **settings)
    weights = dict(expected.named_parameters())
    assert run.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert run.trainer.model.get_parameter(name).requires_grad == weight.requires_grad, name
        torch.testing.assert_close(run.weights[name], weight.detach(), rtol=0, atol=1e-9, msg=name)
        if not weight.requires_grad:
            assert torch.equal(run.weights[name], run.before[name]), f"{name} is frozen and has moved"


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_in_float32(variant: str) -> None:
    """float32: the update as a whole, B A, to 1e-4 of its size (AdamW amplifies what float32 rounds)."""
    settings = VARIANTS[variant]
    run = lora_run(torch.float32, **settings)
    start = {name: run.before[name] for name in run.trainer.run.trainable}
    expected = peft_by_hand(make_llama(), make_rows(), start, **settings).merge_and_unload()
    merged, base = run.trainer.model.merge_and_unload(), snapshot(make_llama())
    for name, weight in expected.named_parameters():
        way = (weight - base[name]).norm()
        assert (merged.get_parameter(name) - weight).norm() <= 1e-4 * way + 1e-7, name


def test_merged_adapter_is_the_same_model_and_of_low_rank() -> None:
    run = lora_run(torch.float64, r=3)
    model, ids = run.trainer.model, torch.tensor([make_rows()[0]["input_ids"]])
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(make_llama(torch.float64)(input_ids=ids).logits, adapted)
    base = snapshot(make_llama(torch.float64))
    for name, weight in merged.named_parameters():
        delta = weight.detach() - base[name]
        if name.endswith("_proj.weight"):
            assert torch.linalg.matrix_rank(delta, rtol=1e-9) == 3, name
        else:
            assert torch.equal(weight, base[name]), name


def test_lora_dropout_changes_training_and_not_evaluation() -> None:
    runs = [run_training([LoRA(lora_dropout=p)], eval_rows=make_rows(4, seed=1)) for p in (0.0, 0.5)]
    assert runs[0].losses != runs[1].losses
    again = runs[1].trainer.evaluate()["eval_loss"]
    assert again == runs[1].result["eval_loss"]


# -- quantised base weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"double_quant": False}, {"format": "fp4"}], ids=str)
@pytest.mark.parametrize("partners", [(), (GradientCheckpointing, ChunkedCrossEntropy)], ids=["alone", "checkpointed"])
def test_qlora_is_lora_on_the_dequantised_weights(settings: dict[str, Any], partners: tuple[Any, ...]) -> None:
    """With float32 products, training on 4-bit weights is training on what they stand for."""
    import bitsandbytes as bnb

    quantization = Quantization(compute_dtype="float32", **settings)
    run = run_training([quantization, LoRA(r=4), *(p() for p in partners)], model=wide_llama(), learning_rate=5e-3)
    base = wide_llama()
    replaced = 0
    for name, module in run.trainer.model.get_base_model().named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain = base.get_submodule(name.removesuffix(".base_layer"))
            assert not torch.equal(plain.weight, weight)
            plain.weight.data = weight.float()
            replaced += 1
    assert replaced == 14, "seven linear layers in each of two blocks"
    start = {name: run.before[name] for name in run.trainer.run.trainable}
    expected = peft_by_hand(base, make_rows(), start, r=4)
    for name, parameter in run.trainer.run.trainable.items():
        weight = expected.get_parameter(name).detach()
        way = (weight - run.before[name]).norm()
        assert (parameter - weight).norm() <= 1e-3 * way, name


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8"])
def test_quantised_weights_are_few_bits_and_frozen(format: str) -> None:
    trainer = make_trainer([Quantization(format=format), LoRA(r=4)], model=wide_llama(torch.bfloat16))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    whole = snapshot(wide_llama(torch.bfloat16))
    for name, parameter in trainer.model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" in name:
            assert parameter.requires_grad
            assert parameter.dtype is torch.float32
            continue
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name]), f"{name} is frozen and has moved"
        if "_proj" in name:
            assert parameter.element_size() == 1
            assert parameter.numel() == whole[plain].numel() // (1 if format == "int8" else 2)
        else:  # C-705: embeddings, norms and head stay what they are, and their bytes do
            assert parameter.dtype is torch.bfloat16
            assert torch.equal(parameter, whole[plain])


# -- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_16_bits_and_keeps_32(dtype: str) -> None:
    seen = set()
    model = wide_llama()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    run = run_training([MixedPrecision(dtype=dtype)], model=model)
    assert seen == {getattr(torch, dtype)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    states = [t for state in run.trainer.optimizer.state.values() for k, t in state.items() if k != "step"]
    assert {t.dtype for t in states} == {torch.float32}


def test_float16_overflow_skips_the_whole_step() -> None:
    """A scale that overflows is halved until it fits; meanwhile weights and schedule stay where they are."""
    run = run_training(
        [MixedPrecision(dtype="float16", initial_scale=2.0**40)], max_steps=30, max_grad_norm=1.0, learning_rate=1e-3
    )
    skipped = [step["skipped"] for step in run.steps]
    first = skipped.index(False)
    assert 0 < first < 29
    assert all(skipped[:first])
    rates = [step["learning_rate"] for step in run.steps]
    assert rates[: first + 1] == [rates[0]] * (first + 1)
    assert rates[first + 1] < rates[0]
    scales = [step["loss_scale"] for step in run.steps[: first + 1]]
    assert scales[:first] == [2.0 ** (39 - i) for i in range(first)]
    # once it fits, training is that of a scale that always did
    calm = run_training([MixedPrecision(dtype="float16")], max_steps=30, max_grad_norm=1.0)
    assert run.losses[0] == pytest.approx(calm.losses[0], rel=1e-3)


@pytest.mark.parametrize("partners", [(), (ChunkedCrossEntropy,), (GradientAccumulation,)], ids=len)
def test_float16_gradients_are_in_true_units(partners: tuple[Any, ...]) -> None:
    """Clipping and its logged norm see unscaled gradients, whatever the scale."""
    plain = run_training(max_grad_norm=1.0)
    for scale in (2.0**8, 2.0**14):
        mixed = [MixedPrecision(dtype="float16", initial_scale=scale), *(p() for p in partners)]
        run = run_training(mixed, max_grad_norm=1.0)
        for got, expected in zip(run.steps, plain.steps, strict=True):
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-3)


def test_pure_bf16_keeps_all_weights_in_16_bits_and_moments_in_32() -> None:
    model = wide_llama()
    buffers = {n: b.dtype for n, b in model.named_buffers()}
    grads = set()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: grads.add(g.dtype))
    run = run_training([PureBF16()], model=model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert grads == {torch.bfloat16}
    assert {n: b.dtype for n, b in model.named_buffers()} == buffers, "rotary frequencies need their precision"
    moments = {t.dtype for s in run.trainer.optimizer.state.values() for k, t in s.items() if k != "step"}
    assert moments == {torch.float32}


def test_pure_bf16_does_not_lose_small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty updates of a fiftieth of a bfloat16 step each: to nearest, hardly any of them would arrive."""
    options = {"learning_rate": 1e-5, "max_steps": 40, "lr_scheduler_type": "constant"}
    wide = run_training(model=wide_llama(), **options)
    directions = {n: wide.weights[n] - w for n, w in wide.before.items()}
    length = sum(float(d.square().sum()) for d in directions.values())

    def share_that_arrived() -> float:
        run = run_training([PureBF16()], model=wide_llama(), **options)
        moves = {n: run.weights[n].float() - w.float() for n, w in run.before.items()}
        return sum(float((moves[n] * d).sum()) for n, d in directions.items()) / length

    assert share_that_arrived() == pytest.approx(1.0, abs=0.15)
    monkeypatch.setattr("lowmem.strategies.pure_bf16.stochastic_round", lambda values: values.to(torch.bfloat16))
    assert share_that_arrived() < 0.5


# -- 8-bit moments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partners", [[], [OptimizerInBackward], [PureBF16], [PureBF16, OptimizerInBackward]], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
def test_8bit_moments_are_8_bit_except_embeddings_and_small_tensors(paged: bool, partners: list[Any]) -> None:
    """C-803. Head and embedding have 300 x 64 values each, the linear layers 4,096 or 8,192, the norms 64."""
    model = wide_llama(vocab_size=300, num_key_value_heads=4)
    run = run_training([AdamW8bit(paged=paged), *(partner() for partner in partners)], model=model)
    for name, parameter in run.trainer.run.trainable.items():
        state = run.trainer.optimizer.state[parameter]
        narrow = parameter.numel() >= 4096 and "embed" not in name
        for moment in ("state1", "state2"):
            assert state[moment].dtype is (torch.uint8 if narrow else torch.float32), name
            assert state[moment].numel() == parameter.numel()
    assert any("paged" in notice for notice in run.result["notices"]) is paged


def test_8bit_moments_of_a_tied_head_stay_wide() -> None:
    run = run_training([AdamW8bit()], model=wide_llama(vocab_size=300, tied=True))
    state = run.trainer.optimizer.state[run.trainer.model.lm_head.weight]
    assert state["state1"].dtype is torch.float32


def test_8bit_update_is_near_that_of_adamw() -> None:
    narrow = run_training([AdamW8bit()], model=wide_llama(), max_steps=STEPS)
    wide = run_training([], model=wide_llama(), max_steps=STEPS)
    for name, weight in wide.weights.items():
        way = (weight - wide.before[name]).norm()
        assert (narrow.weights[name] - weight).norm() <= 0.15 * way, name
