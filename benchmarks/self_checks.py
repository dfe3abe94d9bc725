"""What the checks that a run makes on itself cost, beside a step: SmolLM2-135M, in full and with an adapter.

Each is timed in one run, on the same weights and gradients: the look at loss and gradient (every step), the look at all
weights (before a save or an evaluation), and the look at what has moved (at the first step and the end).

Bar: the look at every step takes less than 1 % of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment

from lowmem import LoRA, Trainer, TrainingConfig
from lowmem.checks import FirstUpdate, require_finite, require_finite_weights
from lowmem.loss import count

RESULT = Path(__file__).parent / "results" / "self_checks.json"


def median_seconds(work: Callable[[], object], times: int) -> float:
    work()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(adapter: bool, rows: int, tokens: int, times: int) -> dict[str, Any]:
    """Seconds of a step and of each check, with gradients in place."""
    data = [{"input_ids": [(7 * i + j) % 40_000 for j in range(tokens)]} for i in range(rows)]
    training = TrainingConfig(batch_size=rows, max_steps=1, max_grad_norm=None, max_length=tokens)
    trainer = Trainer("smollm2", data, training=training, strategies=[LoRA(r=16)] if adapter else [])
    trainer.model.train()
    batch = [trainer.train_dataset[row] for row in range(rows)]

    def step() -> None:
        trainer.run.metrics = {"learning_rate": 0.0}
        trainer.run.log(loss=trainer.forward_backward([batch], count(batch)))
        trainer.optimizer.step()

    def look_at_gradient() -> None:
        trainer.run.metrics.pop("grad_norm", None)
        require_finite(trainer.run)

    found = {
        "step": median_seconds(step, times),
        "loss and gradient": median_seconds(look_at_gradient, 5 * times),
        "all weights": median_seconds(lambda: require_finite_weights(trainer.run), 5 * times),
        "what has moved": median_seconds(lambda: FirstUpdate(trainer.run), 5 * times),
    }
    return {**found, "share of a step": found["loss and gradient"] / found["step"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one small step, no result file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, tokens, times = (1, 16, 1) if options.quick else (4, 256, 3)
    runs = {name: measure(name == "lora", rows, tokens, times) for name in ("full", "lora")}
    for name, run in runs.items():
        figures = ", ".join(f"{key} {value:.4f} s" for key, value in run.items() if key != "share of a step")
        print(f"{name}: {figures}; each step {run['share of a step']:.2%}")
    if not options.quick:
        result = {"environment": environment(), "rows": rows, "tokens": tokens, "seconds": runs}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(run["share of a step"] >= 0.01 for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
