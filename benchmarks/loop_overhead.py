"""What lowmem's trainer costs in time over a bare loop: the same LoRA job by both, in alternation.

The bare loop is what one would write by hand with torch and peft. Same model, same adapters at the start, same rows in
the same order, the same collation, AdamW, clipping, schedule and logging interval. The model is a random Llama that
needs only some 30 ms a step, so that an overhead of a few tenths of a millisecond shows; on real models it shows less.

    python benchmarks/loop_overhead.py            # 16 pairs, some minutes
    python benchmarks/loop_overhead.py --quick    # does it run?

Writes benchmarks/results/loop_overhead.json and prints a table. Exit status 1 where the bootstrap 95 % upper bound of
the slowdown is above the bar, 2 where the two do not end with the same losses and weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from environment import RESULTS, as_table, environment, table
from torch import Tensor, nn

BAR = 1.03
RESAMPLES = 10_000


@dataclass
class Job:
    """The numbers both sides are given."""

    steps: int = 120
    rows_per_step: int = 8
    row_length: tuple[int, int] = (24, 64)
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 4096
    rank: int = 8
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    logging_steps: int = 10
    seed: int = 0


@dataclass
class Outcome:
    """What one run leaves: its time (wall, and of all its threads), its logged losses, its adapters."""

    seconds: float
    processor: float
    losses: list[float]
    adapters: dict[str, Tensor]


# -- the job ----------------------------------------------------------------------------------------------------------


def make_model(job: Job) -> nn.Module:
    """A small random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(job.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=job.vocabulary,
            hidden_size=job.hidden,
            intermediate_size=3 * job.hidden,
            num_hidden_layers=job.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * job.row_length[1],
        )
    )


