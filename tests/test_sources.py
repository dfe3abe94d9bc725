"""Where rows come from: tables, compressed files, folders, patterns, hub data sets, and data sets in memory."""

from __future__ import annotations

import gzip
import json
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from data_helpers import byte_tokenizer, texts, write
from datasets import Dataset, DatasetDict

from lowmem import DataConfig, UserError, WeightedPath
from lowmem.data import files, tokenize
from lowmem.data.read import read_rows
from lowmem.recipe import load_recipe

SKIP = DataConfig(on_bad_row="skip")
ROWS = [{"text": text} for text in ("하나", "two,\nthree", 'a "b"')]


def test_csv_with_quotes_line_breaks_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufefftext,id\r\n"one, ""1""\r\nmore",1\r\n\r\n둘,\r\nthree,3'.encode())
    assert list(read_rows(path)) == [
        ({"text": 'one, "1"\r\nmore', "id": "1"}, f"{path}:2"),
        ({"text": "둘", "id": None}, f"{path}:5"),
        ({"text": "three", "id": "3"}, f"{path}:6"),
    ]
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("prompt\tcompletion\n2+2=\t4, of course\n", encoding="utf-8")
    assert tokenize(tabs, byte_tokenizer()).report.formats == {"prompt_completion": 1}
    messages = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    path.write_text('messages\n"{}"\n'.format(messages.replace('"', '""')), encoding="utf-8")
    assert tokenize(path, byte_tokenizer()).report.formats == {"messages": 1}


def test_broken_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,id\na,1\nb\nc,3,4\n"d"x,4\n\xff,5\ne,6\n')
    with pytest.raises(UserError, match=r"rows\.csv:3: 1 fields, and the header has 2 columns"):
        tokenize(path, byte_tokenizer())
    report = tokenize(path, byte_tokenizer(), SKIP).report
    assert (report.rows, report.rows_read) == (2, 6)
    assert report.dropped == {"wrong number of fields": 2, "not CSV": 1, "not UTF-8": 1}
    path.write_text('text\na\n"b\nc\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.csv:3: a quote opens in this row and is never closed"):
        tokenize(path, byte_tokenizer(), SKIP)
    path.write_text("text,text\na,b\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.csv:1: the column 'text' stands twice"):
        texts(path)


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([{"text": f"t{n}"} for n in range(700)]).to_parquet(str(path))
    found = list(read_rows(path))
    assert [row["text"] for row, _ in found] == [f"t{n}" for n in range(700)]
    assert found[-1][1] == f"{path}[699]"
    # a text that is no UTF-8 spoils its own row only
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": pa.array([b"a", b"\xff", b"c"]).view(pa.utf8())})
    pa.parquet.write_table(table, path)
    report = tokenize(path, byte_tokenizer(), SKIP).report
    assert (report.rows, report.dropped) == (2, {"not UTF-8": 1})
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"rows\.parquet: cannot be read as Parquet: \S"):
        texts(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv", ".parquet"])
def test_every_kind_compressed(tmp_path: Path, suffix: str) -> None:
    rows = ROWS[::2] if suffix == ".txt" else ROWS
    plain = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(plain))
    elif suffix == ".json":
        plain.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == ".csv":
        quoted = ['"' + row["text"].replace('"', '""') + '"' for row in rows]
        plain.write_bytes("\n".join(["text", *quoted]).encode())
    else:
        lines = [row["text"] if suffix == ".txt" else json.dumps(row) for row in rows]
        plain.write_text("\n".join(lines), encoding="utf-8")
    packed = tmp_path / f"rows{suffix}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert texts(packed) == texts(plain) == [row["text"] for row in rows]
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(UserError, match=rf"rows{suffix}\.gz: no whole gzip file"):
        texts(packed)


def test_lines_without_an_end_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1024**2)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "x" * 3 * 1024**2 + '"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.jsonl:2: a line of more than 1 MiB"):
        texts(path)
    report = tokenize(path, byte_tokenizer(), SKIP).report
    assert (report.rows, report.rows_read, report.dropped) == (2, 3, {"huge line": 1})


def test_json_nested_without_end_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + '\n{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: not JSON"):
        texts(path)
    path.write_text(' {"text": "a"}\n' + '{"text":' * 100_000 + "\n", encoding="utf-8")
    assert tokenize(path, byte_tokenizer(), SKIP).report.dropped == {"not JSON": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / ".cache").mkdir()
    write(tmp_path / "data" / "b.jsonl", [{"text": "b"}])
    write(tmp_path / "data" / "a.jsonl", [{"text": "a"}])
    (tmp_path / "data" / "more" / "c.txt").write_text("c\n", encoding="utf-8")
    (tmp_path / "data" / ".cache" / "x.txt").write_text("x\n", encoding="utf-8")
    (tmp_path / "data" / "README.md").write_text("# about\n\nthe data\n", encoding="utf-8")
    return tmp_path / "data"


