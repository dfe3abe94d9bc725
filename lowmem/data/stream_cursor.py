"""Where a run stands in a stream."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from itertools import islice
from typing import Any

from lowmem.data.chunks import Item
from lowmem.data.report import DataReport
from lowmem.data.stream import TokenStream
from lowmem.errors import UserError
from lowmem.strategy import Sample


class StreamCursor:
    """Batches of a stream, tokenised one batch ahead in a thread, and where the run stands in it.

    The state is the pass and the number of rows taken in it: on resume the rows of the pass are read (not tokenised)
    again up to there, and the shuffle buffer fills as it did before.

    Attributes:
        rows: the stream.
        batch_size: rows per optimizer step; the last batch of a pass may be shorter, and is used.
    """

    num_rows = 0  # not known

    def __init__(self, rows: TokenStream, batch_size: int):
        self.rows, self.batch_size = rows, batch_size
        self.state: dict[str, Any] = {
            "epoch": 0,  # whole passes
            "taken": 0,  # rows of the source since, those left out included
            "kept": 0,  # rows of them that were learnt
            "pass_rows": 0,  # rows learnt in the pass before
            "last": 0,  # checksum of the row taken last
            "report": asdict(DataReport()),
        }

    def batches(self) -> Iterator[list[Sample]]:
        """One optimizer batch after another, for ever; a batch never spans two passes.

        Raises:
            UserError: a row cannot be used, a pass has nothing to learn, the rows can be read only once, or they are
                others than before a resume.
        """
        producer = self._produce(self.state)
        with ThreadPoolExecutor(1, thread_name_prefix="lowmem-stream") as thread:
            pending = thread.submit(next, producer)
            while True:
                batch, state = pending.result()
                pending = thread.submit(next, producer)
                self.state = state
                vars(self.rows.report).update(state["report"])
                yield batch

    def total_steps(self, max_steps: int | None, num_train_epochs: float) -> int:
        """Optimizer steps of the whole run."""
        assert max_steps is not None  # checked when the stream was opened
        return max_steps

    @property
    def epochs_done(self) -> float:
        """Passes over the data so far; a fraction once the length of a pass is known."""
        state = self.state
        return float(state["epoch"] + (min(1.0, state["kept"] / state["pass_rows"]) if state["pass_rows"] else 0))

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain values for `trainer.json`."""
        return {**self.state, "rows": self.num_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken.

        Raises:
            UserError: it was not taken from a stream.
        """
        if "taken" not in state:
            raise UserError("resume: the checkpoint was written while training on rows of known number, not a stream")
        self.state = {key: value for key, value in state.items() if key != "rows"}

    def _produce(self, state: dict[str, Any]) -> Iterator[tuple[list[Sample], dict[str, Any]]]:
        """Batches, each with the state after it."""
        again = state["taken"]
        while True:
            items = self.rows.items(state["epoch"])
            self._skip(items, again, state["last"])
            again = 0
            batch: list[Sample] = []
            while taken := list(islice(items, self.batch_size - len(batch))):
                chunk = self.rows.tokenize(taken)
                batch += chunk.samples()
                report = DataReport(**deepcopy(state["report"]))
                report.merge(chunk.report)
                state = {
                    **state,
                    "taken": state["taken"] + len(taken),
                    "kept": state["kept"] + len(chunk.lengths),
                    "last": _checksum(taken[-1]),
                    "report": asdict(report),
                }
                if len(batch) == self.batch_size:
                    yield batch, state
                    batch = []
            if batch:
                yield batch, state
            self._require_more(state)
            state = {**state, "epoch": state["epoch"] + 1, "taken": 0, "kept": 0, "pass_rows": state["kept"]}

    def _skip(self, items: Iterator[Item], number: int, last: int) -> None:
        """Read the rows that were taken before a resume."""
        skipped = deque(islice(items, number), maxlen=1) if number else ()
        if number and (not skipped or _checksum(skipped[-1]) != last):
            raise UserError(
                f"resume: row {number:,} of the stream's pass is another one than before the checkpoint; a stream has "
                "to give the same rows in the same order each time it is started"
            )

    def _require_more(self, state: dict[str, Any]) -> None:
        """After a pass: was there anything in it, and can there be another one?"""
        report = DataReport(**state["report"])
        if not state["kept"]:
            why = f"left out: {report.reasons()}" if report.dropped else "the stream is empty"
            raise UserError(f"no supervised token in a pass of {state['taken']} rows ({why})")
        if self.rows.once:
            raise UserError(
                f"the stream ended after {state['taken']:,} rows, before max_steps, and it can be read only once; give "
                "a function that returns a new iterator, or a smaller max_steps"
            )


def _checksum(item: Item) -> int:
    row, where = item
    return zlib.crc32(repr(where if row is None else row).encode("utf-8", "surrogatepass"))
