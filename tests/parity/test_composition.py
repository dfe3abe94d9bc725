"""Every set of strategies either is refused by declaration or trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from conftest import make_rows, make_trainer, run_training
from registry import ROWS, Row, allowed, ids, refusal, sets, together

from lowmem import ConflictError

STEPS = 6


@pytest.fixture(autouse=True)
def no_silent_fallback() -> Iterator[None]:
    """dynamo gives up on a function after eight variants of it and runs it uncompiled; here that is an error."""
    with torch._dynamo.config.patch(recompile_limit=512, fail_on_recompile_limit_hit=True):
        yield


def refused_or_allowed(size: int) -> list[tuple[Row, ...]]:
    return [chosen for chosen in sets(ROWS, size) if refusal(chosen) is not None] + allowed(ROWS, size)


def trains_or_is_refused(chosen: tuple[Row, ...]) -> None:
    words = refusal(chosen)
    if words is not None:
        with pytest.raises(ConflictError) as caught:
            make_trainer(together(*chosen))
        assert sum(row.key in str(caught.value) for row in chosen) >= 2, (
            f"the message does not name both: {caught.value}"
        )
        return
    run = run_training(
        together(*chosen), rows=make_rows(4), max_steps=STEPS, learning_rate=5e-3, lr_scheduler_type="constant"
    )
    assert all(map(math.isfinite, run.losses)), run.losses
    assert run.losses[-1] < run.losses[0] - 0.02, run.losses  # the same four rows every time
    still = [name for name, moved in run.moved.items() if not moved]
    assert not still, f"these weights never moved: {still}"
    for name, parameter in run.trainer.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(run.before[name], parameter), f"{name} is frozen and has moved"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_alone(row: Row) -> None:
    trains_or_is_refused((row,))


@pytest.mark.parametrize("pair", refused_or_allowed(2), ids=ids)
def test_pair(pair: tuple[Row, ...]) -> None:
    trains_or_is_refused(pair)


@pytest.mark.triples
@pytest.mark.parametrize("triple", refused_or_allowed(3), ids=ids)
def test_triple(triple: tuple[Row, ...]) -> None:
    trains_or_is_refused(triple)


def test_all_pairs_are_there() -> None:
    kinds = {row.key for row in ROWS}
    pairs = {frozenset(row.key for row in pair) for pair in sets(ROWS, 2)}
    assert len(pairs) == len(kinds) * (len(kinds) - 1) // 2
