"""`lowmem data`: its numbers against ones counted by hand, its texts against the rows they come from."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from docs_runner import make_tokenizer
from typer.testing import CliRunner

from lowmem.cli import app
from lowmem.config import DataConfig, TrainingConfig
from lowmem.data import tokenize
from lowmem.data.pieces import Reader, visible
from lowmem.data.preview_html import page
from lowmem.data.preview_text import SHOWN_CHARACTERS, row_text
from lowmem.data.statistics import (
    RowTable,
    batch_facts,
    bins,
    duplicate_facts,
    length_facts,
    shared_facts,
    spread,
    target_facts,
)
from lowmem.errors import UserError
from lowmem.strategies import GradientAccumulation, Packing

KOREAN = "안녕하세요 👨‍👩‍👧 é 漢字\n\t끝 🦊🦊"


def row(prompt: int, answer: int, start: int = 0) -> dict:
    ids = [start + n % 100 for n in range(prompt + answer)]
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def table(rows: list[dict]) -> RowTable:
    return RowTable(tokenize(rows, None, DataConfig(), 1024))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_lengths_and_targets_are_those_counted_by_hand():
    rows = [row(3, 1), row(2, 6), row(8, 2), row(0, 10)]
    counted = table(rows)
    assert counted.lengths.tolist() == [4, 8, 10, 10]
    assert counted.targets.tolist() == [1, 6, 2, 9]  # nothing predicts a first token
    facts = target_facts(counted)
    assert facts["share"] == 18 / 32
    assert facts["rows_by_tenth"] == [0, 0, 2, 0, 0, 0, 0, 1, 0, 1]
    assert facts["rows_with_few"] == 2
    assert spread(counted.lengths)["min"] == 4
    assert spread(counted.lengths)["p50"] == 8
    assert length_facts(counted)["mean"] == 8


@pytest.mark.parametrize("longest", [1, 7, 300, 100_000])
def test_every_row_is_in_one_bin(longest):
    lengths = np.random.default_rng(0).integers(1, longest + 1, 500)
    lengths = np.concatenate([lengths // 50 + 1, [longest]])  # a few are far longer than the rest
    edges = bins(lengths)
    rows, _ = np.histogram(lengths, edges)
    assert rows.sum() == len(lengths)
    assert edges[0] <= lengths.min()
    assert edges[-1] > lengths.max()
    assert edges == sorted(set(edges))
    assert len(edges) <= 40


def test_duplicates_and_different_answers():
    first, other_answer, other_prompt = row(3, 2), row(3, 4), row(3, 2, start=7)
    facts = duplicate_facts(table([first, other_answer, first, other_prompt, first]))
    assert facts == {
        "extra_copies": 2,
        "repeated_rows": 1,
        "prompts_with_several_answers": 1,
        "rows_of_such_prompts": 2,
    }
    # what is learnt belongs to a row: the same text with another mask is no copy
    assert duplicate_facts(table([row(3, 2), row(2, 3)]))["extra_copies"] == 0


def test_plain_text_has_no_prompt_in_common():
    texts = [{"input_ids": [1, *range(5 + n)], "labels": [-100, *range(5 + n)]} for n in range(4)]  # 1 is a BOS
    assert duplicate_facts(table(texts))["prompts_with_several_answers"] == 0


def test_rows_of_eval_that_are_in_train_as_well():
    train, other = table([row(3, 2), row(3, 4, start=9)]), table([row(3, 2), row(3, 6, start=9), row(4, 4, start=20)])
    assert shared_facts(train, other) == {"rows": 1, "prompts": 2, "of_rows": 3}


def test_padding_is_that_of_the_batches_the_run_will_see():
    lengths = [10, 4, 6, 2, 8, 8]
    rows = tokenize([row(1, n - 1, start=n) for n in lengths], None, DataConfig(), 16)
    training = TrainingConfig(batch_size=4, shuffle=False, max_length=16, num_train_epochs=2)
    facts = batch_facts(rows, training, [])
    assert (facts["steps_per_epoch"], facts["total_steps"], facts["batches_looked_at"]) == (2, 4, 2)
    assert facts["padding_share"]["recipe"] == 1 - 38 / (4 * 10 + 2 * 8)
    # (10, 6) and (4, 2) packed into 16 and 6, then 8 + 8 into 16
    assert facts["padding_share"]["with_packing"] == 1 - 38 / (2 * 16 + 1 * 16)
    split = batch_facts(rows, training, [GradientAccumulation(micro_batch_size=2)])
    assert split["padding_share"]["recipe"] == 1 - 38 / (2 * 10 + 2 * 4 + 8 + 8)
    assert split["passes_per_step"]["recipe"] == 3 / 2
    packed = batch_facts(rows, training, [Packing()])
    assert packed["padding_share"]["recipe"] == packed["padding_share"]["with_packing"]
    assert packed["padding_share"]["without_packing"] == facts["padding_share"]["recipe"]


# -- text from tokens --------------------------------------------------------------------------------------------------


def test_characters_spread_over_tokens_stay_whole(tokenizer):
    ids = tokenizer(KOREAN)["input_ids"]
    assert len(ids) == len(KOREAN.encode())  # every byte is a token
    pieces = list(Reader(tokenizer)._tokens({"input_ids": ids, "labels": [-100] * len(ids)}))
    assert [piece.text for piece in pieces] == list(KOREAN)
    assert [piece.tokens for piece in pieces] == [len(char.encode()) for char in KOREAN]


def test_pieces_end_where_supervision_ends(tokenizer):
    text = "<|im_start|>질문<|im_end|>답 🦊<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    border = len(tokenizer("<|im_start|>질문<|im_end|>")["input_ids"])
    labels = [-100] * border + ids[border:]
    pieces = Reader(tokenizer).pieces({"input_ids": ids, "labels": labels})
    assert [(piece.text, piece.supervised, piece.special) for piece in pieces] == [
        ("<|im_start|>", False, True),
        ("질문", False, False),
        ("<|im_end|>", False, True),
        ("답 🦊", True, False),
        ("<|im_end|>", True, True),
    ]
    assert sum(piece.tokens for piece in pieces) == len(ids)
    assert row_text([vars(piece) for piece in pieces], marks=True).plain == (
        "<|im_start|>질문<|im_end|>[[답 🦊<|im_end|>]]"
    )


def test_weights_are_shown_where_they_are_fractions():
    sample = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "loss_weights": np.float32([1, 0, 0.5, 1])}
    pieces = Reader(None).pieces(sample)
    assert [(p.text, p.supervised, p.weight) for p in pieces] == [
        ("⟨5⟩⟨6⟩", False, 1.0),
        ("⟨7⟩", True, 0.5),
        ("⟨8⟩", True, 1.0),
    ]
    assert row_text([vars(piece) for piece in pieces], marks=True).plain == "⟨5⟩⟨6⟩[[(0.5)⟨7⟩]][[⟨8⟩]]"


def test_ids_that_no_vocabulary_has_are_shown_as_ids(tokenizer):
    pieces = Reader(tokenizer).pieces({"input_ids": [2_000_000_000], "labels": [-100]})
    assert [piece.text for piece in pieces] == ["⟨2000000000⟩"]


def test_data_cannot_steer_a_terminal():
    assert visible("a\x1b[2J\r\u202eb\n\t한👨‍👩‍👧\u3000") == "a\\u001b[2J\\u000d\\u202eb\n\t한👨‍👩‍👧\u3000"


def test_the_middle_of_a_long_row_is_left_out_and_said_so():
    pieces = [{"text": "a" * 5000, "tokens": 5000, "supervised": False, "weight": 1.0, "special": False}]
    shown = row_text(pieces, marks=True).plain
    assert f"(... {5000 - SHOWN_CHARACTERS:,} characters ...)" in shown
    assert shown.count("a") == SHOWN_CHARACTERS + shown.count("characters") * 2


# -- the command -------------------------------------------------------------------------------------------------------

RECIPE = """\
model: {name_or_path: model}
data: {train: train.jsonl, eval: eval.jsonl, on_bad_row: skip}
training: {batch_size: 2, max_length: 48, num_train_epochs: 3}
strategies: {lora: {}}
"""


def chat(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    make_tokenizer(tmp_path / "model")
    rows = [
        chat("안녕?", "네 🦊"),
        chat("안녕?", "<script>alert(1)</script>"),
        chat("a", "b"),
        chat("a", "b"),
        "{broken\n",
    ]
    (tmp_path / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "eval.jsonl").write_text(chat("a", "b") + chat("c", "d"), encoding="utf-8")
    (tmp_path / "x.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lowmem(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["data", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("folder")
def test_json_has_the_facts():
    facts = json.loads(lowmem("x.yaml", "--json", "--rows", "9"))
    train = facts["splits"]["train"]
    assert train["report"]["rows_read"] == 5
    assert train["report"]["dropped"] == {"not JSON": 1}
    assert train["report"]["truncated"] == 1
    assert sum(train["lengths"]["histogram"]["rows"]) == train["report"]["rows"] == 4
    assert sum(train["lengths"]["histogram"]["tokens"]) == train["report"]["tokens"]
    assert train["duplicates"]["extra_copies"] == 1
    assert train["duplicates"]["prompts_with_several_answers"] == 1
    assert (train["batches"]["steps_per_epoch"], train["batches"]["total_steps"]) == (2, 6)
    assert facts["shared_with_train"] == {"eval": {"rows": 1, "prompts": 1, "of_rows": 2}}
    assert [row["row"] for row in train["rows"]] == [0, 1, 2, 3]
    for shown in train["rows"]:
        assert sum(piece["tokens"] for piece in shown["pieces"]) == shown["tokens"]
        assert sum(piece["tokens"] for piece in shown["pieces"] if piece["supervised"]) == shown["targets"]
    assert "".join(p["text"] for p in train["rows"][0]["pieces"] if p["supervised"]) == "네 🦊<|im_end|>"


@pytest.mark.usefixtures("folder")
def test_text_marks_what_is_learnt_and_where_rows_are_cut():
    shown = lowmem("x.yaml", "--split", "train", "--rows", "4")
    assert "[[네 🦊<|im_end|>]]" in shown
    assert re.search(r"█ .*<- max_length 48", shown)
    assert "1 not JSON" in shown
    assert "eval" not in shown
    assert "\x1b" not in shown  # no terminal, no colours
    assert len({lowmem("x.yaml", "--seed", str(seed), "--rows", "1") for seed in range(6)}) > 1


def test_html_is_one_page_that_loads_nothing(folder):
    lowmem("x.yaml", "--html", "page.html", "--rows", "9")
    content = (folder / "page.html").read_text(encoding="utf-8")
    tags, texts = Counter(), []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags[tag] += 1
            assert not {"src", "href", "onclick", "style"} & {name for name, _ in attributes}

        def handle_data(self, data):
            texts.append(data)

    Parser(convert_charrefs=True).feed(content)
    assert tags["svg"] == 2
    assert tags["script"] == 0
    assert "<script>" in "".join(texts)  # the row's own text, as text
    assert "<mark>네 🦊</mark>" in content
    assert not re.search(r"https?://|url\(|@import", content)
    assert "prefers-color-scheme: dark" in content


@pytest.mark.usefixtures("folder")
def test_one_source_with_its_settings():
    files = json.loads(lowmem("x.yaml", "data.train={path: train.jsonl, weight: 2}", "--json"))["splits"]["train"][
        "files"
    ]
    assert [(Path(part["path"]).name, part["weight"]) for part in files] == [("train.jsonl", 2.0)]


@pytest.mark.usefixtures("folder")
def test_a_data_file_with_the_name_of_a_model():
    facts = json.loads(lowmem("train.jsonl", "data.on_bad_row=skip", "--model", "model", "--json"))
    assert facts["splits"]["train"]["report"]["rows"] == 4
    with pytest.raises(UserError, match="--model NAME"):
        lowmem("train.jsonl")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x.yaml", "data.on_bad_row=error"], r"train\.jsonl:5: not JSON"),
        (["x.yaml", "data.train=null", "--split", "train"], "data.train: the recipe names no such data"),
        (["x.yaml", "data.train=gone.jsonl"], "no such file"),
        (["x.yaml", "--html", "no/such/page.html"], "could not be written"),
        (["x.yaml", "data.streaming=true", "training.max_steps=2"], "data.streaming: a stream has no end"),
        (["gone.yaml"], "no such recipe file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, expected):
    with pytest.raises(UserError, match=expected) as caught:
        lowmem(*arguments)
    assert "\n" not in str(caught.value)


def test_rows_of_token_ids_need_no_tokenizer(folder):
    (folder / "ids.jsonl").write_text(json.dumps(row(2, 3)) + "\n", encoding="utf-8")
    (folder / "bare").mkdir()
    shown = lowmem("ids.jsonl", "--model", "./bare")
    assert "⟨0⟩⟨1⟩[[⟨2⟩⟨3⟩⟨4⟩]]" in shown


def test_the_page_is_made_of_the_facts_alone():
    facts = {"model": "<b>", "max_length": 8, "splits": {}, "shared_with_train": {}}
    assert "&lt;b&gt;" in page(facts)


def test_a_row_takes_28_bytes():
    flat = np.tile(np.arange(20, dtype=np.int32), 20_000)
    from lowmem.data import DataReport, TokenizedDataset

    offsets = np.arange(0, len(flat) + 1, 20)
    dataset = TokenizedDataset(flat, flat, offsets, np.empty(0, np.float32), np.zeros(20_001, np.int64), DataReport())
    counted = RowTable(dataset)
    assert sum(value.nbytes for value in vars(counted).values() if isinstance(value, np.ndarray)) == 28 * 20_000
    assert duplicate_facts(counted)["extra_copies"] == 19_999


# -- the page in docs --------------------------------------------------------------------------------------------------

DOC = Path(__file__).parents[1] / "docs" / "look-at-your-data.md"


@pytest.mark.usefixtures("folder")
def test_the_documented_keys_are_those_of_the_json():
    facts = json.loads(lowmem("x.yaml", "--json"))
    documented = dict(
        re.findall(r"^\| `([\w.]+)`(?:, `max_length`)? \| (.+) \|$", DOC.read_text("utf-8"), re.MULTILINE)
    )

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for inner in value.values() for key in keys(inner)}
        return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()

    assert set(facts) == {"model", "max_length", "splits", "shared_with_train"}
    names = {name for name in documented if name.startswith("splits")}
    train = facts["splits"]["train"]
    assert {name.rpartition(".")[2] for name in names} == set(train)
    for name in [*names, "shared_with_train.NAME"]:
        said = set(re.findall(r"`(\w+)`", documented[name]))
        held = train[name.rpartition(".")[2]] if name in names else facts["shared_with_train"]["eval"]
        # names of formats and reasons are values here, not keys
        assert keys(held) - {"messages", "not JSON", *spread(np.array([1]))} == said - {*spread(np.array([1])), "train"}


@pytest.mark.slow  # needs the tokenizer of smollm2
def test_the_printed_lines_are_those_of_the_shipped_data():
    shown = CliRunner().invoke(app, ["data", "lora", "--split", "train", "--rows", "0"]).stdout
    block = re.search(r"```text\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)[1]
    assert len(block.splitlines()) == 6
    for line in block.splitlines():
        assert line in shown
