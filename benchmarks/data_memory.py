"""How much memory and time it takes to tokenise a million short rows: first by work, then from the cache.

Writes a JSONL file of 1,000,000 rows of prompt and completion, tokenises it in a child process with the defaults (with
processes and cache), and adds up the resident memory of that process and all it starts, 20 times a second. The start is
what the child holds with lowmem, torch, transformers and the tokenizer loaded. A third child reads the rows in random
order, as training does: pages of mapped files that it touches count as resident, although the system may take them
back. A twentieth of the number, as chat rows, which a template has to render, shows what processes gain.

    lowmem fetch smollm2
    python benchmarks/data_memory.py            # some minutes
    python benchmarks/data_memory.py --quick    # 20,000 rows: does it run?

Writes benchmarks/results/data_memory.json and prints a table. Exit status 1 where a peak is above the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from environment import RESULTS, as_table, environment, table

BAR = 1 << 30  # bytes above the start
WORDS = (
    "red",
    "green",
    "small",
    "round",
    "apple",
    "river",
    "stone",
    "cloud",
    "seven",
    "paper",
    "light",
    "quick",
    "old",
)
CHILD = """
import gc, sys, time, torch, transformers
from lowmem.config import DataConfig, ModelConfig
from lowmem.data import tokenize
from lowmem.loading import load_tokenizer
path, cache, what, workers = sys.argv[1:]
tokenizer = load_tokenizer(ModelConfig("smollm2"))
tokenizer("warm up")
gc.collect()
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
rows = tokenize(path, tokenizer, DataConfig(cache_dir=cache, num_workers=None if workers == "null" else int(workers)))
seconds = time.perf_counter() - start
if what == "read":
    tokens = sum(len(rows[i]["labels"] + rows[i]["input_ids"]) for i in torch.randperm(len(rows)).tolist())
print(len(rows), rows.report.tokens, seconds, flush=True)
sys.stdin.readline()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 rows, nothing is written down")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where files go meanwhile (about 1 GB); default: a temporary one")
    options = parser.parse_args()
    number = 20_000 if options.quick else options.rows
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, cache = Path(folder, "rows.jsonl"), Path(folder, "cache")
        write(path, number, prompt_and_completion)
        runs = {
            "first run": measure(path, cache, "tokenise", "null"),
            "from the cache": measure(path, cache, "tokenise", "null"),
            "from the cache, every row read": measure(path, cache, "read", "null"),
        }
        if len(list(cache.iterdir())) != 1:
            raise SystemExit("a run did not find the entry of the one before: was lowmem changed meanwhile?")
        few = Path(folder, "few.jsonl")
        write(few, number // 20, chat)
        runs |= {
            f"{number // 20:,} chat rows, num_workers: {n}": measure(
                few, Path(folder, f"cache-{n}"), "tokenise", str(n)
            )
            for n in (0, 1, 2)
        }
        result = {
            "environment": environment(),
            "rows": number,
            "file_bytes": path.stat().st_size,
            "cache_bytes": sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()),
            "bar_bytes": BAR,
            "runs": runs,
        }
    lines = [
        [
            name,
            f"{run['seconds']:.1f}",
            f"{run['rows_per_second']:,.0f}",
            mib(run["start_bytes"]),
            mib(run["above_start_bytes"]),
        ]
        for name, run in runs.items()
    ]
    print(as_table(result["environment"]))
    print(
        f"\n{number:,} rows, {mib(result['file_bytes'])} MiB of JSONL, {mib(result['cache_bytes'])} MiB in the cache\n"
    )
    print(table(["", "seconds", "rows/s", "start (MiB)", "peak above it (MiB), all processes"], lines))
    if not options.quick:
        (RESULTS / "data_memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(run["above_start_bytes"] >= BAR for run in runs.values()))


def write(path: Path, number: int, form: Callable[[str, str], dict[str, Any]]) -> None:
    """Rows of 10 to 28 words."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(number):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.randrange(5, 15))) for _ in range(2))
            file.write(json.dumps(form(f"{row}: {question}?", answer)) + "\n")


def prompt_and_completion(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": question, "completion": f" {answer}"}


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def measure(path: Path, cache: Path, what: str, workers: str) -> dict[str, Any]:
    """One child process: seconds it says, and the resident bytes of it and its children."""
    command = [sys.executable, "-c", CHILD, str(path), str(cache), what, workers]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    process = psutil.Process(child.pid)
    start = process.memory_info().rss
    child.stdin.write("\n")
    child.stdin.flush()
    peak = processes = 0
    while not select.select([child.stdout], [], [], 0.05)[0]:
        held = [rss for p in (process, *process.children(recursive=True)) if (rss := resident(p))]
        peak, processes = max(peak, sum(held)), max(processes, len(held))
    rows, tokens, seconds = child.stdout.readline().split()
    child.communicate("\n")
    return {
        "rows": int(rows),
        "tokens": int(tokens),
        "seconds": float(seconds),
        "rows_per_second": int(rows) / float(seconds),
        "processes": processes,
        "start_bytes": start,
        "peak_bytes": peak,
        "above_start_bytes": peak - start,
    }


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def mib(number: int) -> str:
    return f"{number / 2**20:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
