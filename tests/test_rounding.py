"""Stochastic rounding from float32 to bfloat16."""

from __future__ import annotations

import pytest
import torch

from lowmem.ops.rounding import stochastic_round


def neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 numbers next to the values, towards zero and away from it."""
    bits = values.view(torch.int32) & -65536
    return bits.view(torch.float32), (bits + 65536).view(torch.float32)


@pytest.fixture
def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10_000, generator=generator) * torch.logspace(-30, 30, 10_000)


def test_only_the_two_neighbours_come_out(values: torch.Tensor) -> None:
    rounded = stochastic_round(values)
    assert rounded.dtype is torch.bfloat16
    inner, outer = neighbours(values)
    wide = rounded.float()
    assert ((wide == inner) | (wide == outer)).all()
    assert 0.4 < (wide == outer).float().mean() < 0.6, "both neighbours occur"


def test_bfloat16_values_stay_as_they_are() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    assert torch.equal(stochastic_round(finite.float()), finite)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, -0.0123, 1e-20, 12345.678, 1.0 + 2**-9])
def test_the_mean_is_the_value(value: float) -> None:
    """A hundred thousand roundings: the mean lies within five standard errors of the value, to nearest would not."""
    torch.manual_seed(0)
    values = torch.full((100_000,), value)
    rounded = stochastic_round(values).double()
    exact = values[0].double()
    inner, outer = neighbours(values[:1])
    step = (outer - inner).abs().item()
    share = abs((exact - inner.double()).item()) / step
    error = step * (share * (1 - share) / len(values)) ** 0.5
    assert abs(rounded.mean() - exact) <= 5 * error
    assert abs(values[0].bfloat16().double() - exact) > 5 * error, "to nearest is as good here: the test is void"


def test_many_small_updates_arrive() -> None:
    """1 + 1000 x 0.0001 is 1.1; each update is a fortieth of a bfloat16 step there, and to nearest none arrives."""
    torch.manual_seed(0)
    weights, nearest = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(1000):
        weights = stochastic_round(weights.float() + 1e-4)
        nearest = (nearest.float() + 1e-4).bfloat16()
    assert weights.float().mean().item() == pytest.approx(1.1, abs=2e-3)
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_infinities_stay_and_the_input_is_not_touched() -> None:
    values = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 1.5001])
    before = values.clone()
    rounded = stochastic_round(values)
    assert torch.equal(values, before)
    assert rounded[:4].tolist() == [float("inf"), float("-inf"), 0.0, 0.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 3, 4)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert stochastic_round(torch.ones(shape)).shape == shape


def test_transposed_input() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(stochastic_round(values.T).float(), values.T)


def test_the_generator_decides(values: torch.Tensor) -> None:
    torch.manual_seed(1)
    first = stochastic_round(values)
    torch.manual_seed(1)
    again = stochastic_round(values)
    assert torch.equal(first, again)
    assert not torch.equal(first, stochastic_round(values))
