from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, GPT2Config, LlamaConfig, LlamaForCausalLM

from lowmem import UserError, estimate_memory_usage
from lowmem.memory.rule_of_thumb import MemoryEstimate, activation_dtype, logical_size, stored_bytes

GB = 1024**3


def solar(**changes) -> LlamaConfig:
    shape = {"num_hidden_layers": 48, "hidden_size": 4096, "intermediate_size": 14336}
    return LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8, **{"dtype": "float16", **changes})


def tiny(**changes) -> LlamaConfig:
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaConfig(**{**shape, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes})


def test_solar_with_vocabulary_64000_is_exact(capsys):
    result = estimate_memory_usage(solar(vocab_size=64_000))
    assert result.parameters == result.trainable_parameters == 10_993_668_096
    assert result.parameter_bytes == result.gradient_bytes == 21_987_336_192
    assert result.optimizer_bytes == 43_974_672_384
    assert result.activation_bytes == 402_653_184
    assert result.total_bytes == 88_351_997_952
    printed = capsys.readouterr().out
    assert printed.strip() == str(result) == result.table()
    figures = {line.split()[0]: line.split()[1] for line in printed.splitlines()[1:]}
    assert figures == {
        "model": "20.48",
        "gradients": "20.48",
        "optimizer": "40.95",
        "activation": "0.38",
        "total": "82.28",
    }
    assert f"{float(result):.2f}" == "82.28"
    assert float(result) == result.total_bytes / GB


def test_solar_as_published():
    result = estimate_memory_usage(solar(vocab_size=32_000, dtype="bfloat16"), 4096, 2, print_table=False)
    assert result.parameters == 10_731_524_096
    assert result.parameter_bytes == 21_463_048_192
    assert result.activation_bytes == 2 * 4096 * 4096 * 48 * 2


def test_nothing_printed_when_not_wanted(capsys):
    estimate_memory_usage(tiny(), print_table=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("tied", "parameters"), [(True, 82_240), (False, 90_432)])
def test_tied_embeddings_count_once(tied, parameters):
    """C-1001."""
    config = tiny(tie_word_embeddings=tied)
    result = estimate_memory_usage(config, print_table=False)
    assert result.parameters == parameters
    assert result.parameter_bytes == 4 * parameters
    assert result == estimate_memory_usage(LlamaForCausalLM(config), print_table=False)


def test_config_is_left_alone_and_its_dtype_counts():
    for dtype, size in ((None, 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)):
        config = tiny(dtype=dtype)
        before = copy.deepcopy(config.to_dict())
        result = estimate_memory_usage(config, 10, 3, print_table=False)
        assert config.to_dict() == before
        assert result.parameter_bytes == 90_432 * size
        assert result.activation_bytes == 3 * 10 * 64 * 2 * size
    assert torch.get_default_dtype() == torch.float32


def test_gpt2_names_its_sizes_differently():
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    assert estimate_memory_usage(config, 8, print_table=False).activation_bytes == 8 * 32 * 3 * 4


def measured(model: nn.Module) -> tuple[int, int, int]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(0, 128, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name.startswith("exp_avg")]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return tuple(sum(t.nbytes for t in tensors) for tensors in (model.parameters(), gradients, moments))


def test_static_part_is_what_a_step_leaves():
    """C-1005, full fine-tuning."""
    model = LlamaForCausalLM(tiny())
    result = estimate_memory_usage(model, print_table=False)
    static = (result.parameter_bytes, result.gradient_bytes, result.optimizer_bytes)
    assert static == measured(model) == (361_728, 361_728, 723_456)


def test_static_part_with_adapters():
    """C-1005, LoRA."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(LlamaForCausalLM(tiny()), peft.LoraConfig(r=8, target_modules="all-linear"))
    result = estimate_memory_usage(model, print_table=False)
    assert result.trainable_parameters == 16_384
    assert result.parameters == 90_432 + 16_384
    assert (result.parameter_bytes, result.gradient_bytes, result.optimizer_bytes) == measured(model)


def four_bit(double: bool, kind: str = "nf4") -> nn.Linear:
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.nn.Linear4bit(256, 256, bias=False, compress_statistics=double, quant_type=kind).to("cpu")


@pytest.mark.parametrize(("double", "size"), [(False, 36_864 + 64), (True, 33_808 + 64 + 1024 + 4)])
def test_four_bit_counts_weights_and_real_bytes(double, size):
    """C-1002; beside weights and scales: code book (16 float32), that of the scales (256 float32), their mean."""
    linear = four_bit(double)
    assert linear.weight.numel() == 32_768
    assert logical_size(linear.weight) == 65_536
    assert stored_bytes(linear) == size
    assert size == pytest.approx(33_808 + 1024 if double else 36_864, rel=0.02)


def test_four_bit_model():
    model = LlamaForCausalLM(tiny(dtype="bfloat16")).to(torch.bfloat16)
    plain = estimate_memory_usage(model, print_table=False)
    model.model.layers[0].mlp.gate_proj = four_bit(double=True)
    model.requires_grad_(False)
    result = estimate_memory_usage(model, print_table=False)
    assert result.parameters == plain.parameters - 64 * 128 + 65_536
    assert result.parameter_bytes == plain.parameter_bytes - 64 * 128 * 2 + 34_900
    assert result.trainable_parameters == result.gradient_bytes == result.optimizer_bytes == 0
    assert result.activation_bytes == plain.activation_bytes


def test_int8_bytes_before_and_after_the_first_forward():
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(256, 128, bias=False, has_fp16_weights=False).to("cpu")
    assert stored_bytes(linear) == 256 * 128 + 4 * 128
    linear(torch.randn(3, 256))
    assert stored_bytes(linear) == 256 * 128 + 4 * 128
    assert logical_size(linear.weight) == 256 * 128


def test_activation_dtype():
    model = LlamaForCausalLM(tiny()).to(torch.bfloat16)
    model.model.norm.float()
    assert activation_dtype(model) == torch.bfloat16
    assert activation_dtype(four_bit(double=False)) == torch.float32
    assert activation_dtype(nn.Identity()) == torch.float32


def test_model_with_a_config_of_its_own():
    model = nn.Linear(4, 4)
    model.config = SimpleNamespace(d_model=16, n_layers=3)
    assert estimate_memory_usage(model, 2, print_table=False).activation_bytes == 2 * 16 * 3 * 4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "no hidden size and no number of layers"),
        ("upstage/SOLAR-10.7B-v1.0", "AutoConfig.from_pretrained"),
        (42, "expected a model or a transformers config, got int"),
        (CLIPVisionConfig(), "no causal language model"),
        (tiny(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "pass the model"),
    ],
)
def test_refusals_say_what_to_do(model, words):
    with pytest.raises(UserError, match=words):
        estimate_memory_usage(model)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(UserError, match="must be 1 or more"):
        estimate_memory_usage(tiny(), *sizes)


def test_result_as_dict():
    result = MemoryEstimate(1, 2, 4, 8, 16, 32)
    assert result.as_dict()["total_bytes"] == 15
    assert result.as_dict()["trainable_parameters"] == 32
