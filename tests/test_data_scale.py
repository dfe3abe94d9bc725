"""Many rows: processes, the cache, interruptions, and what is in memory."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from datasets import Dataset
from test_data import byte_tokenizer

from lowmem import DataConfig, UserError, WeightedPath
from lowmem.data import TokenizedDataset, cache, dataset, fingerprint, store, tokenize, workers
from lowmem.data.chunks import RowTokenizer
from lowmem.data.fingerprint import Fingerprint

COLUMNS = ("input_ids", "labels", "offsets", "loss_weights", "weight_offsets")


def mixed_rows(number: int) -> list[str]:
    """Lines of several formats and lengths, some of them useless, some broken."""
    lines = []
    for n in range(number):
        kinds: list[Any] = [
            {"prompt": f"{n}?", "completion": "ja " * (n % 7)},
            {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "é" * (n % 5 + 1)}]},
            {"input_ids": [1, 2, 3 + n % 90], "loss_weights": [1.0, 0.5, n % 3]},
            {"text": f"row {n} " * (n % 4)},
            {"messages": [{"role": "nobody", "content": "x"}]},
        ]
        lines.append("{not json" if n % 50 == 7 else json.dumps(kinds[n % (5 if n % 20 == 4 else 4)]))
    return lines


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def same(one: TokenizedDataset, other: TokenizedDataset) -> bool:
    columns = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)
    dtypes = all(getattr(one, name).dtype == getattr(other, name).dtype for name in COLUMNS)
    # json: the order of reasons and formats, too
    return columns and dtypes and json.dumps(one.report.as_dict()) == json.dumps(other.report.as_dict())


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "lowmem.data.workers" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "lowmem" / "tokenized"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every chunk that is tokenised in this process."""
    seen: list[int] = []
    inner = RowTokenizer.__call__

    def call(self: RowTokenizer, items: Any) -> Any:
        seen.append(len(items))
        return inner(self, items)

    monkeypatch.setattr(RowTokenizer, "__call__", call)
    return seen


# -- processes --------------------------------------------------------------------------------------------------------


def test_processes_give_the_same_bits_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.jsonl", mixed_rows(1100))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer, started = byte_tokenizer(), []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: started.append(kw["env"]) or popen(*args, **kw))
    tokenizer(["its threads", "have run"])  # after which a fork would be answered with a warning, or a deadlock
    serial = tokenize(path, tokenizer, DataConfig(on_bad_row="skip", num_workers=0), 32)
    assert not started
    parallel = tokenize(path, tokenizer, DataConfig(on_bad_row="skip", num_workers=2), 32)
    assert [env["TOKENIZERS_PARALLELISM"] for env in started] == ["false", "false"]
    assert same(serial, parallel)
    assert serial.report.rows_read == 1100
    assert set(serial.report.dropped) >= {"not JSON", "unknown role", "empty answer"}
    assert not children()
    assert capfd.readouterr().err == ""


LATE_FAULTS = {
    "an earlier row in a later chunk's shadow": {100: '{"messages": [{"role": "nobody"}]}', 300: "{not json"},
    "a fault of the reader": {599: b"\xff"},
    "no tokenizer is needed to see it": {400: '{"prompt": 1, "completion": "x"}'},
}


@pytest.mark.parametrize("faults", LATE_FAULTS.values(), ids=LATE_FAULTS)
def test_errors_are_those_of_one_process(tmp_path: Path, faults: dict[int, Any]) -> None:
    lines: list[Any] = [json.dumps({"prompt": f"{n}?", "completion": "yes"}) for n in range(700)]
    for number, line in faults.items():
        lines[number] = line
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    found = []
    for number in (0, 2):
        with pytest.raises(UserError) as caught:
            tokenize(path, byte_tokenizer(), DataConfig(num_workers=number))
        found.append((type(caught.value), str(caught.value), getattr(caught.value, "reason", None)))
    assert found[0] == found[1]
    assert f"rows.jsonl:{min(faults) + 1}" in found[0][1]
    assert not children()


