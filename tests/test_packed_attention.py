"""Packed rows with other attention kernels than torch's own: samples stay apart, and a kernel that errs is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_llama, make_trainer, run_training
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowmem import LoRA, Packing, UserError
from lowmem.ops.attention_proof import prove_packed_attention
from lowmem.strategies import packing

CPU = torch.device("cpu")


@pytest.mark.slow  # compiles for the CPU, which takes a quarter of a minute; there is no backward on a CPU
def test_flex_attention_keeps_packed_samples_apart_without_a_full_mask() -> None:
    model = make_llama(max_position_embeddings=512).eval()
    lengths = (100, 150, 50)
    ids = torch.randint(int(model.config.vocab_size), (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    masks: list[Any] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)], 1)
        model.set_attn_implementation("flex_attention")
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert isinstance(masks[-1], BlockMask)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_flex_attention_cannot_be_trained_on_a_cpu() -> None:
    """torch has no backward of it there, and would say so in the middle of the first step."""
    with pytest.raises(
        UserError, match="attn_implementation: flex_attention has no backward on a CPU; use sdpa or eager"
    ):
        make_trainer([LoRA(r=2)], model=make_llama(attn_implementation="flex_attention"))


# -- the proof before a run -------------------------------------------------------------------------------------------


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, positions: Tensor, sees: Callable[[Tensor], Tensor]
) -> Tensor:
    """What a varlen kernel does: samples begin where positions are 0. `sees` may spoil the mask."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    sample = (positions == 0).cumsum(-1)
    mask = sees((sample[:, :, None] == sample[:, None, :]).tril())
    return nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None], scale=scaling).transpose(1, 2)


class Rounded(torch.autograd.Function):
    """The identity, whose gradient is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.1 * grad


def kernel(fault: str | None = None) -> Callable[..., Any]:
    def sees(mask: Tensor) -> Tensor:
        length = mask.shape[-1]
        if fault == "no borders":
            return torch.ones_like(mask).tril()
        if fault == "one token of a neighbour" and length > 70:
            mask[:, 70, 69] = True
        if fault == "nothing beyond a block" and length > 128:
            mask[:, 129:200, :128] = False
        return mask

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **more: Any
    ) -> tuple[Tensor, None]:
        positions, scaling = more["position_ids"], more["scaling"]
        if fault == "another scale":
            scaling = 1.1 * scaling
        if fault == "heads in another order":
            key, value = (t.repeat(1, query.shape[1] // t.shape[1], 1, 1) for t in (key, value))
        if fault == "gradient":
            value = Rounded.apply(value)
        if fault == "not a number":
            value = value / 0 * 0
        if fault == "raises":
            raise ImportError("no such package\nand more")
        output = attend(query, key, value, scaling, positions, sees)
        return output.flatten(-2) if fault == "heads side by side" else output, None

    return forward


def model_with(
    monkeypatch: pytest.MonkeyPatch, fault: str | None, name: str = "flash_attention_of_ours", **config: Any
) -> nn.Module:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, kernel(fault))
    model = make_llama(**config)
    model.config._attn_implementation = name
    return model


FAULTS = (
    *("no borders", "one token of a neighbour", "nothing beyond a block", "another scale", "heads in another order"),
    *("gradient", "not a number"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["flash_attention_of_ours", "ours"])  # one row, and two
def test_a_right_kernel_passes(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_packed_attention(model_with(monkeypatch, None, name, dtype=dtype), CPU)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_errs_is_refused(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(monkeypatch, fault, "ours", dtype=dtype)
    with pytest.raises(UserError, match="packing: the attention kernel ours gives other numbers on a packed row"):
        prove_packed_attention(model, CPU)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("raises", r"\(ImportError: no such package\)"), ("heads side by side", r"\(RuntimeError: Mismatch in shape")],
)
def test_a_kernel_that_fails_is_refused_in_one_line(fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"fails on a packed row {words}") as caught:
        prove_packed_attention(model_with(monkeypatch, fault), CPU)
    assert "model.attn_implementation: sdpa" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flash_kernel_is_given_one_row_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    right = kernel()

    def spy(module: Any, query: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append((len(query), query.dtype, query.shape[1]))
        return right(module, query, *rest, **more)

    model = model_with(monkeypatch, None)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_of_ours", spy)
    prove_packed_attention(model, CPU)
    assert seen == [(1, torch.bfloat16, 4)]


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_torchs_own_operations_are_not_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_packed_attention(model_with(monkeypatch, "no borders", name), CPU)


def test_packing_compares_at_start_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    make_trainer([], model=model_with(monkeypatch, "gradient"))
    with pytest.raises(UserError, match="flash_attention_of_ours gives other numbers"):
        make_trainer([Packing()], model=model_with(monkeypatch, "gradient"))


def test_a_run_with_a_right_kernel_trains_as_with_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(packing, "prove_packed_attention", lambda *given: calls.append(prove_packed_attention(*given)))
    run = run_training([Packing()], model=model_with(monkeypatch, None))
    plain = run_training([Packing()])
    assert len(calls) == 2
    for name, weight in plain.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow  # compiles for the CPU; there is no backward on a CPU
def test_flex_attention_passes_the_proof_forward() -> None:
    model = make_llama()
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        prove_packed_attention(model, CPU)
