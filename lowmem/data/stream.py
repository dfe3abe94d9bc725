"""Streams: rows without a length, read pass by pass, mixed, shuffled through a buffer and tokenised as they come."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from lowmem.config import DataConfig, TrainingConfig, WeightedPath
from lowmem.data.chunks import Chunk, Item, RowTokenizer, check_tokens, read_items, require_borders
from lowmem.data.dataset import TokenizedDataset, tokenize
from lowmem.data.read import OnBad, Row, is_hub, read_rows
from lowmem.data.report import DataReport
from lowmem.errors import UserError

SHUFFLE_BUFFER = 1000  # rows
# the number of a pass, counted from 0 -> its rows
Pass: TypeAlias = Callable[[int, OnBad], Iterator[tuple[Row, str]]]


class TokenStream:
    """What a run without a known number of rows learns from.

    Attributes:
        report: what became of the rows, filled by whoever takes them.
        vocabulary: tokens that the model knows, once there is a model.
    """

    vocabulary: int | None = None

    def __init__(self, source: Any, work: RowTokenizer, shuffle_buffer: int, seed: int):
        self.source, self.work, self.shuffle_buffer, self.seed = source, work, shuffle_buffer, seed
        self.report = DataReport()
        self._pass = _weighted(source, work.data) if work.data.streaming else _of_python(source)

    @property
    def once(self) -> bool:
        """The rows can be read a single time only."""
        return isinstance(self.source, Iterator)

    def items(self, epoch: int) -> Iterator[Item]:
        """The rows of one pass, shuffled; the same for the same epoch, as long as the source gives the same."""
        items = read_items(self._pass, epoch, self.work.data)
        if self.shuffle_buffer < 2:
            return items
        return _shuffled(items, self.shuffle_buffer, random.Random(self.seed * 1_000_003 + epoch))

    def tokenize(self, items: list[Item]) -> Chunk:
        """Tokenise some rows.

        Raises:
            UserError: one of them cannot be used.
        """
        chunk = self.work(items)
        if chunk.error is not None:
            raise chunk.error
        require_borders(chunk.report, chunk.borderless, self.work.data)
        if self.vocabulary is not None:
            check_tokens(chunk.input_ids, chunk.labels, self.vocabulary)
        return chunk


def open_training_rows(
    source: Any, tokenizer: Any, data: DataConfig, training: TrainingConfig, *, evaluated: bool = False
) -> TokenizedDataset | TokenStream | None:
    """The rows a run learns from: all of them tokenised, or a stream that is read while it trains.

    Args:
        source: whatever `tokenize` takes; an iterable without a length, or a function that returns one, is a stream;
            None stays None.
        tokenizer: a transformers tokenizer.
        data: how rows are read.
        training: max_length, max_steps, shuffle and seed.
        evaluated: other rows are tokenised with the same settings.

    Raises:
        UserError: a stream without `max_steps`, or settings that have no effect on this source.
    """
    if data.streaming and source is not None and not _paths(source):
        raise UserError(
            f"data.streaming: has no effect on rows given in Python ({type(source).__name__}); it is for files and hub "
            "ids, and an iterable without a length is a stream as it is"
        )
    if not data.streaming and not is_stream(source):
        if data.shuffle_buffer is not None and source is not None:
            raise UserError("data.shuffle_buffer: has no effect on rows of known number, which are shuffled as a whole")
        return None if source is None else tokenize(source, tokenizer, data, training.max_length)
    if source is None:
        raise UserError("data.streaming: has no effect without data.train")
    _check_stream(data, training, evaluated)
    buffer = (data.shuffle_buffer or SHUFFLE_BUFFER) if training.shuffle else 0
    return TokenStream(source, RowTokenizer(tokenizer, data, training.max_length), buffer, training.seed)


def _check_stream(data: DataConfig, training: TrainingConfig, evaluated: bool) -> None:
    if training.max_steps is None:
        raise UserError(
            "training.max_steps: a stream has no known number of rows, so say how many optimizer steps to train for "
            "(num_train_epochs cannot be used)"
        )
    if data.shuffle_buffer is not None and not training.shuffle:
        raise UserError("data.shuffle_buffer: has no effect with training.shuffle: false")
    for name in ("num_workers", "cache_dir"):
        if getattr(data, name) is not None and not evaluated:
            raise UserError(f"data.{name}: has no effect on a stream, which is tokenised while it is read; drop it")


def is_stream(source: Any) -> bool:
    """Rows without a length: an iterable that has none, or a function that returns an iterable."""
    if source is None or isinstance(source, str | Path | WeightedPath | Mapping) or hasattr(source, "__len__"):
        return False
    return hasattr(source, "__iter__") or hasattr(source, "__getitem__") or callable(source)


def require_length(source: Any) -> None:
    """Check rows that are to be evaluated.

    Raises:
        UserError: they have no length.
    """
    if is_stream(source):
        raise UserError(
            f"evaluation: a stream ({type(source).__name__}) has no known end; give a list of its first rows, such as "
            "list(itertools.islice(rows, 500))"
        )


def _paths(source: Any) -> list[str | Path | WeightedPath]:
    """Files and hub ids; empty where the source is anything else."""
    parts = source if isinstance(source, list | tuple) else [source]
    return list(parts) if all(isinstance(part, str | Path | WeightedPath) for part in parts) else []


def _of_python(source: Any) -> Pass:
    """The passes over a stream made in Python."""

    def rows(epoch: int, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        return read_rows(source() if is_function else source, on_bad)

    is_function = callable(source) and not hasattr(source, "__iter__")
    if is_function:
        try:
            inspect.signature(source).bind()
        except TypeError as error:
            raise UserError(f"a function that gives rows is called without arguments ({error})") from None
        except ValueError:  # a function in C need not tell
            pass
    return rows


def _weighted(source: Any, data: DataConfig) -> Pass:
    """The passes over files and hub ids: one after the other, or mixed where they have weights."""
    parts = _paths(source)
    if not any(isinstance(part, WeightedPath) for part in parts):
        passes = [_of_path(WeightedPath(str(part))) for part in parts]

        def chained(epoch: int, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
            for rows in passes:
                yield from rows(epoch, on_bad)

        return chained
    weighted = [part if isinstance(part, WeightedPath) else WeightedPath(str(part)) for part in parts]
    if len(weighted) == 1 and weighted[0].weight != 1:
        raise UserError(f"{weighted[0].path}: a weight has no effect on the only source of a stream; drop it")
    sources = [_of_path(replace(part, weight=1.0)) for part in weighted]
    return lambda epoch, on_bad: mixed(sources, [part.weight for part in weighted], epoch, on_bad)


def mixed(sources: list[Pass], weights: list[float], epoch: int, on_bad: OnBad) -> Iterator[tuple[Row, str]]:
    """One pass over several sources, rows taken in proportion to their weights.

    The next row comes from the source that is furthest behind its share, so nothing is drawn by chance. A source that
    ends starts again; the pass ends when every source has ended once, and no row is left out.
    """
    taken, starts = [0] * len(sources), [1] * len(sources)
    # no two passes of a source have the same number
    running = [source(epoch * 1_000_003, on_bad) for source in sources]
    unfinished = set(range(len(sources)))
    while True:
        number = min(range(len(sources)), key=lambda n: ((taken[n] + 1) / weights[n], n))
        found = next(running[number], None)
        if found is None:
            unfinished.discard(number)
            if not unfinished:
                return
            running[number] = sources[number](epoch * 1_000_003 + starts[number], on_bad)
            starts[number] += 1
            found = next(running[number], None)
            if found is None:
                raise UserError(f"source {number + 1} of {len(sources)} has no rows")
        taken[number] += 1
        yield found


def _of_path(part: WeightedPath) -> Pass:
    if is_hub(part):
        return _of_python(_from_hub(part))
    return lambda epoch, on_bad: read_rows(part, on_bad)


def _from_hub(part: WeightedPath) -> Any:
    import datasets

    if part.whole_file:
        raise UserError(f"{part.path}: whole_file is for files; this would be a data set of the hub")
    chosen = {key: value for key in ("name", "revision") if (value := getattr(part, key)) is not None}
    try:
        return datasets.load_dataset(part.path, split=part.split or "train", streaming=True, **chosen)
    except Exception as error:  # the loader raises whatever its many back ends raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        where = f"{part.path}: not found locally ({Path(part.path).absolute()})"
        raise UserError(f"{where}, and no hub stream: {said}") from None


def _shuffled(items: Iterator[Item], size: int, rng: random.Random) -> Iterator[Item]:
    """Every item once; the next one is drawn from the `size` that wait."""
    waiting: list[Item] = []
    for item in items:
        if len(waiting) < size:
            waiting.append(item)
            continue
        index = rng.randrange(size)
        yield waiting[index]
        waiting[index] = item
    rng.shuffle(waiting)
    yield from waiting
