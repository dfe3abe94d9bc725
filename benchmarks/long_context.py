"""lowmem and TRL on long rows: peak live bytes above the weights, and time per token, from 1K to 16K tokens.

A random Llama of 4 layers and hidden size 1,024, LoRA of rank 16 on all linear layers, one row per step, every token a
target, gradient checkpointing and bfloat16 autocast on both sides, neither offloading. TRL takes its defaults, its
chunked loss among them; lowmem takes chunked_cross_entropy and chunked_layers with theirs. Weights, adapters and rows
are the same, every job has a process of its own, the sides take turns, and losses are compared (see versus_trl.py,
whose jobs these are).

    python benchmarks/long_context.py --quick          # 1,024 tokens, nothing is written
    python benchmarks/long_context.py                  # the table; about an hour on two cores
    python benchmarks/long_context.py --lengths 1024 4096
    python benchmarks/long_context.py --float32        # for a CPU without products in bfloat16, which takes hours else

Writes benchmarks/results/long_context.md and .json. Exit status 1 where a bar is missed, 2 where the two did not do the
same job.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import versus_trl
from environment import HERE, RESULTS, as_table, table

WORK = HERE / "out" / "long_context"
LENGTHS = [1024, 2048, 4096, 8192, 16384]
MEMORY_BAR, TIME_BAR = 0.50, 1.15
VOCABULARY = 32_000
SIDES: dict[str, dict[str, Any]] = {
    "lowmem": {"side": "lowmem", "settings": {"chunked_layers": True}},
    "TRL": {"side": "trl", "settings": {}},
}


def model_folder(work: Path) -> Path:
    """Random weights in bfloat16, and a tokenizer that TRL asks for."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = work / "model"
    if (folder / "config.json").exists():
        return folder
    partial = work / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=max(LENGTHS),
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
    words = {"<unk>": 0, "<eos>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<eos>",
        model_max_length=max(LENGTHS),
    )
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def common_of(length: int, arguments: argparse.Namespace, model: Path) -> versus_trl.Common:
    """The job for rows of one length; the same number of tokens is timed at every length, two steps at least."""
    import torch

    timed = max(2, 8192 // length)
    common = versus_trl.Common(
        model=str(model),
        rows="",
        steps=1 + timed,
        warm_up=1,
        memory_steps=2,
        rows_per_step=1,
        rows_per_micro_batch=1,
        max_length=length,
        logging_steps=1,
        rows_at_the_end=1,
        threads=arguments.threads,
        dtype="float32" if arguments.float32 else "bfloat16",
    )
    place = arguments.work / f"rows-{length}.json"
    generator = torch.Generator().manual_seed(length)
    rows = []
    for _ in range(common.steps + common.rows_at_the_end):
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    place.write_text(json.dumps(rows), encoding="utf-8")
    return versus_trl.Common(**{**asdict(common), "rows": str(place)})


def jobs_of(commons: dict[int, versus_trl.Common], repetitions: int, float32: bool) -> list[tuple[str, dict[str, Any]]]:
    """All jobs: bytes first, then times, the sides taking turns."""
    jobs = []
    sides = {n: {**side, "settings": {**side["settings"], "bf16": not float32}} for n, side in SIDES.items()}
    for length, common in commons.items():
        for name, side in sides.items():
            jobs.append((f"{name} {length} memory", {**side, "memory": True, "common": asdict(common)}))
        for repetition in range(repetitions):
            order = list(sides.items()) if repetition % 2 == 0 else list(reversed(sides.items()))
            for name, side in order:
                jobs.append((f"{name} {length} {repetition}", {**side, "memory": False, "common": asdict(common)}))
    return jobs


def report(commons: dict[int, versus_trl.Common], done: dict[str, dict[str, Any]], write: bool, float32: bool) -> int:
    """The table, the bars, and whether both did the same job."""
    rows, found, wrong, missed = [], {}, [], False
    for length in commons:
        ours, theirs = (versus_trl.summarise(f"{name} {length}", done) for name in SIDES)
        wrong += [f"{length} tokens: {text}" for text in versus_trl.same_job(ours, theirs)]
        memory = ours["peak_above_weights"] / theirs["peak_above_weights"]
        time = theirs["tokens_per_second"] / ours["tokens_per_second"]
        missed = missed or memory > MEMORY_BAR or time > TIME_BAR
        bytes_ = [f"{side['peak_above_weights'] / 2**20:,.0f}" for side in (ours, theirs)]
        speeds = [f"{side['tokens_per_second']:,.0f}" for side in (ours, theirs)]
        rows.append([f"{length:,}", *bytes_, f"{100 * memory:.0f} %", *speeds, f"{time:.2f} x"])
        found[length] = {"lowmem": ours, "trl": theirs, "memory": memory, "time": time}
    header = ["tokens", "lowmem MiB", "TRL MiB", "bytes", "lowmem tokens/s", "TRL tokens/s", "time per token"]
    command = shlex.join(["python", "benchmarks/long_context.py", *sys.argv[1:]])
    precision = "float32" if float32 else "bfloat16 autocast"
    facts = next(reversed(done.values()))["environment"]
    parts = [
        "# lowmem and TRL on long rows",
        f"Made by `{command}`: 4 layers, hidden size 1,024, LoRA of rank 16, one row per step, checkpointing and "
        f"{precision} on both sides, nothing offloaded. MiB are peak live bytes above the weights. Bars: bytes at most "
        f"{100 * MEMORY_BAR:.0f} %, time per token at most {TIME_BAR} x.",
        table(header, rows),
        f"Bars: {'missed somewhere' if missed else 'met at every length'}.",
        "## Made with\n\n" + as_table(facts),
    ]
    if wrong:
        parts.insert(1, "**The sides did not do the same job:**\n\n" + "\n".join(f"- {line}" for line in wrong))
    text = "\n\n".join(parts) + "\n"
    print("\n" + text)
    if write:
        (RESULTS / "long_context.md").write_text(text, encoding="utf-8")
        content = {"environment": facts, "found": found, "wrong": wrong, "jobs": done}
        (RESULTS / "long_context.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 2 if wrong else int(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest rows only; nothing is written")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in a row")
    parser.add_argument("--float32", action="store_true", help="weights and products in float32, on both sides")
    parser.add_argument("--repetitions", type=int, help="timed runs of each side (default 2)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for weights, rows and finished jobs")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = model_folder(arguments.work)
    lengths = arguments.lengths[:1] if arguments.quick else arguments.lengths
    commons = {length: common_of(length, arguments, model) for length in lengths}
    jobs = jobs_of(commons, arguments.repetitions or (1 if arguments.quick else 2), arguments.float32)
    done = versus_trl.run_all(jobs, arguments.work)
    return report(commons, done, not arguments.quick, arguments.float32)


if __name__ == "__main__":
    sys.exit(main())
