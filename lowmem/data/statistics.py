"""Numbers about tokenised rows: lengths, targets, duplicates, rows that two sets share, batches and their padding."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowmem.config import TrainingConfig
from lowmem.data.dataset import TokenizedDataset
from lowmem.data.rows import IGNORE
from lowmem.strategy import ForwardBackward, Sample, Stage, Strategy, resolve, traits

if TYPE_CHECKING:
    from torch import Tensor

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
FEW_TARGETS = 4
BATCHES_LOOKED_AT = 200
_MOST_BINS = 16


class RowTable:
    """A few numbers for every row, 28 bytes each; the rows themselves are read once and not kept.

    Attributes:
        lengths: tokens, int64, shape (rows,).
        targets: prediction targets, int32, shape (rows,).
        rows: hashes of token ids, labels and weights, uint64, shape (rows,).
        prompts: hashes of the tokens before the first target, uint64, shape (rows,); 0 where there is no prompt.
        weighted: rows with a loss weight other than 0 and 1.
    """

    def __init__(self, dataset: TokenizedDataset):
        number = len(dataset)
        self.lengths = np.zeros(number, np.int64)
        self.targets = np.zeros(number, np.int32)
        self.rows = np.zeros(number, np.uint64)
        self.prompts = np.zeros(number, np.uint64)
        self.weighted = 0
        for index in range(number):
            self._note(index, dataset[index])

    def _note(self, index: int, sample: Sample) -> None:
        ids, labels, weights = sample["input_ids"], sample["labels"], sample.get("loss_weights")
        learnt = supervised(sample)
        first = int(learnt.argmax())
        self.lengths[index] = len(ids)
        self.targets[index] = np.count_nonzero(learnt)
        parts = (ids, labels) if weights is None else (ids, labels, weights)
        self.rows[index] = _hash(*parts)
        # plain text has none: its first token is a target but for its place, or the tokenizer's BOS
        if first > 1:
            self.prompts[index] = _hash(ids[:first])
        if weights is not None:
            self.weighted += bool(((weights != 0) & (weights != 1))[learnt].any())


def supervised(sample: Sample) -> NDArray[np.bool_]:
    """Which tokens of a row are prediction targets, shape (length,)."""
    learnt: NDArray[np.bool_] = np.asarray(sample["labels"]) != IGNORE
    learnt[:1] = False  # nothing predicts the first token
    if "loss_weights" in sample:
        learnt &= np.asarray(sample["loss_weights"]) > 0
    return learnt


def spread(values: NDArray[Any]) -> dict[str, int]:
    """Smallest, percentiles and largest of whole numbers; every one is a number that occurs."""
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    middle = {f"p{q}": int(value) for q, value in zip(PERCENTILES, found, strict=True)}
    return {"min": int(values.min()), **middle, "max": int(values.max())}


def length_facts(table: RowTable) -> dict[str, Any]:
    """`mean`, the percentiles, and the histogram of lengths in tokens."""
    edges = bins(table.lengths)
    rows, _ = np.histogram(table.lengths, edges)
    tokens, _ = np.histogram(table.lengths, edges, weights=table.lengths)
    histogram = {"edges": edges, "rows": rows.tolist(), "tokens": tokens.astype(int).tolist()}
    return {"mean": float(table.lengths.mean()), **spread(table.lengths), "histogram": histogram}


def bins(lengths: NDArray[np.int64]) -> list[int]:
    """Edges of a histogram, whole numbers; a bin holds from its left edge to below its right one.

    Bins are equally wide, or, where a few rows are far longer than the rest, each about half as wide again.
    """
    low, high = int(lengths.min()), int(lengths.max()) + 1
    if high <= 8 * int(np.median(lengths)):
        width = _round_width((high - low) / _MOST_BINS)
        start = low // width * width
        return list(range(start, high + width, width))
    steps = sorted({1, *(2**n for n in range(1, 40)), *(3 * 2**n for n in range(40))})
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high)
    return [step for step in steps if first <= step <= last]


def _round_width(least: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    return next(d * int(10**n) for n in range(12) for d in (1, 2, 5) if d * 10**n >= least)


def target_facts(table: RowTable) -> dict[str, Any]:
    """How much of the rows is learnt: over all, in tenths of a row, and rows with few targets."""
    shares = table.targets / table.lengths
    tenths, _ = np.histogram(shares, np.linspace(0, 1, 11))
    return {
        "share": float(table.targets.sum() / table.lengths.sum()),
        "rows_by_tenth": tenths.tolist(),
        "targets_per_row": spread(table.targets),
        "few": FEW_TARGETS,
        "rows_with_few": int((table.targets <= FEW_TARGETS).sum()),
        "rows_with_fractional_weights": table.weighted,
    }


def duplicate_facts(table: RowTable) -> dict[str, int]:
    """Rows that occur more than once, and prompts that have several answers."""
    _, counts = np.unique(table.rows, return_counts=True)
    with_prompt = table.prompts != 0
    pairs = np.stack([table.prompts[with_prompt], table.rows[with_prompt]], axis=1)
    different = np.unique(pairs, axis=0)
    _, answers = np.unique(different[:, 0], return_counts=True)
    return {
        "extra_copies": int((counts - 1).sum()),
        "repeated_rows": int((counts > 1).sum()),
        "prompts_with_several_answers": int((answers > 1).sum()),
        "rows_of_such_prompts": int(answers[answers > 1].sum()),
    }


def shared_facts(train: RowTable, other: RowTable) -> dict[str, int]:
    """Rows of another set that stand in the training set as well, whole or with their prompt."""
    rows = np.isin(other.rows, train.rows)
    prompts = np.isin(other.prompts, train.prompts) & (other.prompts != 0)
    return {"rows": int(rows.sum()), "prompts": int((prompts | rows).sum()), "of_rows": len(other.rows)}


def batch_facts(dataset: TokenizedDataset, training: TrainingConfig, strategies: Sequence[Strategy]) -> dict[str, Any]:
    """Steps, and the share of places in the model's inputs that hold padding.

    The padding is that of the first batches of the run, in its own order, split as the strategies split them: as the
    recipe says, and with and without `packing`.
    """
    from lowmem.batches import Cursor
    from lowmem.strategies import Packing

    cursor = Cursor(dataset, training.batch_size, training.seed, training.shuffle)
    steps = cursor.total_steps(None, 1)
    looked_at = min(steps, BATCHES_LOOKED_AT)
    without = [strategy for strategy in strategies if strategy.slot != Packing.slot]
    ways = {"recipe": list(strategies), "without_packing": without, "with_packing": [*without, Packing()]}
    paddings = {name: _Padding(way, training) for name, way in ways.items()}
    for batch in islice(cursor.batches(), looked_at):
        for padding in paddings.values():
            padding.add(batch)
    return {
        "batch_size": training.batch_size,
        "steps_per_epoch": steps,
        "total_steps": cursor.total_steps(training.max_steps, training.num_train_epochs),
        "batches_looked_at": looked_at,
        "padding_share": {name: padding.share for name, padding in paddings.items()},
        "passes_per_step": {name: padding.passes / looked_at for name, padding in paddings.items()},
    }


class _Padding:
    """Counts places and padding of the micro-batches that some strategies make of a batch."""

    def __init__(self, strategies: list[Strategy], training: TrainingConfig):
        import torch

        from lowmem.run import Run

        self.nothing = torch.zeros(())

        self.places = self.tokens = self.passes = 0
        ordered = resolve(strategies)
        run = Run(training, torch.device("meta"), traits(ordered)[0])
        self.forward_backward: ForwardBackward = self._count
        for strategy in ordered:
            if strategy.stage >= Stage.SPLIT:  # what makes micro-batches of a batch; nothing else is looked at
                self.forward_backward = strategy.wrap_forward_backward(self.forward_backward, run)

    def add(self, batch: list[Sample]) -> None:
        self.forward_backward([batch], 1.0)

    def _count(self, micro_batches: list[list[Sample]], divisor: Any) -> Tensor:
        for samples in micro_batches:
            lengths = [len(sample["input_ids"]) for sample in samples]
            self.places += max(lengths) * len(lengths)
            self.tokens += sum(lengths)
            self.passes += 1
        return self.nothing

    @property
    def share(self) -> float:
        return 1 - self.tokens / self.places


def _hash(*parts: NDArray[Any]) -> int:
    """64 bits: among a million rows, two different ones meet with a probability of 3 in 100 million."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes())
    return int.from_bytes(digest.digest(), "little") or 1
