"""The optimizer batches of a run that need most memory, by the lengths of its rows in their real order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowmem.batches import Cursor, make_cursor
from lowmem.config import TrainingConfig
from lowmem.data import TokenizedDataset
from lowmem.errors import UserError

if TYPE_CHECKING:
    from lowmem.memory.meta import Device
    from lowmem.memory.subject import Subject
    from lowmem.recipe import Recipe

Lengths = tuple[int, ...]
# rows of all epochs together; a longer run is judged by its longest rows, as if they came together (0.5 s)
_MOST_VISITS = 20_000_000


@dataclass(frozen=True)
class WorstBatches:
    """What a run has to be able to hold.

    Attributes:
        batches: tokens of each row, one entry per candidate: the batch with the longest row, the one with most tokens
            when padded, and the one with most tokens; once where they are the same.
        rows: their row numbers in the data set; empty where the batches are made up.
        words: where they come from, for people.
    """

    batches: list[Lengths]
    rows: list[list[int]]
    words: str


def worst_batches(rows: Any, training: TrainingConfig) -> WorstBatches:
    """The batches of a run, all epochs in their real order, that may need most.

    Args:
        rows: the tokenised data set; of a stream, or of nothing, no lengths are known.
        training: batch_size, max_length, seed, shuffle, max_steps and num_train_epochs.
    """
    if not isinstance(rows, TokenizedDataset) or not len(rows):
        words = "a stream has no known lengths: " if rows is not None else ""
        whole = (training.max_length,) * training.batch_size
        return WorstBatches([whole], [], f"{words}batch_size rows of max_length")
    cursor = make_cursor(rows, training)
    assert isinstance(cursor, Cursor)
    steps = cursor.total_steps(training.max_steps, training.num_train_epochs)
    per_epoch = ceil(len(rows) / training.batch_size)
    if ceil(steps / per_epoch) * len(rows) > _MOST_VISITS:
        longest = np.argsort(rows.lengths, kind="stable")[::-1][: training.batch_size]
        return _found(rows, [longest], f"the {len(longest):,} longest of {len(rows):,} rows")
    chosen = _candidates(cursor, rows.lengths, training.batch_size, steps)
    return _found(rows, chosen, f"the longest of {steps:,} batches of {len(rows):,} rows")


def longest_eval_batch(rows: TokenizedDataset, batch_size: int) -> Lengths:
    """The batch of an evaluation, which takes rows by length, that is largest when padded."""
    lengths = np.sort(rows.lengths)
    starts = np.arange(0, len(lengths), batch_size)
    ends = np.minimum(starts + batch_size, len(lengths))
    worst = int(np.argmax((ends - starts) * lengths[ends - 1]))
    return tuple(lengths[starts[worst] : ends[worst]].tolist())


def heaviest(subject: Subject, batches: Sequence[Lengths], device: Device) -> Lengths:
    """Of several candidates, the one whose peak is highest in a few layers."""
    if len(batches) == 1:
        return batches[0]
    return max(batches, key=lambda rows: subject.trace(rows, device, layers=subject.shallow).peak()[0])


def worst_batches_of(recipe: Recipe) -> tuple[WorstBatches, Lengths | None]:
    """The worst batches of a recipe's own data, and its longest evaluation batch; rows are read and tokenised.

    Raises:
        UserError: there are no data, or they or the tokenizer cannot be read.
    """
    from lowmem.data import tokenize
    from lowmem.data.stream import open_training_rows
    from lowmem.loading import load_tokenizer

    data, training = recipe.data, recipe.training
    if data.train is None:
        raise UserError("--data: there is no data.train to read; give a recipe that has it, or leave --data out")
    tokenizer = load_tokenizer(recipe.model)
    rows = open_training_rows(data.train, tokenizer, data, training, evaluated=data.eval is not None)
    held_out = None if data.eval is None else tokenize(data.eval, tokenizer, data, training.max_length)
    longest = None if held_out is None else longest_eval_batch(held_out, training.eval_batch_size)
    return worst_batches(rows, training), longest


def _found(rows: TokenizedDataset, chosen: list[NDArray[np.int64]], words: str) -> WorstBatches:
    by_lengths = {tuple(sorted(rows.lengths[numbers].tolist(), reverse=True)): numbers.tolist() for numbers in chosen}
    return WorstBatches(list(by_lengths), list(by_lengths.values()), words)


def _candidates(cursor: Cursor, lengths: NDArray[np.int64], batch_size: int, steps: int) -> list[NDArray[np.int64]]:
    """Row numbers of the batch with the longest row (of several, the one with most tokens), and of the others."""
    best: list[tuple[tuple[int, int], NDArray[np.int64]]] = [((0, 0), np.empty(0, np.int64))] * 3
    for order in _orders(cursor, batch_size, steps):
        ordered = lengths[order]
        starts = np.arange(0, len(order), batch_size)
        longest, tokens = np.maximum.reduceat(ordered, starts), np.add.reduceat(ordered, starts)
        padded = longest * np.minimum(batch_size, len(order) - starts)
        for place, (first, second) in enumerate(((longest, padded), (padded, tokens), (tokens, padded))):
            index = int(np.argmax(first * (int(second.max()) + 1) + second))
            key = int(first[index]), int(second[index])
            if key > best[place][0]:
                best[place] = key, order[starts[index] : starts[index] + batch_size]
    return [numbers for _, numbers in best]


def _orders(cursor: Cursor, batch_size: int, steps: int) -> Iterator[NDArray[np.int64]]:
    """The order of rows of each epoch; of the last one only what the run comes to."""
    per_epoch = ceil(cursor.num_rows / batch_size)
    for epoch in range(ceil(steps / per_epoch)):
        order = replace(cursor, epoch=epoch)._order().numpy()
        yield order[: (steps - epoch * per_epoch) * batch_size]
        if not cursor.shuffle and steps >= per_epoch:
            return  # every epoch is like the first
