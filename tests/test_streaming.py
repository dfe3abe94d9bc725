"""Rows without a length: C-513, shuffling, weights, and going on in the middle of a pass."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.helpers import SGD, Log, SeeMicroBatches, llama, numbers, rows, weights
from datasets import Dataset, IterableDataset

from lowmem import DataConfig, LoRA, Packing, Trainer, UserError, WeightedPath
from lowmem.batches import make_cursor
from lowmem.data.chunks import RowTokenizer
from lowmem.data.stream import TokenStream, mixed, open_training_rows
from lowmem.data.stream_cursor import StreamCursor

ROWS = [{**row, "input_ids": [n, *row["input_ids"][1:]]} for n, row in enumerate(rows(30, high=16))]


class Repeatable:
    """An iterable without a length that starts anew each time."""

    def __init__(self, content: Any = ROWS):
        self.content = content

    def __iter__(self) -> Iterator[Any]:
        return iter(self.content)


def stream(source: Any, buffer: int = 0, **data: Any) -> TokenStream:
    return TokenStream(source, RowTokenizer(None, DataConfig(**data), 64), buffer, seed=1)


def ids(batches: Any, number: int) -> list[list[int]]:
    return [[int(sample["input_ids"][0]) for sample in batch] for batch in itertools.islice(batches, number)]


def cursor_of(source: Any, batch_size: int = 4, **training: Any) -> Any:
    settings = numbers(batch_size=batch_size, max_steps=100, **training)
    return make_cursor(open_training_rows(source, None, DataConfig(), settings), settings)


# -- C-513: data of unknown length ------------------------------------------------------------------------------------


def ten() -> Iterator[dict[str, Any]]:
    yield from ROWS[:10]


@pytest.mark.parametrize("source", [ten, ten(), Repeatable(), IterableDataset.from_generator(ten)])
def test_c513_a_stream_asks_for_max_steps_before_the_model_is_loaded(source: Any) -> None:
    with pytest.raises(UserError, match=r"training.max_steps: a stream has no known number of rows"):
        Trainer("/no/such/model", source, tokenizer=object(), training=numbers(max_steps=None))


def test_c513_max_steps_rule_over_passes() -> None:
    """20 steps over 10 rows, one by one: two passes, and a schedule over 20."""
    sgd, seen, log = SGD(), SeeMicroBatches(), Log()
    training = numbers(batch_size=1, max_steps=20, num_train_epochs=1, lr_scheduler_type="linear")
    trainer = Trainer(llama(), ten, training=training, strategies=[sgd, seen], observers=[log])
    trainer.train()
    assert trainer.run.global_step == len(seen.first_tokens) == 20
    passes = [[tokens[0] for tokens in seen.first_tokens[start : start + 10]] for start in (0, 10)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert sgd.rates == pytest.approx([1e-3 * (1 - step / 20) for step in range(20)])
    assert log.all("step", "epoch")[-1] == 2.0
    assert not [thread for thread in threading.enumerate() if "lowmem-stream" in thread.name]


def test_a_generator_can_be_read_only_once() -> None:
    assert ids(cursor_of(ten(), shuffle=False).batches(), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(
        UserError, match=r"ended after 10 rows, before max_steps.*a function that returns a new iterator"
    ):
        ids(cursor_of(ten()).batches(), 4)


def test_an_endless_source() -> None:
    endless = ({"input_ids": [n, 1, 2]} for n in itertools.count())
    assert ids(cursor_of(endless, shuffle=False).batches(), 50)[-1] == [196, 197, 198, 199]


def test_passes_without_anything_to_learn_end() -> None:
    empty = r"no supervised token in a pass of 0 rows \(the stream is empty\)"
    with pytest.raises(UserError, match=empty):
        ids(cursor_of(Repeatable([])).batches(), 1)
    masked = Repeatable([{"input_ids": [1, 2], "labels": [-100, -100]}] * 3)
    with pytest.raises(UserError, match=r"in a pass of 3 rows \(left out: 3 nothing to learn\)"):
        ids(cursor_of(masked).batches(), 1)


def test_a_bad_row_stops_at_its_batch_and_is_named() -> None:
    source = Repeatable([*ROWS[:6], {"input_ids": "no"}, *ROWS[6:]])
    batches = cursor_of(source, shuffle=False).batches()
    assert ids(batches, 1) == [[0, 1, 2, 3]]
    with pytest.raises(UserError, match="row 6: 'input_ids' is a list of integers"):
        ids(batches, 1)


def test_rows_left_out_are_counted_over_a_resume() -> None:
    content = [row for n in range(12) for row in (ROWS[n], {"input_ids": []}, "no object")]
    cursor = StreamCursor(stream(Repeatable(content), 5, on_bad_row="skip"), 4)
    whole = ids(cursor.batches(), 8)
    report = cursor.rows.report.as_dict()
    assert report["rows"] == sum(map(len, whole)) == 32
    assert report["rows_read"] == report["rows"] + sum(report["dropped"].values())
    assert set(report["dropped"]) == {"empty row", "not an object"}
    first, second = (StreamCursor(stream(Repeatable(content), 5, on_bad_row="skip"), 4) for _ in range(2))
    part = ids(first.batches(), 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert part + ids(second.batches(), 3) == whole
    assert second.rows.report.as_dict() == report
    assert first.state_dict()["report"]["rows_read"] < report["rows_read"]  # rows read ahead do not count


def test_the_report_is_in_the_result() -> None:
    trainer = Trainer(llama(), Repeatable([*ROWS[:6], {"input_ids": []}]), training=numbers(max_steps=4, batch_size=3))
    log = Log()
    trainer.observers.append(log)
    trainer.train()
    assert log.all("data", "lines") == [["a stream: rows are counted as they come"]]
    assert trainer.result["train_data"]["rows"] == 12
    assert trainer.result["train_data"]["dropped"]["empty row"] >= 1


# -- settings without effect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "data", "training", "said"),
    [
        (ROWS, {"streaming": True}, {}, "data.streaming: has no effect on rows given in Python"),
        (Repeatable(), {"streaming": True}, {}, "data.streaming: has no effect on rows given in Python"),
        (None, {"streaming": True}, {}, "data.streaming: has no effect without data.train"),
        (ROWS, {"shuffle_buffer": 10}, {}, "data.shuffle_buffer: has no effect on rows of known number"),
        (Repeatable(), {"shuffle_buffer": 10}, {"shuffle": False}, "data.shuffle_buffer: has no effect with"),
        (Repeatable(), {"num_workers": 1}, {}, "data.num_workers: has no effect on a stream"),
        (Repeatable(), {"cache_dir": "x"}, {}, "data.cache_dir: has no effect on a stream"),
        ([WeightedPath("a.jsonl", 2.0)], {"streaming": True}, {}, "a.jsonl: a weight has no effect on the only source"),
        (lambda number: ROWS, {}, {}, "a function that gives rows is called without arguments"),
    ],
)
def test_settings_without_effect_are_errors(source: Any, data: Any, training: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_training_rows(source, None, DataConfig(**data), numbers(**training))


def test_settings_of_held_out_rows_are_allowed_beside_a_stream() -> None:
    assert open_training_rows(ten, None, DataConfig(num_workers=0), numbers(), evaluated=True) is not None


def test_a_stream_is_not_evaluated() -> None:
    for source in (ten, ten(), Repeatable()):
        with pytest.raises(UserError, match=r"evaluation: a stream .* has no known end; give a list"):
            Trainer(llama(), ROWS, source, training=numbers())
    trainer = Trainer(llama(), ten, ROWS[:4], training=numbers())
    assert trainer.evaluate()["eval_tokens"] > 0
    with pytest.raises(UserError, match="evaluation: a stream"):
        trainer.evaluate(Repeatable())


def test_a_missing_file_is_named_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.jsonl: no such file"):
        stream(str(tmp_path / "none.jsonl"), streaming=True)
    with pytest.raises(UserError, match=r"no-such/set: not found locally .*no hub stream"):
        stream("no-such/set", streaming=True)


# -- order ------------------------------------------------------------------------------------------------------------


def test_shuffling_draws_from_a_buffer() -> None:
    content = [{"input_ids": [n, 1]} for n in range(100)]
    orders = [[row["input_ids"][0] for row, _ in stream(Repeatable(content), 10).items(epoch)] for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == list(range(100))
        assert all(n < place + 10 for place, n in enumerate(order))  # no row before it was read
        assert sum(abs(n - place) > 2 for place, n in enumerate(order)) > 50
    assert [row["input_ids"][0] for row, _ in stream(Repeatable(content)).items(0)] == list(range(100))


def test_weights_are_shares_and_no_row_is_lost() -> None:
    def source(name: str, number: int) -> Callable[..., Any]:
        return lambda epoch, on_bad: (({"name": name, "n": n}, f"{name} {n}") for n in range(number))

    found = [row for row, _ in mixed([source("a", 4), source("b", 9), source("c", 2)], [2.0, 1.0, 0.5], 0, print)]
    count = Counter(row["name"] for row in found)
    assert {row["n"] for row in found if row["name"] == "b"} == set(range(9))  # the slowest to end sets the length
    assert count == {"a": 20, "b": 9, "c": 4}
    for end in range(7, len(found) + 1, 7):
        assert Counter(row["name"] for row in found[:end]) == {"a": end / 7 * 4, "b": end / 7 * 2, "c": end / 7}
    with pytest.raises(UserError, match="source 2 of 2 has no rows"):
        list(mixed([source("a", 4), source("b", 0)], [1.0, 1.0], 0, print))


def test_a_pass_is_told_to_its_source() -> None:
    told = []

    class Told(Repeatable):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    ids(cursor_of(Told(), batch_size=15).batches(), 5)
    assert told[:3] == [0, 1, 2]


# -- going on ---------------------------------------------------------------------------------------------------------


class Stopped(Exception):  # noqa: N818
    """Stands for a killed process."""


def stop(event: Any) -> None:
    if event.kind == "save" and event.metrics["step"] == 5:
        raise Stopped


def jsonl(folder: Path, name: str, content: list[Any]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def sources(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> source and data settings; 18 rows or about as many."""
    content = ROWS[:18]
    files = [
        WeightedPath(jsonl(folder, "a", ROWS[:10]), 2.0),
        WeightedPath(jsonl(folder, "b", ROWS[10:15]), 0.5),
    ]
    hub_like = IterableDataset.from_generator(lambda: iter(content))
    return {
        "list": (content, {}),
        "map-style": (Dataset.from_list(content), {}),
        "weighted files": (files, {}),
        "iterable data set": (hub_like, {"shuffle_buffer": 6}),
        "iterable data set, shuffled by datasets": (hub_like.shuffle(seed=3, buffer_size=5), {"shuffle_buffer": 4}),
        "sharded": (Dataset.from_list(content).to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=5), {}),
        "generator function": (lambda: (row for row in content), {"shuffle_buffer": 7}),
        "iterable": (Repeatable(content), {}),
        "streamed file": (jsonl(folder, "c", content), {"streaming": True, "shuffle_buffer": 5}),
        "streamed weighted files": (files, {"streaming": True, "shuffle_buffer": 5}),
    }


