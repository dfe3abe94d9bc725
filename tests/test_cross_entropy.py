"""Linear layer and cross entropy in chunks: values, gradients, precision, and the size of what exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.ops.cross_entropy import default_chunk_size, linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 37, 8, 50


def inputs(dtype: torch.dtype = torch.float64, *, tokens: int = TOKENS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        "weight": torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype),
        "targets": torch.randint(VOCABULARY, (tokens,), generator=generator),
        "loss_weights": torch.rand(tokens, generator=generator, dtype=torch.float64).to(dtype),
    }


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss_weights: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if logits.element_size() < 4:
        logits = logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.sum() if loss_weights is None else (losses * loss_weights).sum()


def gradients(loss: Callable[..., Tensor], given: dict[str, Any], scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """Loss, and the gradients of `scale * loss` for hidden, weight and bias (where there is one)."""
    leaves = {k: given[k].clone().requires_grad_() for k in ("hidden", "weight", "bias") if given[k] is not None}
    value = loss(**{**given, **leaves})
    return value.detach(), list(torch.autograd.grad(value * scale, list(leaves.values())))


@pytest.mark.parametrize("chunk_size", [1, 8, 36, 37, 38, 1000, None])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
def test_loss_and_gradients(chunk_size: int | None, softcap: float | None, weighted: bool, biased: bool) -> None:
    given: dict[str, Any] = {**inputs(), "softcap": softcap}
    if not weighted:
        given["loss_weights"] = None
    if not biased:
        given["bias"] = None
    expected, wanted = gradients(plain, given, scale=0.37)
    got, found = gradients(linear_cross_entropy, {**given, "chunk_size": chunk_size}, scale=0.37)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert len(found) == 2 + biased
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_gradient_is_the_slope(name: str) -> None:
    """Against finite differences: an independent opinion on the gradient itself."""
    given: dict[str, Any] = {**inputs(tokens=5), "chunk_size": 2, "softcap": 3.0}
    _, found = gradients(linear_cross_entropy, given)
    gradient = dict(zip(("hidden", "weight", "bias"), found, strict=True))[name].flatten()
    step = 1e-6
    for i in range(0, gradient.numel(), 7):
        values = []
        for sign in (1, -1):
            moved = given[name].clone()
            moved.view(-1)[i] += sign * step
            values.append(linear_cross_entropy(**{**given, name: moved}).item())
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[i].item(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen: str) -> None:
    given = inputs()
    leaves = {k: given[k].clone().requires_grad_(k != frozen) for k in ("hidden", "weight", "bias")}
    linear_cross_entropy(**{**given, **leaves}, chunk_size=8).backward()
    _, (hidden, weight, bias) = gradients(plain, given)
    for name, expected in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if name == frozen:
            assert leaves[name].grad is None
        else:
            torch.testing.assert_close(leaves[name].grad, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_no_tokens(grad: bool) -> None:
    """A micro-batch of prompts only is possible: loss 0, gradients 0, no NaN."""
    given = inputs(tokens=0)
    if not grad:
        with torch.no_grad():
            assert linear_cross_entropy(**given).item() == 0.0
        return
    loss, found = gradients(linear_cross_entropy, given)
    assert loss.item() == 0.0
    assert [tuple(g.shape) for g in found] == [(0, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)]
    assert all(not g.any() for g in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_loss_and_gradients(dtype: torch.dtype) -> None:
    given = inputs(dtype)
    loss, found = gradients(linear_cross_entropy, {**given, "chunk_size": 8})
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert {g.dtype for g in found} == {dtype}
    expected, wanted = gradients(plain, {k: v.double() if v.is_floating_point() else v for k, v in given.items()})
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_evaluation_computes_no_gradient() -> None:
    given = inputs()
    leaves = {k: given[k].requires_grad_() for k in ("hidden", "weight", "bias")}
    with torch.no_grad():
        loss = linear_cross_entropy(**{**given, **leaves}, chunk_size=8)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(**given).detach())


@pytest.mark.parametrize("token_weight", [1.0, 2.0**-20])
def test_float16_gradients_survive_a_scale_that_comes_late(token_weight: float) -> None:
    """The loss scale multiplies the summed loss, after the gradient was made: small entries must still be there."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 32, generator=generator).half()
    weight = torch.randn(4000, 32, generator=generator).half()  # sharp logits: most of the softmax is tiny
    targets = torch.randint(4000, (4,), generator=generator)
    loss_weights, scale = torch.full((4,), token_weight), 2.0**13 / token_weight
    leaf, head = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    (linear_cross_entropy(head, leaf, None, targets, loss_weights, chunk_size=2) * scale).backward()
    exact_weight, exact_hidden = weight.double().requires_grad_(), hidden.double().requires_grad_()
    (plain(exact_hidden, exact_weight, None, targets, loss_weights) * scale).backward()
    for got, exact in ((leaf.grad, exact_weight.grad), (head.grad, exact_hidden.grad)):
        assert got is not None
        assert exact is not None
        held = exact.abs() > 1e-6  # what the scale lifts into the range of float16
        assert (got[held] != 0).all(), f"{(got[held] == 0).double().mean():.0%} of the gradient became zero"
        assert (got.double() - exact).norm() <= 2e-3 * exact.norm()
    assert exact_weight.grad is not None
    lifted = exact_weight.grad.abs() > 1e-6
    lost = ((exact_weight.grad / scale).half()[lifted] == 0).double().mean().item()
    assert lost > 0.2, "without the scale nothing would be flushed: the test is void"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Products in 16 bits, softmax and sums in 32, gradients in the dtype of the weights."""
    given = inputs(torch.float32)
    products = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                products.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", dtype=dtype), Note():
        loss, found = gradients(linear_cross_entropy, {**given, "chunk_size": 8})
    assert products[0] is dtype
    assert loss.dtype is torch.float32
    assert {g.dtype for g in found} == {torch.float32}
    exact, wanted = gradients(plain, given)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 3e-3
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_large_logits_do_not_overflow() -> None:
    given = inputs()
    given["hidden"] = given["hidden"] * 1e4
    expected, wanted = gradients(plain, given)
    got, found = gradients(linear_cross_entropy, {**given, "chunk_size": 8})
    torch.testing.assert_close(got, expected)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_backward_is_an_error_and_not_a_wrong_number() -> None:
    given = inputs()
    loss = linear_cross_entropy(**{**given, "hidden": given["hidden"].requires_grad_()})
    loss.backward(retain_graph=True)
    with pytest.raises((AssertionError, RuntimeError)):
        loss.backward()


def test_full_logits_never_exist() -> None:
    """C-702: hidden 32, vocabulary 1,000, 37 tokens, chunks of 8, every 5th label ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 32, generator=generator).requires_grad_()
    weight = torch.randn(1000, 32, generator=generator).requires_grad_()
    labels = torch.randint(1000, (37,), generator=generator)
    labels[::5] = -100
    keep = torch.nonzero(labels != -100).squeeze(1)
    sizes: list[int] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
            return out

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Note():
        linear_cross_entropy(hidden[keep], weight, None, labels[keep], chunk_size=8).backward()
    assert max(sizes) < 37_000
    assert max(sizes) == 32_000, "the gradient of the head is the largest there is"

    expected_hidden, expected_weight = (
        hidden.detach().clone().requires_grad_(),
        weight.detach().clone().requires_grad_(),
    )
    logits = F.linear(expected_hidden, expected_weight)
    F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").backward()
    for got, expected in ((hidden.grad, expected_hidden.grad), (weight.grad, expected_weight.grad)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("device", "mib", "fewest"), [("cpu", 16, 64), ("cuda", 64, 128), ("meta", 64, 128)])
def test_default_chunk_is_a_few_mib_of_logits(device: str, mib: int, fewest: int) -> None:
    for vocabulary in (32_000, 49_152):
        size = default_chunk_size(vocabulary, device)
        assert size * vocabulary * 4 <= mib * 2**20
        assert (size + 1) * vocabulary * 4 > mib * 2**20
    assert default_chunk_size(10_000_000, device) == fewest