def test_errors_that_no_row_causes_keep_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None  # and no text is needed to find that the template needs it
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 3
    with pytest.raises(UserError, match="row 0: the chat template refuses the row: TemplateError: never"):
        tokenize(rows, tokenizer, DataConfig(num_workers=1))


def test_a_dead_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START", "import sys; sys.exit(3)")
    with pytest.raises(UserError, match=r"has died \(exit status 3.*data.num_workers"):
        tokenize([{"input_ids": [1, 2]}] * 600, None, DataConfig(num_workers=2))
    assert not children()


class Unsendable(dict):
    def __reduce__(self) -> Any:
        raise TypeError("not for travel")


def test_what_cannot_be_sent_is_said() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.lock = (line for line in "a generator cannot be pickled")
    row = {"prompt": "q", "completion": "a"}
    with pytest.raises(UserError, match=r"the tokenizer cannot be sent to a process .*set it to 0"):
        tokenize([row], tokenizer, DataConfig(num_workers=1))
    assert workers.automatic(RowTokenizer(tokenizer, DataConfig(), 8)) == 0
    with pytest.raises(UserError, match=r"rows cannot be sent to a process \(not for travel\); set it to 0"):
        tokenize([Unsendable(row)], byte_tokenizer(), DataConfig(num_workers=1))
    assert not children()


def test_small_sources_stay_in_this_process_and_out_of_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a small source pays for processes or the cache")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(fingerprint, "_tokenizer_digest", refuse)
    monkeypatch.setattr(fingerprint, "_files_digest", refuse)
    path = write(tmp_path / "rows.jsonl", mixed_rows(400))
    assert len(tokenize(path, byte_tokenizer(), DataConfig(on_bad_row="skip"))) > 200
    assert not own_cache.exists()


def test_processes_start_by_themselves_when_the_work_is_long(
    monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.0)
    monkeypatch.setattr(workers, "automatic", lambda work: 1)
    rows = [{"input_ids": [1, 2, n % 100]} for n in range(800)]
    found = tokenize(rows, None)
    assert encoded == [256]  # the first chunk here, the others there
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"] for row in rows]


# -- the cache --------------------------------------------------------------------------------------------------------


def keys_of(path: Any, tokenizer: Any, max_length: int = 64, **settings: Any) -> str | None:
    return Fingerprint(path, tokenizer, DataConfig(**{"cache_dir": "unused", **settings}), max_length).key


def test_rows_come_from_the_cache(tmp_path: Path, encoded: list[int]) -> None:
    path, data = (
        write(tmp_path / "rows.jsonl", mixed_rows(300)),
        DataConfig(on_bad_row="skip", cache_dir=str(tmp_path / "c")),
    )
    first = tokenize(path, byte_tokenizer(), data)
    assert encoded == [256, 44]
    moved = tmp_path / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    path.rename(moved)
    assert same(tokenize(moved, byte_tokenizer(), data), first)
    assert encoded == [256, 44]
    assert [entry.name for entry in (tmp_path / "c").iterdir()] == [
        keys_of(moved, byte_tokenizer(), 1024, on_bad_row="skip")
    ]
    assert same(tokenize(moved, byte_tokenizer(), DataConfig(on_bad_row="skip")), first)


