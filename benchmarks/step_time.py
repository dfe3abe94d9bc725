"""How far is the predicted step time from steps that were measured?

    python benchmarks/step_time.py            # all three; --only speeds, methods or cpu for one

speeds    tokens per second that others published, per model, method and card. Nothing is fitted.
methods   the 32 fine-tuning methods of peft's own comparison on an L40S (`--rows`, seconds of 5,000 steps): does the
          prediction put them in the right order? The mean length of a row is not published (`--length` is assumed), so
          that only the order and the spread of the ratio say something, not the ratio itself.
cpu       strategies run here, on one thread of this processor, which is described by its measured peaks like a card.

Every work is traced on the meta device at depths 1 and 2 and extrapolated. Writes `results/step_time.json` and `.md`.
Kendall's tau is given for all pairs, and for those whose measured times are more than 3 % apart. Status 0: the latter
is at least 0.6 in `methods` and `cpu`, and no speed is off by more than half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from environment import HERE, RESULTS, as_table, environment, table

from lowmem import (
    AdamW8bit,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    OptimizerInBackward,
    PureBF16,
    Quantization,
    Strategy,
    Trainer,
    TrainingConfig,
)
from lowmem.loading import model_without_data
from lowmem.memory.cards import Assumptions, Card, card
from lowmem.memory.meta import on_meta
from lowmem.memory.predict import record
from lowmem.memory.shapes import shape_config
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
Make = Callable[[], list[Strategy]]


def full() -> list[Strategy]:
    return [PureBF16(), GradientCheckpointing()]


def lora() -> list[Strategy]:
    return [*full(), LoRA(r=16, target_modules=ATTENTION)]


def qlora() -> list[Strategy]:
    return [*lora(), Quantization()]


FMS = "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv (04702cc5)"
TUNE = "meta-pytorch/torchtune, README, single-device recipes (packed rows; some compiled)"
SPEEDS: list[tuple[str, str, Make, tuple[int, ...], str, float, str]] = [
    ("A100 80GB", "Mistral-7B-v0.1", full, (4096,) * 4, "full", 2775.237, FMS),
    ("A100 80GB", "Mistral-7B-v0.1", full, (4096,) * 8, "full", 3048.583, FMS),
    ("A100 80GB", "Mistral-7B-v0.1", lora, (4096,) * 4, "LoRA", 3597.611, FMS),
    ("A100 80GB", "Mistral-7B-v0.1", lora, (4096,) * 8, "LoRA", 3632.412, FMS),
    ("A100 80GB", "Mistral-7B-v0.1", qlora, (4096,) * 4, "QLoRA", 3428.645, FMS),
    ("A100 80GB", "Mistral-7B-v0.1", qlora, (4096,) * 8, "QLoRA", 3514.427, FMS),
    ("RTX 4090", "Llama-3.1-8B", lambda: [*full(), LoRA(r=8), Quantization()], (2048,) * 2, "QLoRA", 2413, TUNE),
    ("RTX 4090", "Llama-3.1-8B", lambda: [*full(), LoRA(r=8)], (2048,) * 2, "LoRA", 3083, TUNE),
    (
        *("RTX 4090", "Llama-3.1-8B", lambda: [*full(), OptimizerInBackward(), AdamW8bit()], (2048,) * 2),
        *("full, optimizer in backward", 1650, TUNE),
    ),
]


def deep(of_depth: Callable[[int], Work], layers: int) -> Work:
    first, second = of_depth(1), of_depth(2)
    return first + (second - first) * (layers - 1)


def speeds() -> list[dict[str, Any]]:
    found = []
    for name, model, make, lengths, method, published, source in SPEEDS:

        def work(layers: int, model: str = model, make: Make = make, lengths: tuple[int, ...] = lengths) -> Work:
            config = shape_config(model)
            config.num_hidden_layers, config.dtype = layers, torch.bfloat16
            numbers = TrainingConfig(batch_size=len(lengths), max_length=max(lengths), max_grad_norm=None)
            found = Work()
            record(model_without_data(config), numbers, make(), "cuda", lengths, work=found)
            return found * 0.5  # two steps

        whole = deep(work, shape_config(model).num_hidden_layers)
        predicted = sum(lengths) / sum(whole.seconds(card(name)).values())
        entry = {"card": name, "model": model, "method": method, "rows": f"{len(lengths)} x {lengths[0]}"}
        entry |= {"published": round(published), "predicted": round(predicted)}
        found.append(entry | {"ratio": round(predicted / published, 2), "source": source})
    return found


# -- the order of methods on an L40S ----------------------------------------------------------------------------------


def methods(rows: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        entry: dict[str, Any] = {"name": row["name"], "measured_ms": round(row["train_time_s"] / 5000 * 1e3)}
        try:
            whole = deep(lambda layers, row=row: _peft_step(row, layers, length), 28)  # type: ignore[misc]
        except Exception as error:  # methods whose set-up needs data; each is named
            entry["not_built"] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        else:
            entry["predicted_ms"] = round(sum(whole.seconds(card("L40S")).values()) * 1e3)
            entry["ratio"] = round(entry["predicted_ms"] / entry["measured_ms"], 2)
        found.append(entry)
    return found


def _peft_step(row: dict[str, Any], layers: int, length: int) -> Work:
    """The second step of the plain loop that peft's comparison runs."""
    import peft

    work, seen = Work(), []
    config = shape_config("Llama-3.2-3B")
    config.num_hidden_layers = layers
    with on_meta("cuda"):
        model = model_without_data(config)
        if row["peft_config"]:
            options = dict(row["peft_config"])
            kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(options.pop("peft_type"))]
            adapter = kind(**{"task_type": "CAUSAL_LM", **options})
            with torch.device("meta"):
                model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=row["autocast_adapter_dtype"])
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, **(row["optimizer_kwargs"] or {}))
        with Trace("cuda", work) as trace:
            for _ in range(2):
                ids = torch.ones(row["batch_size"], length, dtype=torch.int64, device="meta")
                with trace.during("forward"):
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                with trace.during("step"):
                    torch.nn.utils.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(work.copy())
    return seen[1] - seen[0]


