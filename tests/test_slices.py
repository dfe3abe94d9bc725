"""TiledMLP and ChunkedLayers: what they are to avoid exists for one slice only, and gradients are those of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, make_llama, make_trainer
from torch import Tensor, nn

from lowmem import (
    ChunkedCrossEntropy,
    ChunkedLayers,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Quantization,
    Strategy,
    TiledMLP,
)
from lowmem.memory.trace import Trace
from lowmem.model import linears, parent_of

ROWS, TOKENS, WIDTH, INTERMEDIATE, SLICE = 2, 96, 32, 64, 32
MAKE = {"tiled": lambda: TiledMLP(tile_size=SLICE), "chunked": lambda: ChunkedLayers(chunk_size=SLICE)}


def rows(number: int = ROWS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCABULARY, (TOKENS,), generator=generator).tolist() for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in ids]


def pass_of(strategies: list[Strategy], model: nn.Module | None = None) -> tuple[Trace, dict[str, Tensor]]:
    """The trace of one forward and backward, and all gradients."""
    trainer = make_trainer(strategies, model=model or make_llama(), rows=rows(), batch_size=ROWS)
    trainer.model.train()
    with Trace() as trace:
        trainer.forward_backward([rows()], 1.0)
    return trace, {name: p.grad for name, p in trainer.run.trainable.items() if p.grad is not None}


def longest(trace: Trace, width: int) -> int:
    """The most rows x tokens among tensors of activations of this width."""
    return max(
        (s.size // (4 * width) for s in trace.storages if s.shape[-1:] == (width,) and len(s.shape) == 3), default=0
    )


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_the_intermediate_size_meets_one_slice_only(name: str, checkpointed: bool) -> None:
    company: list[Strategy] = [GradientCheckpointing()] if checkpointed else []
    assert longest(pass_of(company)[0], INTERMEDIATE) == ROWS * TOKENS
    assert longest(pass_of([*company, MAKE[name]()])[0], INTERMEDIATE) == SLICE


def test_norms_make_float32_copies_of_one_slice_only() -> None:
    """Also the one after the last layer. In 16 bits the hidden states are half as large as such a copy."""

    def wide(*strategies: Strategy) -> int:
        trace, _ = pass_of([LoRA(r=2), ChunkedCrossEntropy(chunk_size=8), *strategies], make_llama(torch.bfloat16))
        names = ("aten.pow.Tensor_Scalar", "aten.rsqrt.default", "aten.mul.Tensor")
        return max(s.size for s in trace.storages if s.op in names and s.shape[-1:] == (WIDTH,))

    assert wide() >= 4 * ROWS * TOKENS * WIDTH
    assert wide(ChunkedLayers(chunk_size=SLICE)) <= 4 * SLICE * WIDTH


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 4)])
def test_attention_takes_few_heads_at_a_time(heads: int, groups: int) -> None:
    """Groups of key-value heads, with the query heads that they serve; gradients stay those of autograd."""

    def model() -> nn.Module:
        return make_llama(
            torch.float64, hidden_size=48, num_attention_heads=2 * heads, num_key_value_heads=heads, head_dim=8
        )

    trace, found = pass_of([ChunkedLayers(chunk_size=SLICE)], model())
    _, expected = pass_of([], model())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10, msg=name)
    calls = {s.shape for s in trace.storages if s.op.startswith("aten._scaled_dot_product") and s.shape[-1:] == (8,)}
    assert {shape[1] for shape in calls} == {2 * heads // groups, heads // groups}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_given_to_attention_are_whole(attention: str) -> None:
    """Padding: rows of unlike length get a mask; eager attention, which may treat heads apart, gets all of them."""
    uneven = rows()
    uneven[1] = {key: values[: TOKENS - 20] for key, values in uneven[1].items()}
    found = []
    for strategies in ([], [ChunkedLayers(chunk_size=SLICE)]):
        model = make_llama(torch.float64, attn_implementation=attention)
        trainer = make_trainer(strategies, model=model, rows=uneven, batch_size=ROWS)
        trainer.forward_backward([uneven], 1.0)
        found.append({name: p.grad for name, p in trainer.run.trainable.items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", MAKE)
def test_a_parameter_hears_of_its_gradient_once_a_backward(name: str) -> None:
    """Whoever steps in a hook would otherwise step once for each slice."""
    trainer = make_trainer([MAKE[name](), GradientCheckpointing()], rows=rows(), batch_size=ROWS)
    heard: dict[str, int] = {}
    for key, parameter in trainer.run.trainable.items():
        parameter.register_post_accumulate_grad_hook(lambda _, k=key: heard.update({k: heard.get(k, 0) + 1}))  # type: ignore[no-untyped-call,misc]
    trainer.forward_backward([rows()], 1.0)
    assert heard == dict.fromkeys(trainer.run.trainable, 1)


class Dequantised(nn.Module):
    """A 4-bit linear layer written out: its dequantised weight is a constant."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        import bitsandbytes

        self.register_buffer(
            "constant", bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        constant: Any = self.constant
        return nn.functional.linear(hidden, constant.to(hidden.dtype))


@pytest.mark.parametrize("name", MAKE)
def test_over_nf4_gradients_are_those_with_the_dequantised_weights_as_constants(name: str) -> None:
    """In float32, which bitsandbytes' products keep with compute_dtype: float32."""
    strategies = [Quantization(compute_dtype="float32"), LoRA(r=4)]
    sliced = make_trainer(
        [*copy.deepcopy(strategies), MAKE[name](), GradientCheckpointing()], rows=rows(), batch_size=ROWS
    )
    plain = make_trainer(strategies, rows=rows(), batch_size=ROWS)
    for trainer in (sliced, plain):
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.run.trainable.values():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    for path, layer in linears(plain.model).items():
        if type(layer).__name__ == "Linear4bit":
            holder, attribute = parent_of(plain.model, path)
            setattr(holder, attribute, Dequantised(layer))
    for trainer in (sliced, plain):
        trainer.model.train()
        trainer.forward_backward([rows()], 1.0)
    grads = {name: p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
    assert len(grads) == len(sliced.run.trainable)
    for key, gradient in grads.items():
        assert sliced.run.trainable[key].grad is not None
        torch.testing.assert_close(sliced.run.trainable[key].grad, gradient, rtol=2e-5, atol=2e-5, msg=key)


@pytest.mark.parametrize("name", MAKE)
def test_4bit_weights_are_unpacked_once_a_pass_and_none_is_kept(name: str) -> None:
    trainer = make_trainer(
        [Quantization(), LoRA(r=2), MAKE[name](), GradientCheckpointing(), MixedPrecision()],
        rows=rows(),
        batch_size=ROWS,
    )
    trainer.model.train()
    with Trace() as trace:
        trainer.forward_backward([rows()], 1.0)
    unpacked = [
        i for i, s in enumerate(trace.storages) if "dequantize_4bit" in s.op and s.shape == (INTERMEDIATE, WIDTH)
    ]
    layers = 2
    # gate and up: forward, and backward; under checkpointing the MLP's forward is not run again
    assert len(unpacked) == 2 * layers * 2
    left = {number for number, change in trace.events if change < 0}
    assert set(unpacked) <= left