def test_files_of_some_size_are_cached_without_asking(
    tmp_path: Path, own_cache: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CACHE_FROM", 1000)
    path = write(tmp_path / "rows.jsonl", [json.dumps({"input_ids": [1, 2, n]}) for n in range(100)])
    for _ in range(2):
        assert len(tokenize(path, None)) == 100
    assert encoded == [100]
    assert len(list(own_cache.iterdir())) == 1


def test_everything_that_decides_is_in_the_key(tmp_path: Path) -> None:
    path, tokenizer = write(tmp_path / "rows.jsonl", mixed_rows(50)), byte_tokenizer()
    base = keys_of(path, tokenizer)
    assert base
    assert base == keys_of(path, byte_tokenizer()) == keys_of([path], tokenizer)
    assert base == keys_of(path, tokenizer, num_workers=3, cache_dir="other", eval="x.jsonl")
    others = {
        "max_length": keys_of(path, tokenizer, max_length=65),
        "train_on": keys_of(path, tokenizer, train_on="everything"),
        "format": keys_of(path, tokenizer, format="messages"),
        "on_bad_row": keys_of(path, tokenizer, on_bad_row="skip"),
        "weight": keys_of(WeightedPath(str(path), 2.0), tokenizer),
        "twice": keys_of([path, path], tokenizer),
        "template": keys_of(path, byte_tokenizer(template=None)),
        "post-processor": keys_of(path, byte_tokenizer(bos=True)),
        "end token": keys_of(path, byte_tokenizer(eos_token="<a>")),
    }
    tokenizer.add_tokens(["row"])
    others["vocabulary"] = keys_of(path, tokenizer)
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[-3] ^= 1  # as many bytes, and the clock put back
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    others["one bit"] = keys_of(path, byte_tokenizer())
    assert len({base, *others.values()}) == len(others) + 1, others


def test_the_key_follows_the_code_and_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", mixed_rows(5))
    base = keys_of(path, None)
    monkeypatch.setattr(fingerprint, "_own_code", lambda: "another lowmem")
    assert keys_of(path, None) != base
    monkeypatch.undo()
    monkeypatch.setattr(fingerprint, "version", lambda name: "another version")
    assert keys_of(path, None) != base


def test_rows_from_python_are_cached_where_a_folder_is_given(tmp_path: Path, encoded: list[int]) -> None:
    data = DataConfig(cache_dir=str(tmp_path / "c"))
    rows = [{"input_ids": [1, 2, n]} for n in range(20)]
    first = tokenize(Dataset.from_list(rows), None, data)
    assert same(tokenize(rows, None, data), first)
    assert encoded == [20]
    tokenize([*rows[:-1], {"input_ids": np.array([1, 2, 99])}], None, data)
    assert encoded == [20, 20]
    with pytest.raises(UserError, match=r"data.cache_dir: has no effect on rows that can be read only once"):
        tokenize(iter(rows), None, data)
    with pytest.raises(UserError, match=r"data.cache_dir: row 0: .*holds a object"):
        tokenize([{"input_ids": [1, 2], "x": object()}], None, data)


class OwnTokenizer(type(byte_tokenizer())):  # type: ignore[misc]
    """Code that no file tells of."""


def test_tokenizers_of_foreign_code_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CACHE_FROM", 1)
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = OwnTokenizer
    path = write(tmp_path / "rows.jsonl", mixed_rows(5))
    assert Fingerprint(path, tokenizer, DataConfig(), 64).key is None
    with pytest.raises(UserError, match=r"data.cache_dir: has no effect with a tokenizer of the class OwnTokenizer"):
        keys_of(path, tokenizer)


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)


DAMAGE: dict[str, Any] = {
    "flipped": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size - 3),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0" * 8),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_built_anew(tmp_path: Path, encoded: list[int], damage: Any) -> None:
    path = write(
        tmp_path / "rows.jsonl", [json.dumps({"input_ids": [1, n], "loss_weights": [1, 1]}) for n in range(50)]
    )
    data = DataConfig(cache_dir=str(tmp_path / "c"))
    first = tokenize(path, None, data)
    whole = {name: np.array(getattr(first, name)) for name in COLUMNS}
    entry = next((tmp_path / "c").iterdir())
    for number, name in enumerate((*COLUMNS, "progress.json"), 2):
        damage(entry / name)
        again = tokenize(path, None, data)
        assert len(encoded) == number, name
        assert all(np.array_equal(getattr(again, column), values) for column, values in whole.items())
    assert same(tokenize(path, None, data), again)
    assert len(encoded) == number


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", [json.dumps({"input_ids": [1, n]}) for n in range(300)])
    append = store.Store.append

    def change(self: store.Store, chunk: Any) -> None:
        append(self, chunk)
        with path.open("a") as file:
            file.write('{"input_ids": [1, 2]}\n')

    monkeypatch.setattr(store.Store, "append", change)
    with pytest.raises(UserError, match=r"rows.jsonl: the file was changed while it was read"):
        tokenize(path, None, DataConfig(cache_dir=str(tmp_path / "c")))
    assert not list((tmp_path / "c").iterdir())