# -- this processor ---------------------------------------------------------------------------------------------------

SETS: dict[str, Make] = {
    "plain": list,
    "checkpointing": lambda: [GradientCheckpointing()],
    "accumulation": lambda: [GradientAccumulation(steps=2)],
    "lora": lambda: [LoRA()],
    "lora, checkpointing": lambda: [LoRA(), GradientCheckpointing()],
    "pure bf16": lambda: [PureBF16()],
}


def cpu() -> list[dict[str, Any]]:
    here = _this_processor()
    print(f"{here.float32_flops / 1e9:.0f} GFLOPS float32, {here.half_flops / 1e9:.0f} bfloat16", file=sys.stderr)
    found = []
    for name, make in SETS.items():
        predicted = sum(_second_step(make, name == "pure bf16").seconds(here).values())
        measured = _measured(make, name == "pure bf16")
        found.append({"name": name, "measured_ms": round(measured * 1e3), "predicted_ms": round(predicted * 1e3)})
        found[-1]["ratio"] = round(predicted / measured, 2)
    return found


def _this_processor() -> Card:
    def rate(work: float, run: Callable[[], object]) -> float:
        run()
        return work / min(_seconds(run) for _ in range(7))

    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(512, 512).to(dtype), torch.randn(1408, 512).to(dtype)
        rates[dtype] = rate(2 * 512 * 512 * 1408, lambda a=left, b=right: torch.nn.functional.linear(a, b))  # type: ignore[misc]
    query = torch.randn(2, 8, 256, 64)
    attention = rate(
        2 * 2 * 8 * 256 * 256 * 64,
        lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True),
    )
    source, target, few = torch.randn(8_000_000), torch.empty(8_000_000), torch.randn(4)
    bandwidth = rate(8 * 8e6, lambda: target.copy_(source))
    launch = 1 / rate(1000, lambda: [few + few for _ in range(1000)])
    shares = Assumptions(1, 1, min(1, attention / rates[torch.bfloat16]), 1, 1, 1, launch)
    half, single = rates[torch.bfloat16], rates[torch.float32]
    return Card("this CPU", "consumer", 2**34, 2**34, 0, half, single, bandwidth, bandwidth, (8, 0), "", shares)


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()  # of this process alone: others may be at work here
    run()
    return time.process_time() - start


