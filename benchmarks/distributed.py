"""What each engine makes of two processes on this machine: tokens/s, bytes on each rank, bytes sent in a step.

A random Llama (4 layers, hidden size 512), the same rows, 8 rows of 256 tokens per optimizer step in 4 micro-batches,
trained whole in float32 and with LoRA, by one process and by each engine on several; every job in processes of its own,
started as torchrun does. Losses must be those of one process (to 1e-4): else the table says so, and the status is 2.

    python benchmarks/distributed.py --quick      # DDP and FSDP2, nothing is written
    python benchmarks/distributed.py              # all engines that are installed; some minutes on an idle machine
    python benchmarks/distributed.py --nproc 4

Bytes are the live tensors of a rank at the peak of the second step. Bytes sent are what the loopback device carried for
all ranks together, so nothing else may talk over it. On one machine of few cores the speeds show what an engine costs,
not what it gains: the processes share the cores, and each job says how many threads it had. Where there are cards, each
process takes one and NCCL carries the messages, which nobody counts then (`gpu_suite.py` has these jobs as checks).

Writes benchmarks/results/distributed.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from environment import RESULTS, as_table, environment, table

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP, ROWS = 10, 3, 8


@dataclass(frozen=True)
class Size:
    """The model, and the tokens of a row."""

    length: int
    vocabulary: int
    hidden: int
    intermediate: int


FULL, TINY = Size(256, 8_000, 512, 1536), Size(16, 512, 64, 128)
ENGINES = ("ddp", "fsdp_2", "tensor_parallel", "pipeline_parallel", "deepspeed_zero")
SETS = ("full", "lora")
OFF_BY = 1e-4


def job(engine: str, kind: str, place: Path, size: Size) -> None:
    """One rank's part of a job; its figures go into a file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lowmem
    from lowmem.memory.meter import MemoryLedger
    from lowmem.strategies import STRATEGIES

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(size.vocabulary, (size.length,), generator=generator).tolist() for _ in range(ROWS * STEPS)]
    seen: dict[str, Any] = {"losses": []}

    def watch(event: lowmem.Event) -> None:
        if event.kind == "ledger":
            seen.update(rows=dict(event.metrics["rows"]), peak_bytes=event.metrics["peak_bytes"])
        if event.kind == "step":
            seen["losses"].append(event.metrics["loss"])
            if event.metrics["step"] in (WARM_UP, STEPS):
                seen.setdefault("moments", []).append((time.perf_counter(), _carried()))

    ledger = MemoryLedger()
    watch.on_every_rank = ledger.on_every_rank = True  # type: ignore[attr-defined]
    strategies = [lowmem.GradientAccumulation(steps=4), *([lowmem.LoRA()] if kind == "lora" else [])]
    strategies += [STRATEGIES[engine]()] if engine != "one process" else []
    lowmem.Trainer(
        LlamaForCausalLM(config),
        [{"input_ids": row, "labels": row} for row in ids],
        training=lowmem.TrainingConfig(batch_size=ROWS, max_steps=STEPS, max_length=size.length, shuffle=False),
        strategies=strategies,
        observers=[ledger, watch],
    ).train()
    (start, sent_before), (end, sent_after) = seen.pop("moments")
    seen["tokens_per_second"] = ROWS * size.length * (STEPS - WARM_UP) / (end - start)
    carried = (sent_after - sent_before) // (STEPS - WARM_UP)
    seen["bytes_sent_per_step"] = None if torch.cuda.is_available() else carried
    seen["threads"] = torch.get_num_threads()
    rank = os.environ.get("RANK", "0")
    (place / f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def _carried() -> int:
    """Bytes that the loopback device has carried so far."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def run(engine: str, kind: str, nproc: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """The figures of all ranks.

    Raises:
        RuntimeError: the job has failed; the text is the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = [__file__, "--job", engine, "--kind", kind, "--place", folder, *(["--tiny"] if tiny else [])]
        number = 1 if engine == "one process" else nproc
        threads = str(max(1, (os.cpu_count() or 1) // number))
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        command = [sys.executable, *(several if number > 1 else []), *own]
        quiet = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        quiet["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{engine}, {kind}: failed\n{ended.stderr[-3000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(number)]


def off_by(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> float:
    """The largest difference between the losses of two jobs."""
    return max(abs(a - b) for a, b in zip(expected[0]["losses"], got[0]["losses"], strict=True))


def engines(quick: bool) -> list[str]:
    """Those that this lowmem has and whose package is installed."""
    from lowmem.strategies import STRATEGIES

    found = [name for name in ENGINES if name in STRATEGIES]
    found = [name for name in found if name != "deepspeed_zero" or find_spec("deepspeed")]
    return ["one process", *(found[:2] if quick else found)]


def _shared(nproc: int, facts: dict[str, Any]) -> str:
    import torch

    if torch.cuda.is_available():
        return f"NCCL, {nproc} cards of the kind {torch.cuda.get_device_name()}"
    return f"gloo, whose {facts['cores']} cores the processes share"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two engines, LoRA only; nothing is written")
    parser.add_argument("--nproc", type=int, default=2, help="processes of an engine")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=SETS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments.job, arguments.kind, arguments.place, TINY if arguments.tiny else FULL)
        return 0
    rows, found, wrong = [], {}, []
    for kind in SETS[1:] if arguments.quick else SETS:
        expected: list[dict[str, Any]] = []
        for engine in engines(arguments.quick):
            ranks = run(engine, kind, arguments.nproc)
            found[f"{engine}, {kind}"] = ranks
            expected = expected or ranks
            worst = off_by(expected, ranks)
            if worst > OFF_BY:
                wrong.append(f"{engine}, {kind}: the loss is off by {worst:.2g}")
            share = [f"{rank['peak_bytes'] / 2**20:,.1f}" for rank in ranks]
            lasting = [sum(v for k, v in r["rows"].items() if k.startswith("weights") or "state" in k) for r in ranks]
            cells = [f"{ranks[0]['tokens_per_second']:,.0f}", " / ".join(share)]
            cells += [" / ".join(f"{x / 2**20:,.1f}" for x in lasting)]
            sent = None if len(ranks) == 1 else ranks[0]["bytes_sent_per_step"]
            cells += ["-" if sent is None else f"{sent / 2**20:,.1f}", f"{worst:.1g}"]
            rows.append([kind, engine, *cells])
            print(rows[-1], flush=True)
    header = [
        "",
        "engine",
        "tokens/s",
        "peak MiB, each rank",
        "of it weights and states",
        "MiB sent in a step",
        "loss off by",
    ]
    facts = environment()
    parts = [
        f"# Engines on {arguments.nproc} processes",
        "Made by `python benchmarks/distributed.py`: 4 layers, hidden size 512, 8 rows of 256 tokens per step in 4 "
        f"micro-batches, float32, one machine, {_shared(arguments.nproc, facts)}.",
        table(header, rows),
        "## Made with\n\n" + as_table(facts),
    ]
    if wrong:
        parts.insert(1, "**Not what one process computes:**\n\n" + "\n".join(f"- {line}" for line in wrong))
    text = "\n\n".join(parts) + "\n"
    print("\n" + text)
    if not arguments.quick:
        (RESULTS / "distributed.md").write_text(text, encoding="utf-8")
        content = {"environment": facts, "found": found, "wrong": wrong}
        (RESULTS / "distributed.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