def test_two_runs_at_once_both_get_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.jsonl", [json.dumps({"input_ids": [1, n % 90]}) for n in range(300)])
    data, found = DataConfig(cache_dir=str(tmp_path / "c")), []
    append = store.Store.append

    def interrupt(self: store.Store, chunk: Any) -> None:
        append(self, chunk)
        monkeypatch.setattr(store.Store, "append", append)
        if not found:
            found.append(tokenize(path, None, data))  # in the middle of the other

    monkeypatch.setattr(store.Store, "append", interrupt)
    found.append(tokenize(path, None, data))
    assert same(*found)
    assert len(list((tmp_path / "c").iterdir())) == 1
    assert same(tokenize(path, None, data), found[0])


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = tmp_path / "c", DataConfig(cache_dir=str(tmp_path / "c"))
    rows = [[{"input_ids": [1, 2, n] * 1000}] for n in range(4)]
    names = []
    for number, part in enumerate(rows[:3]):
        tokenize(part, None, data, 4096)
        names += [entry.name for entry in folder.iterdir() if entry.name not in names]
        for file in (folder / names[-1], folder / names[-1] / "progress.json"):
            os.utime(file, (number, number))
    tokenize(rows[0], None, data, 4096)  # used again, so that the second is the oldest
    left, running = cache.begin(folder), cache.begin(folder)  # a process that was killed, and one that works
    left.leave()
    monkeypatch.setattr(cache, "MAX_BYTES", 3 * 25_000)
    tokenize(rows[3], None, data, 4096)
    kept = {entry.name for entry in folder.iterdir()}
    assert {names[0], names[2], running.folder.name} < kept
    assert len(kept) == 4
    assert names[1] not in kept
    running.drop()


def test_an_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/c: tokenised rows cannot be kept there .*set data.cache_dir"):
        tokenize([{"input_ids": [1, 2]}], None, DataConfig(cache_dir=str(tmp_path / "file" / "c")))


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = store.Store._open

    def full(self: store.Store, name: str) -> Any:
        return Path("/dev/full").open("wb") if name == "labels" else opened(self, name)

    monkeypatch.setattr(store.Store, "_open", full)
    with pytest.raises(UserError, match=r"cannot be written to .*No space left.*data.cache_dir"):
        tokenize([{"input_ids": [1, 2, 3]}], None, DataConfig(cache_dir=str(tmp_path / "c")))
    assert not list((tmp_path / "c").iterdir())


def test_a_missing_file_is_still_named(tmp_path: Path) -> None:
    for source in (tmp_path / "none.jsonl", [str(tmp_path / "none.jsonl")], WeightedPath(str(tmp_path / "none.jsonl"))):
        with pytest.raises(UserError, match=r"none.jsonl: no such file"):
            tokenize(source, None, DataConfig(cache_dir=str(tmp_path / "c")))


@pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("shuffle_buffer", 1)])
def test_settings_out_of_range(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"data.{name}: "):
        DataConfig(**{name: value})


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_interrupted_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int], num_workers: int
) -> None:
    path = write(tmp_path / "rows.jsonl", mixed_rows(1300))
    tokenizer, settings = byte_tokenizer(), {"on_bad_row": "skip", "cache_dir": str(tmp_path / "c")}
    append, taken = store.Store.append, []

    def interrupt(self: store.Store, chunk: Any) -> None:
        append(self, chunk)
        taken.append(self.progress.items)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(store.Store, "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenize(path, tokenizer, DataConfig(num_workers=num_workers, **settings), 32)
    assert taken == [256, 512, 768]
    assert not children()
    (left,) = (tmp_path / "c").iterdir()
    assert ".partial-" in left.name
    monkeypatch.setattr(store.Store, "append", append)
    encoded.clear()
    again = tokenize(path, tokenizer, DataConfig(num_workers=0, **settings), 32)
    assert encoded == [256, 256, 20]  # the rest
    assert same(again, tokenize(path, tokenizer, DataConfig(on_bad_row="skip"), 32))
    (entry,) = (tmp_path / "c").iterdir()
    assert ".partial-" not in entry.name


def test_unfinished_work_that_was_damaged_starts_anew(tmp_path: Path, encoded: list[int]) -> None:
    path = write(tmp_path / "rows.jsonl", mixed_rows(600))
    data = DataConfig(on_bad_row="skip", cache_dir=str(tmp_path / "c"))
    known = Fingerprint(path, None, data, 64)
    assert known.key
    work = cache.begin(cache.cache_folder(data.cache_dir), known.key)
    half = store.Store(work.folder)
    lines = [{"input_ids": [1, 2]}] * 10
    half.append(RowTokenizer(None, data, 64)([(line, "") for line in lines]))
    half.commit()
    half.close()
    work.leave()
    flip(work.folder / "labels")
    encoded.clear()
    assert cache.begin(tmp_path / "c", known.key).progress is None
    assert not work.folder.exists()


SCRIPT = """
import pickle, sys, time
from lowmem.config import DataConfig
from lowmem.data import store, tokenize
append = store.Store.append
def slow(self, chunk):
    append(self, chunk)
    print("working", flush=True)
    time.sleep(60)
store.Store.append = slow
tokenizer = pickle.load(open(sys.argv[1], "rb"))
tokenize(sys.argv[2], tokenizer, DataConfig(on_bad_row="skip", num_workers=2, cache_dir=sys.argv[3]))
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_script_without_a_main_guard(tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C, and a kill that leaves the parent no time to clean up."""
    path = write(tmp_path / "rows.jsonl", mixed_rows(2000))
    (tmp_path / "tokenizer").write_bytes(pickle.dumps(byte_tokenizer()))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "tokenizer", str(path), "cache"]
    environ = {**os.environ, "PYTHONPATH": str(Path(dataset.__file__).parents[2])}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 2
    os.killpg(process.pid, sent)
    out, err = process.communicate(timeout=30)
    assert process.returncode == -sent
    assert out == ""
    assert err.count("Traceback") == (sent == signal.SIGINT)  # the parent's own; the processes are silent
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, gone
    names = [entry.name for entry in (tmp_path / "cache").iterdir()]
    assert len(names) == 1
    assert ".partial-" in names[0]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_what_grows_large_is_mapped(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": [1, 2, n % 90], "loss_weights": [0, 1, 0.5]} for n in range(600)]
    small = tokenize(rows, None)
    monkeypatch.setattr(dataset, "SPILL_FROM", 5000)
    large = tokenize(rows, None)
    assert same(small, large)
    assert not list(own_cache.iterdir())  # mapped, and already deleted
    assert not large.input_ids.flags.writeable
    with pytest.raises(UserError):
        tokenize([*rows, {"input_ids": "no"}], None)
    assert not list(own_cache.iterdir())


def test_rows_are_views(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=str(tmp_path))
    rows = tokenize([{"input_ids": [1, 2, n]} for n in range(10)], None, data)
    for dataset_ in (rows, tokenize([{"input_ids": [1, 2, 3]}], None)):
        assert np.shares_memory(dataset_[0]["input_ids"], dataset_.input_ids)
        assert np.shares_memory(dataset_[0]["labels"], dataset_.labels)
    base: Any = rows.input_ids
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ == "mmap"


def test_workers_hold_no_torch() -> None:
    """Each would cost a few hundred MiB."""
    code = "import lowmem.data.workers, sys; print('torch' in sys.modules)"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", time.monotonic() - start