def _trainer(make: Make, bf16: bool, steps: int, device: str, observe: Callable[[Any], None]) -> Trainer:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 8192}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4))
        model = model.to(torch.bfloat16 if bf16 else torch.float32)
    numbers = TrainingConfig(batch_size=2, max_steps=steps, max_length=256, max_grad_norm=None, shuffle=False)
    rows = [{"input_ids": [1] * 256}] * 2
    return Trainer(model, rows, training=numbers, strategies=make(), observers=[observe])


def _second_step(make: Make, bf16: bool) -> Work:
    work, seen = Work(), []

    def observe(event: Any) -> None:
        if event.kind == "step":
            seen.append(work.copy())

    with on_meta("cpu"):
        trainer = _trainer(make, bf16, 2, "meta", observe)
        with Trace("cpu", work):
            trainer.train()
    return seen[1] - seen[0]


def _measured(make: Make, bf16: bool) -> float:
    moments = []

    def observe(event: Any) -> None:
        if event.kind == "step":
            moments.append(time.process_time())

    _trainer(make, bf16, 5, "cpu", observe).train()
    return min(after - before for before, after in pairwise(moments))


# -- the report -------------------------------------------------------------------------------------------------------


def kendall(rows: list[dict[str, Any]], apart: float = 0) -> float:
    """Share of pairs in the right order, less that in the wrong one; pairs less than `apart` apart are left out."""
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    pairs = [(a, b) for a, b in pairs if abs(a["measured_ms"] / b["measured_ms"] - 1) > apart]
    signs = [(a["measured_ms"] - b["measured_ms"]) * (a["predicted_ms"] - b["predicted_ms"]) for a, b in pairs]
    return round(sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs), 2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speeds", "methods", "cpu"))
    shared = Path(os.environ.get("LOWMEM_SHARED_DATA", HERE / "data"), "peft_memory.json")
    parser.add_argument("--rows", type=Path, default=shared, help="peft's rows (default: %(default)s)")
    parser.add_argument("--length", type=int, default=250, help="tokens a row, assumed (default: %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts: dict[str, Any] = {"environment": environment()}
    text, fine = ["# Predicted step time", as_table(facts["environment"])], True
    for part in ("speeds", "methods", "cpu"):
        if given.only in (None, part):
            rows = methods(json.loads(given.rows.read_text()), given.length) if part == "methods" else globals()[part]()
            built = [row for row in rows if "ratio" in row]
            ratios = [row["ratio"] for row in built]
            facts[part] = {"rows": rows, "median_ratio": statistics.median(ratios)}
            words = f"{len(built)} rows; predicted / measured from {min(ratios)} to {max(ratios)}"
            if part == "speeds":
                fine &= all(0.5 <= ratio <= 1.5 for ratio in ratios)
            else:
                facts[part] |= {"kendall_tau": kendall(built), "kendall_tau_apart": kendall(built, 0.03)}
                fine &= kendall(built, 0.03) >= 0.6
                words += f", Kendall's tau {kendall(built)}; {kendall(built, 0.03)} where measured times are 3 % apart"
            header = list(dict.fromkeys(key for row in rows for key in row))
            text += [f"## {part}", words, table(header, [[row.get(key, "") for key in header] for row in rows])]
            print(f"{part}: {words}")
    if given.only is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "step_time.json").write_text(json.dumps(facts, indent=1) + "\n")
        (RESULTS / "step_time.md").write_text("\n\n".join(text) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
