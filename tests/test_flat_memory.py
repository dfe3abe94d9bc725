"""Over a run of any length, not a byte more is alive than after the third."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from conftest import make_llama, make_trainer

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

SETS = {
    "host": lambda: [GradientCheckpointing(offload="cpu", layers_per_checkpoint=2), ChunkedLayers(chunk_size=4)],
    "disk": lambda: [GradientCheckpointing(offload="disk"), TiledMLP(tile_size=4), MixedPrecision()],
    "nf4": lambda: [Quantization(), GradientCheckpointing(offload="cpu"), ChunkedLayers(chunk_size=4)],
}


@pytest.mark.parametrize("steps", [12, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETS)
def test_memory_is_flat_to_the_byte(name: str, steps: int) -> None:
    """Live bytes at the end of every step, and the most within it; host buffers are counted, too."""
    strategies: list[Strategy] = [*SETS[name](), LoRA(r=2), ChunkedCrossEntropy(chunk_size=4)]
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 40, (9,), generator=generator).tolist()} for _ in range(8)]
    for row in rows:
        row["labels"] = row["input_ids"]
    trace, ends = Trace(), list[int]()

    def note(event: object) -> None:
        if event.kind == "step":  # type: ignore[attr-defined]
            ends.append(len(trace.events))

    model = make_llama(num_hidden_layers=3)
    trainer = make_trainer(strategies, model=model, rows=rows, batch_size=1, max_steps=steps, observers=[note])
    with trace:
        trainer.train()
    assert len(ends) == steps
    live = [0, *accumulate(size for _, size in trace.events)]
    after = [live[end] for end in ends]
    most = [max(live[start:end]) for start, end in pairwise(ends)]
    assert set(after[2:]) == {after[2]}
    assert set(most[2:]) == {most[2]}
