"""What a card holds when several share SOLAR 10.7B: predicted by lowmem, as a table and a picture for the docs.

    python benchmarks/several_gpus.py

Every number is that of the card that needs most, at the peak of the whole run (loading, steps, saving); no GPU and no
weights are needed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowmem.memory.beside import ordered
from lowmem.memory.estimate import GIB, Estimate, estimate
from lowmem.memory.picture import INK, SOFT, colours, legend, new_figure, tidy, titles, write
from lowmem.memory.subject import Subject
from lowmem.recipe import recipe_from_overrides

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "several_gpus"
PICTURE = ROOT / "docs" / "images" / "several-gpus.png"
CARDS = (1, 2, 4, 8)
ROWS, TOKENS = 8, 1024
TRAINED = {
    "full": ["model.dtype=float32", "strategies.mixed_precision={}"],
    "LoRA": [
        "model.dtype=bfloat16",
        "strategies.mixed_precision={}",
        "strategies.lora={r: 16, lora_alpha: 32, target_modules: all-linear}",
    ],
}
# in the tutorial's order: data, pipeline, tensor, ZeRO
ENGINES = {
    "ddp": "strategies.ddp={}",
    "pipeline_parallel": "strategies.pipeline_parallel={}",
    "tensor_parallel": "strategies.tensor_parallel={}",
    "deepspeed_zero, stage 1": "strategies.deepspeed_zero={zero_stage: 1}",
    "deepspeed_zero, stage 2": "strategies.deepspeed_zero={zero_stage: 2}",
    "deepspeed_zero, stage 3": "strategies.deepspeed_zero={zero_stage: 3}",
    "fsdp_2": "strategies.fsdp_2={}",
}
ALIKE = ("deepspeed_zero, stage 1", "deepspeed_zero, stage 2")  # of what adapters train, a part or the whole is little
COMMON = [
    "model.name_or_path=solar-10.7b",
    f"training.batch_size={ROWS}",
    f"training.max_length={TOKENS}",
    "strategies.gradient_checkpointing={}",
    "strategies.gradient_accumulation={micro_batch_size: 1}",
]


def predicted(trained: str, engine: str, cards: int) -> Estimate:
    """The run on so many cards; on one there is nothing to share."""
    more = [ENGINES[engine]] if cards > 1 else []
    run = Subject.of(recipe_from_overrides([*COMMON, *TRAINED[trained], *more]))
    return estimate(replace(run, gpus=cards), band=False)


def row(trained: str, engine: str, cards: int, found: Estimate) -> dict[str, Any]:
    """A prediction as plain values."""
    return {
        "trained": trained,
        "engine": engine if cards > 1 else "one card",
        "cards": cards,
        "reserved_bytes": found.peak_reserved_bytes,
        "sent_bytes": found.sent_bytes,
        "phase": found.phase,
        "ledger": found.ledger,
    }


SHOWN = ("weights", "gradients", "optimizer state", "activations", "communication")
_BESIDE = {"weights, frozen": "weights", "weights, trainable": "weights", "layers put together": "communication"}


def in_groups(ledger: dict[str, int]) -> dict[str, int]:
    """The categories of the page; what is left is `other`."""
    found = dict.fromkeys((*SHOWN, "other"), 0)
    for name, size in ledger.items():
        group = _BESIDE.get(name, name)
        found[group if group in found else "other"] += size
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """For the page."""
    head = ["trained", "with", "cards", *SHOWN, "other", "in all, GiB", "sent in a step, GiB"]
    lines = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for found in rows:
        groups = in_groups(found["ledger"])
        name, _, stage = found["engine"].partition(",")
        cells = [found["trained"], f"`{name}`{stage}" if found["cards"] > 1 else "one card", str(found["cards"])]
        cells += [f"{size / GIB:.2f}" for size in groups.values()]
        cells += [f"**{found['reserved_bytes'] / GIB:.2f}**", f"{found['sent_bytes'] / GIB:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]]) -> None:
    """Bars of what a card holds."""
    names = ordered({name for found in rows for name, size in found["ledger"].items() if size >= GIB / 20})
    shades = colours(names)
    figure = new_figure(9.5, 11.0)
    titles(
        figure,
        "SOLAR 10.7B on 1, 2, 4 and 8 cards: what each card holds",
        f"predicted at the peak; {ROWS} rows of {TOKENS:,} tokens per optimizer step, one row at a time",
    )
    for number, trained in enumerate(TRAINED):
        axes = figure.add_axes((0.24, (0.5, 0.1)[number], 0.72, (0.4, 0.31)[number]))
        tidy(axes)
        shown = [found for found in rows if found["trained"] == trained][::-1]
        places = range(len(shown))
        left = [0.0] * len(shown)
        for name in names:
            sizes = [found["ledger"].get(name, 0) / GIB for found in shown]
            axes.barh(places, sizes, left=left, color=shades[name], height=0.72)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for place, end in zip(places, left, strict=True):
            axes.text(end, place, f" {end:.1f}", va="center", fontsize=8, color=INK)
        words = [f"{found['engine']}, {found['cards']}" if found["cards"] > 1 else "one card" for found in shown]
        axes.set_yticks(list(places), words)
        axes.set_title(f"{trained}: GiB on each card", loc="left", fontsize=10, color=SOFT)
    legend(figure, shades, loc="lower center", ncols=4)
    write(figure, PICTURE)


def main() -> int:
    rows = []
    for trained in TRAINED:
        for engine in ENGINES:
            for cards in CARDS:
                if (cards == 1 and engine != "ddp") or (trained == "LoRA" and engine in ALIKE):
                    continue
                rows.append(row(trained, engine, cards, predicted(trained, engine, cards)))
                print(trained, engine, cards, f"{rows[-1]['reserved_bytes'] / GIB:.2f} GiB", flush=True)
    RESULTS.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(
        f"# SOLAR 10.7B on several cards, as predicted\n\n{table(rows)}", encoding="utf-8"
    )
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
