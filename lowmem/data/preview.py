"""What a model will see of its data, found out before any training: the facts behind `lowmem data`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from lowmem.config import WeightedPath
from lowmem.data.dataset import TokenizedDataset, tokenize
from lowmem.data.pieces import Reader
from lowmem.data.statistics import (
    RowTable,
    batch_facts,
    duplicate_facts,
    length_facts,
    shared_facts,
    supervised,
    target_facts,
)
from lowmem.errors import UserError
from lowmem.loading import load_tokenizer
from lowmem.recipe import Recipe

Split = Literal["train", "eval", "exact_match", "all"]
SPLITS = ("train", "eval", "exact_match")


def preview(recipe: Recipe, split: Split = "all", num_rows: int = 3, seed: int = 0) -> dict[str, Any]:
    """Everything `lowmem data` shows, as plain values; only the tokenizer is loaded, no weights.

    Args:
        recipe: what would be trained.
        split: a key of the recipe's `data` block, or all that it names.
        num_rows: rows shown in full, drawn at random.
        seed: of that draw.

    Returns:
        `model`, `max_length`, `splits` (name -> facts) and `shared_with_train` (split -> rows it shares with `train`,
        where both were read); docs/look-at-your-data.md lists the keys.

    Raises:
        UserError: the recipe names no such data, or they cannot be read.
    """
    chosen = [name for name in SPLITS if split in (name, "all") and getattr(recipe.data, name) is not None]
    if not chosen:
        raise UserError(f"data.{'train' if split == 'all' else split}: the recipe names no such data")
    if recipe.data.streaming and "train" in chosen:
        raise UserError(
            "data.streaming: a stream has no end to count up to; data.streaming=false reads all of it once, "
            "or give --split eval, or a part of the data as data.train"
        )
    tokenizer = load_tokenizer(recipe.model)
    facts: dict[str, Any] = {}
    tables: dict[str, RowTable] = {}
    for name in chosen:
        source = getattr(recipe.data, name)
        dataset = tokenize(source, tokenizer, recipe.data, recipe.training.max_length)
        tables[name] = RowTable(dataset)
        facts[name] = {
            "files": _files(source),
            "report": dataset.report.as_dict(),
            "lengths": length_facts(tables[name]),
            "supervised": target_facts(tables[name]),
            "duplicates": duplicate_facts(tables[name]),
            "rows": _rows(dataset, tokenizer, num_rows, seed),
        }
        if name == "train":
            facts[name]["batches"] = batch_facts(dataset, recipe.training, recipe.strategies)
    return {
        "model": recipe.model.name_or_path,
        "max_length": recipe.training.max_length,
        "splits": facts,
        "shared_with_train": {
            name: shared_facts(tables["train"], table)
            for name, table in tables.items()
            if name != "train" and "train" in tables
        },
    }


def _files(source: str | WeightedPath | Sequence[str | WeightedPath]) -> list[dict[str, Any]]:
    parts = [source] if isinstance(source, str | WeightedPath) else source
    return [asdict(part if isinstance(part, WeightedPath) else WeightedPath(part)) for part in parts]


def _rows(dataset: TokenizedDataset, tokenizer: Any, number: int, seed: int) -> list[dict[str, Any]]:
    """Some rows in the order of the set, each with its place, counts and pieces."""
    reader = Reader(tokenizer)
    found = []
    for index in sorted(random.Random(seed).sample(range(len(dataset)), min(number, len(dataset)))):
        sample = dataset[index]
        found.append(
            {
                "row": index,
                "tokens": len(sample["input_ids"]),
                "targets": int(supervised(sample).sum()),
                "pieces": [asdict(piece) for piece in reader.pieces(sample)],
            }
        )
    return found