def make_rows(job: Job) -> list[dict[str, Any]]:
    """Random token ids; the first third of a row has no label."""
    draw = np.random.default_rng(job.seed)
    rows = []
    for _ in range(job.steps * job.rows_per_step):
        ids = draw.integers(0, job.vocabulary, draw.integers(*job.row_length, endpoint=True)).astype(np.int32)
        labels = ids.copy()
        labels[: len(ids) // 3] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


# -- side A: lowmem ---------------------------------------------------------------------------------------------------


def by_lowmem(job: Job, model: nn.Module, rows: list[dict[str, Any]]) -> Outcome:
    """The job by lowmem's Trainer."""
    from lowmem import LoRA, Trainer, TrainingConfig

    losses: list[float] = []
    trainer = Trainer(
        model=model,
        train_dataset=rows,
        training=TrainingConfig(
            batch_size=job.rows_per_step,
            learning_rate=job.learning_rate,
            max_grad_norm=job.max_grad_norm,
            max_steps=job.steps,
            logging_steps=job.logging_steps,
            seed=job.seed,
            shuffle=False,
        ),
        strategies=[LoRA(r=job.rank, lora_alpha=2 * job.rank)],
        observers=[lambda event: losses.append(event.metrics["loss"]) if event.kind == "log" else None],
    )
    fill_adapters(trainer.model)
    start = _clock()
    trainer.train()
    return Outcome(*_since(start), losses, adapters(trainer.model))


# -- side B: a loop by hand -------------------------------------------------------------------------------------------


def by_hand(job: Job, model: nn.Module, rows: list[dict[str, Any]]) -> Outcome:
    """The job by a bare loop of torch and peft."""
    import torch.nn.functional as F
    from peft import LoraConfig, get_peft_model
    from torch.optim.lr_scheduler import LambdaLR

    from lowmem.batches import collate

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules=names))
    fill_adapters(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.learning_rate, weight_decay=0.0, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 - step / job.steps)

    start, losses = _clock(), []
    model.train()
    window = torch.zeros(())
    for step in range(job.steps):
        batch = collate(rows[step * job.rows_per_step : (step + 1) * job.rows_per_step])
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, job.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        window += loss.detach()
        if (step + 1) % job.logging_steps == 0:
            losses.append(float(window) / job.logging_steps)
            window.zero_()
    return Outcome(*_since(start), losses, adapters(model))


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - start[0], time.process_time() - start[1]


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> trainable weight, as a copy."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def fill_adapters(model: nn.Module) -> None:
    """The same adapters on both sides, and B not zero, so that A has a gradient from the first step on."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(job: Job, pairs: int) -> dict[str, Any]:
    """Times of both sides in the order A B, B A, A B, ...; what they end with is compared every time."""
    model, rows = make_model(job), make_rows(job)
    warm_up = Job(**{**vars(job), "steps": min(10, job.steps)})
    for run in (by_lowmem, by_hand):
        run(warm_up, copy.deepcopy(model), rows[: warm_up.steps * job.rows_per_step])
    times: list[tuple[float, float]] = []
    processor: list[tuple[float, float]] = []
    worst_loss = worst_weight = 0.0
    for number in range(pairs):
        order = (by_lowmem, by_hand) if number % 2 == 0 else (by_hand, by_lowmem)
        got = {run: run(job, copy.deepcopy(model), rows) for run in order}
        a, b = got[by_lowmem], got[by_hand]
        times.append((a.seconds, b.seconds))
        processor.append((a.processor, b.processor))
        worst_loss = max(worst_loss, *(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)))
        worst_weight = max(worst_weight, *(float((a.adapters[n] - b.adapters[n]).abs().max()) for n in b.adapters))
        text = f"pair {number + 1:3d}  lowmem {a.seconds:7.3f} s  by hand {b.seconds:7.3f} s"
        print(f"{text}  {a.seconds / b.seconds:.4f} (processor time {a.processor / b.processor:.4f})", flush=True)
    same = {"largest_loss_difference": worst_loss, "largest_weight_difference": worst_weight}
    return {"times": times, "processor_times": processor, **same}


def slowdown(times: list[tuple[float, float]]) -> dict[str, float]:
    """Median of the pairs' ratios, and its percentile-bootstrap bounds over the pairs."""
    ratios = np.array([a / b for a, b in times])
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 95.0])
    return {
        "median_of_ratios": float(np.median(ratios)),
        "ratio_of_medians": statistics.median(a for a, _ in times) / statistics.median(b for _, b in times),
        "bootstrap_lower_2.5": float(low),
        "bootstrap_upper_95": float(high),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="alternated pairs (12 or more for the bar)")
    parser.add_argument("--steps", type=int, default=Job.steps, help="optimizer steps a run")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help="two short pairs; nothing is written")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    job = Job(steps=20 if arguments.quick else arguments.steps)
    facts = environment()
    got = measure(job, 2 if arguments.quick else arguments.pairs)
    found, processor = slowdown(got["times"]), slowdown(got["processor_times"])

    per_step = [1000 * statistics.median(side) / job.steps for side in zip(*got["times"], strict=True)]
    same = got["largest_loss_difference"] <= 1e-5 and got["largest_weight_difference"] <= 1e-4
    print()
    print(as_table(facts))
    print()
    rows = [["lowmem, ms a step (median)", f"{per_step[0]:.2f}"], ["by hand, ms a step (median)", f"{per_step[1]:.2f}"]]
    rows += [["pairs", len(got["times"])], ["median of the ratios", f"{found['median_of_ratios']:.4f}"]]
    rows += [["bootstrap 95 % upper bound", f"{found['bootstrap_upper_95']:.4f} (bar: {BAR})"]]
    rows += [
        [
            "the same two, of processor time",
            f"{processor['median_of_ratios']:.4f}, {processor['bootstrap_upper_95']:.4f}",
        ]
    ]
    rows += [["largest difference of a logged loss", f"{got['largest_loss_difference']:.1e}"]]
    rows += [["largest difference of a weight", f"{got['largest_weight_difference']:.1e}"]]
    print(table(["loop overhead", ""], rows))
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        report = {"environment": facts, "job": vars(job), "bar": BAR, **found, "processor_time": processor}
        report |= {"milliseconds_per_step": per_step, **got}
        (RESULTS / "loop_overhead.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not same:
        print("the two sides do not end with the same losses and weights", file=sys.stderr)
        return 2
    return 0 if arguments.quick or found["bootstrap_upper_95"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