NAMES = (
    "list",
    "map-style",
    "weighted files",
    "iterable data set",
    "iterable data set, shuffled by datasets",
    "sharded",
    "generator function",
    "iterable",
    "streamed file",
    "streamed weighted files",
)
# every source without packing, and one of each kind of cursor with it
RUNS = [*((name, False) for name in NAMES), ("list", True), ("generator function", True), ("weighted files", True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [5, 8], ids=["mid-pass", "second pass"])
def test_cursors_go_on_with_the_same_batches(tmp_path: Path, name: str, step: int) -> None:
    """Stopped after a step, another cursor on a source that was made anew gives what the first would have given."""

    def made() -> Any:
        source, data = sources(tmp_path)[name]
        training = numbers(max_steps=20, batch_size=3)
        return make_cursor(open_training_rows(source, None, DataConfig(**data), training), training)

    whole = ids(made().batches(), 20)
    first, second = made(), made()
    part = ids(first.batches(), step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert part + ids(second.batches(), 20 - step) == whole
    assert second.epochs_done == pytest.approx(made_epochs(made(), 20))
    if "weighted" not in name:
        assert sorted(itertools.chain(*whole[:6])) == sorted(row["input_ids"][0] for row in ROWS[:18])


def made_epochs(cursor: Any, number: int) -> float:
    ids(cursor.batches(), number)
    return float(cursor.epochs_done)


@pytest.mark.parametrize(("name", "packed"), RUNS)
def test_runs_go_on_bit_for_bit(tmp_path: Path, name: str, packed: bool) -> None:
    def run(folder: Path | None, **kwargs: Any) -> Trainer:
        source, data = sources(tmp_path)[name]
        training = numbers(
            batch_size=3, max_steps=9, save_steps=5 if folder else None, output_dir=str(folder) if folder else None
        )
        strategies = [LoRA(r=4, lora_dropout=0.2), *([Packing()] if packed else [])]
        trainer = Trainer(
            llama(), source, training=training, strategies=strategies, data=DataConfig(**data), observers=[stop]
        )
        trainer.train(**kwargs)
        return trainer

    plain = weights(run(None).model)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    resumed = run(tmp_path / "run", resume_from=True)
    assert all(torch.equal(value, plain[key]) for key, value in weights(resumed.model).items())


def test_a_stream_that_gives_other_rows_is_not_resumed() -> None:
    content = list(ROWS)
    first = cursor_of(Repeatable(content))
    ids(first.batches(), 3)
    second = cursor_of(Repeatable([*ROWS[::-1]]))
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"resume: row 12 of the stream's pass is another one than before"):
        ids(second.batches(), 1)
    third = cursor_of(Repeatable(ROWS[:5]))
    third.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"resume: row 12 of the stream's pass is another one than before"):
        ids(third.batches(), 1)


def test_streams_and_sets_of_known_length_do_not_mix_on_resume() -> None:
    known, unknown = cursor_of(ROWS), cursor_of(Repeatable())
    with pytest.raises(UserError, match="written while training on a stream"):
        known.load_state_dict(unknown.state_dict())
    with pytest.raises(UserError, match="written while training on rows of known number"):
        unknown.load_state_dict(known.state_dict())


def test_shuffle_follows_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        training = replace(numbers(max_steps=9), seed=seed)
        orders.append(ids(make_cursor(open_training_rows(ten, None, DataConfig(), training), training).batches(), 3))
    assert orders[0] == orders[1] != orders[2]


def test_a_token_that_the_model_does_not_know_is_named_when_it_comes() -> None:
    content = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 999, 3]}]
    trainer = Trainer(llama(), lambda: iter(content), training=numbers(batch_size=1, max_steps=4))
    with pytest.raises(UserError, match="token id 999, and the model knows 128 tokens"):
        trainer.train()