def test_folders_and_patterns(folder: Path) -> None:
    assert texts(folder) == ["a", "b", "c"]
    assert texts(str(folder / "*.jsonl")) == ["a", "b"]
    assert texts(f"{folder}/**/*.txt") == ["c"]
    assert texts(WeightedPath(f"{folder}/[ab].jsonl", 2)) == ["a", "b", "a", "b"]
    with pytest.raises(UserError, match=r"\*\.csv: no file matches"):
        texts(f"{folder}/*.csv")
    with pytest.raises(UserError, match=r"README\.md: files end in"):
        texts(f"{folder}/*.md")


def test_whole_files_are_documents(folder: Path) -> None:
    found = list(read_rows(WeightedPath(f"{folder}/*.md", whole_file=True)))
    assert found == [({"text": "# about\n\nthe data\n"}, str(folder / "README.md"))]
    (folder / "bad.md").write_bytes(b"ok\n\xff")
    with pytest.raises(UserError, match=r"bad\.md:2: the file is not UTF-8"):
        texts(WeightedPath(str(folder / "bad.md"), whole_file=True))


def test_a_pattern_in_a_recipe_starts_from_the_recipe(folder: Path) -> None:
    odd = folder.parent / "[odd]"
    folder.rename(odd)
    recipe = odd / "x.yaml"
    model = "model: {name_or_path: owner/name}\ndata: {train: %s}\nstrategies: {lora: {}}\n"
    recipe.write_text(model % "'*.jsonl'", encoding="utf-8")
    train = load_recipe(recipe).data.train
    assert texts(train) == ["a", "b"]
    recipe.write_text(model % "{path: '*.jsonl', weight: 0.5}", encoding="utf-8")
    train = load_recipe(recipe).data.train
    assert isinstance(train, WeightedPath)
    assert len(texts(train)) == 1
    recipe.write_text(model % "'*.csv'", encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.yaml:2: data\.train: no file matches .*\*\.csv"):
        load_recipe(recipe)
    recipe.write_text(model % "{path: b.jsonl, weight: 0}", encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.yaml:2: data\.train\.weight: a weight is a number above 0"):
        load_recipe(recipe)


def test_saved_data_sets_and_their_splits(tmp_path: Path) -> None:
    parts = DatasetDict(train=Dataset.from_list([{"text": "a"}]), test=Dataset.from_list([{"text": "b"}]))
    parts.save_to_disk(str(tmp_path / "saved"))
    assert texts(WeightedPath(str(tmp_path / "saved"), split="test")) == ["b"]
    with pytest.raises(UserError, match=r"choose a split.*train, test"):
        texts(tmp_path / "saved")
    with pytest.raises(UserError, match="no split 'dev'; it has train, test"):
        texts(WeightedPath(str(tmp_path / "saved"), split="dev"))


def test_hub_data_sets_by_revision_name_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(path: str, **settings: Any) -> Dataset:
        asked.append({"path": path, **settings})
        return Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.chdir(tmp_path)
    assert texts([WeightedPath("me/set", revision="v1", name="ko", split="test[:5]"), "me/other"]) == ["a", "a"]
    assert asked == [
        {"path": "me/set", "split": "test[:5]", "revision": "v1", "name": "ko"},
        {"path": "me/other", "split": "train"},
    ]
    path = write(tmp_path / "rows.jsonl", [{"text": "a"}])
    for name in ("revision", "name", "split"):
        with pytest.raises(UserError, match=f"'{name}' is for data sets of the hub"):
            texts(WeightedPath(path, **{name: "x"}))
    with pytest.raises(UserError, match="whole_file is for files"):
        texts(WeightedPath("me/set", whole_file=True))


def test_streams_are_read_lazily() -> None:
    endless = ({"text": str(n)} for n in count())
    assert [row["text"] for row, _ in islice(read_rows(endless), 3)] == ["0", "1", "2"]
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    assert texts(stream) == [row["text"] for row in ROWS]
    assert texts(tuple(ROWS)) == texts(stream)


def test_text_that_is_no_path() -> None:
    with pytest.raises(UserError, match="cannot be a path"):
        texts("x" * 5000)


def test_a_data_set_with_a_length_ends_there() -> None:
    class Endless:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> dict[str, str]:
            return {"text": f"row {number}"}

    assert [row["text"] for row, _ in islice(read_rows(Endless()), 10)] == ["row 0", "row 1", "row 2"]


def test_a_weight_too_small_for_its_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    with pytest.raises(UserError, match=r"a.jsonl: weight 0.3 of its 3 rows is not one row"):
        list(read_rows([WeightedPath(str(tmp_path / "a.jsonl"), 0.3)]))
    assert len(list(read_rows(WeightedPath(str(tmp_path / "a.jsonl"), 0.34)))) == 1
