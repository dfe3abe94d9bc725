"""How many tokens of one row fit a card, and what each costs on it, technique by technique; predicted, no GPU needed.

    python benchmarks/context_slopes.py                # all tables: 20 minutes on two cores
    python benchmarks/context_slopes.py --only solar

QLoRA (NF4, double quantised) with adapters on all linear layers, one row per step, 8-bit AdamW, bfloat16 autocast,
flash attention. Every figure is a trace of two full steps at full depth, played to the model of PyTorch's
allocator with expandable segments; the longest row is searched with such traces, in steps of 1,024 tokens. CUDA itself
is given half a GiB of the card, so a card of 24 GiB has 23.5. Bytes per token are the difference between two lengths
near the longest row. Writes results/context_slopes.json and .md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from environment import RESULTS, as_table, environment, table

from lowmem import (
    AdamW8bit,
    ChunkedCrossEntropy,
    ChunkedLayers,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Quantization,
    Strategy,
    TiledMLP,
    TrainingConfig,
)
from lowmem.config import ModelConfig
from lowmem.memory.predict import judge
from lowmem.memory.subject import Subject, model_config

SOLAR, LLAMA = "upstage/SOLAR-10.7B-v1.0", "meta-llama/Llama-3.1-8B"
HOST = 64 * 2**30
STEP = 1024
MOST = 2**19
# name -> what is added to the line above it; ChunkedLayers takes the place of TiledMLP
LADDER: dict[str, tuple[bool, dict[str, Any], type[Strategy] | None]] = {
    "checkpointing": (False, {}, None),
    "+ chunked loss": (True, {}, None),
    "+ inputs in host memory": (True, {"offload": "cpu"}, None),
    "+ tiled MLP": (True, {"offload": "cpu"}, TiledMLP),
    "chunked layers instead": (True, {"offload": "cpu"}, ChunkedLayers),
    "+ two layers per checkpoint": (True, {"offload": "cpu", "layers_per_checkpoint": 2}, ChunkedLayers),
}
BEST = ("chunked layers instead", "+ two layers per checkpoint")


@dataclass(frozen=True)
class Found:
    """The longest row of a set-up.

    Attributes:
        tokens: of the longest row that fits.
        reserved, host: bytes on the card, and pinned, at that length.
        slope: bytes on the card per token.
        limit: `card`, or `host` where host memory is used up first.
    """

    tokens: int
    reserved: int
    host: int
    slope: float
    limit: str


@cache
def sizes(model: str, rank: int, name: str, length: int) -> tuple[int, int]:
    """Reserved bytes on the card, and pinned bytes, with a row of so many tokens."""
    chunked_loss, checkpointing, slices = LADDER[name]
    strategies: list[Strategy] = [Quantization(), LoRA(r=rank, lora_alpha=2 * rank), MixedPrecision(), AdamW8bit()]
    strategies += [GradientCheckpointing(**checkpointing), *([ChunkedCrossEntropy()] if chunked_loss else [])]
    strategies += [slices()] if slices else []
    named = ModelConfig(model, dtype="bfloat16")
    training = TrainingConfig(batch_size=1, max_length=length)
    config = model_config(named)
    found = judge(
        Subject.of_config(config, named, training, strategies).trace([length]),
        expandable=True,
        vocabulary=config.vocab_size,
    )
    print(f"{model} r={rank} {name} {length:,}: {found.peak_reserved_bytes / 2**30:.2f} GiB", flush=True)
    return found.peak_reserved_bytes, found.pinned_bytes


def longest(model: str, rank: int, name: str, usable: int) -> Found | None:
    """The longest row within the card and the host."""

    def over(length: int) -> float:
        """Beyond the tighter limit where positive, as a share of it."""
        card, host = sizes(model, rank, name, length)
        return max(card / usable, host / HOST) - 1

    low, high, tries = STEP, 8 * STEP, 0
    if over(low) > 0:
        return None
    while over(high) <= 0 and high < MOST:
        low, high = high, min(4 * high, MOST)
    while high - low > STEP and tries < 8:  # between what fits and what does not, where a line says
        share = over(low) / (over(low) - over(high))
        guess = low + (high - low) * share
        middle = min(max(int(guess // STEP) * STEP, low + STEP), high - STEP)
        low, high = (middle, high) if over(middle) <= 0 else (low, middle)
        tries += 1
    (card, host), shorter = sizes(model, rank, name, low), max(STEP, low * 3 // 4 // STEP * STEP)
    before = sizes(model, rank, name, shorter)
    slope = (card - before[0]) / (low - shorter) if low > shorter else 0.0
    limit = "host" if sizes(model, rank, name, low + STEP)[1] > HOST else "card"
    return Found(low, card, host, slope, limit)


def row(found: Found | None) -> list[object]:
    if found is None:
        return ["none", "", "", "", ""]
    gib = [f"{size / 2**30:.1f}" for size in (found.reserved, found.host)]
    return [f"{found.tokens:,}", *gib, f"{found.slope / 1000:.1f}", found.limit]


HEADER = ["longest row", "card GiB", "pinned GiB", "KB per token", "limit"]


def solar() -> tuple[str, dict[str, Any]]:
    """The ladder on a card of 24 GiB."""
    found = {name: longest(SOLAR, 16, name, int(23.5 * 2**30)) for name in LADDER}
    found |= {f"{name}, rank 32": longest(SOLAR, 32, name, int(23.5 * 2**30)) for name in BEST}
    text = "## SOLAR 10.7B, rank 16, card of 24 GiB\n\n"
    text += table(["", *HEADER], [[name, *row(each)] for name, each in found.items()])
    marks = {}
    for rank in (16, 32):
        for length in (131_072, 200_000):
            for name in BEST:
                card, host = sizes(SOLAR, rank, name, length)
                marks[f"{length:,} tokens, rank {rank}, {name}"] = (card, host)
    rows = [[name, f"{card / 2**30:.2f}", f"{host / 2**30:.1f}"] for name, (card, host) in marks.items()]
    text += "\n\n" + table(["", "card GiB", "pinned GiB"], rows)
    return text, {"ladder": {k: v and asdict(v) for k, v in found.items()}, "marks": marks}


def llama() -> tuple[str, dict[str, Any]]:
    """Llama-3.1-8B on cards of 8 to 24 GiB, where Unsloth has published figures."""
    published = {8: 2_972, 12: 21_848, 16: 40_724, 24: 78_475}
    rows, found = [], {}
    for card, theirs in published.items():
        for name in BEST:
            each = longest(LLAMA, 32, name, int((card - 0.5) * 2**30))
            rows.append([f"{card} GiB, {name}", *row(each), f"{theirs:,}"])
            found[f"{card} {name}"] = each and asdict(each)
    text = "## Llama-3.1-8B, rank 32\n\n" + table(["", *HEADER, "Unsloth's table"], rows)
    return text, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["solar", "llama"], help="one of the tables; nothing is written")
    chosen = parser.parse_args().only
    parts = {"solar": solar, "llama": llama}
    made = {name: part() for name, part in parts.items() if chosen in (None, name)}
    text = "# The longest row, technique by technique (predicted)\n\n"
    text += "Made by `benchmarks/context_slopes.py`, whose text says how. At most 64 GiB of host memory are used.\n\n"
    text += "\n\n".join(part for part, _ in made.values()) + "\n\n" + as_table(environment()) + "\n"
    print(text)
    if chosen is None:
        (RESULTS / "context_slopes.md").write_text(text, encoding="utf-8")
        content = {**{name: facts for name, (_, facts) in made.items()}, "environment": environment()}
        (RESULTS / "context_slopes.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
