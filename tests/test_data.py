"""Reading, rendering and masking of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import (
    CHAT,
    PROMPT,
    UNMARKED,
    SlowTokenizer,
    byte_tokenizer,
    merging_tokenizer,
    one,
    supervised,
    talk,
    texts,
    write,
)
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from lowmem import DataConfig, UserError, WeightedPath
from lowmem.data import TokenizedDataset, prompts_and_answers, tokenize
from lowmem.data.read import read_rows
from lowmem.data.render import plain_prompt

# masks of chats


TEMPLATES = {
    "line break after the end of a turn": (
        "{% for m in messages %}<u>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<u>assistant\n{% endif %}",
        ("one<eos>", "two<eos>"),
    ),
    "end of text after the last turn only": (
        "{% for m in messages %}<u>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<u>assistant\n{% else %}<pad>{% endif %}",
        ("one<eos>", "two<eos>\n<pad>"),
    ),
    "eos in the last turn only": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if loop.last %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ("one", "two\n<eos>"),
    ),
    "earlier turns without the thoughts of the last": (
        "{% for m in messages %}<u>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}(think){% endif %}"
        "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}<u>assistant\n{% endif %}",
        ("one<eos>", "(think)two<eos>"),
    ),
    "a generation prompt that the turns lack": (
        "{% for m in messages %}<u>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<u>assistant\n(think){% endif %}",
        ("one<eos>", "two<eos>"),
    ),
    "brackets and trimmed contents": (
        "{% for m in messages %}{% if m.role == 'user' %}<bos>[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} <eos>{% endif %}{% endfor %}",
        ("one <eos>", "two <eos>"),
    ),
    "no end of turn at all": (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}",
        ("one\n", "two\n"),
    ),
}


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_without_marks(name: str, trim: bool) -> None:
    template, answers = TEMPLATES[name]
    tokenizer = byte_tokenizer(template, trim=trim)
    padded = " two " if "trim" in name else "two"
    row = one({"messages": talk("first", "one", "second", padded)}, tokenizer)
    assert supervised(row, tokenizer) == "".join(answers)


def test_a_template_that_hides_the_answer_is_an_error() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}<u>{{ m.content.split('|')[-1] }}{% endfor %}<eos>")
    rows = [{"messages": talk("q", "thought|answer")}, {"messages": talk("q", "42")}]
    with pytest.raises(UserError, match=r"row 0.*cannot be found.*generation marks"):
        tokenize(rows, tokenizer)
    dataset = tokenize(rows, tokenizer, DataConfig(on_bad_row="skip"))
    assert len(dataset) == 1
    assert sum(dataset.report.dropped.values()) == 1
    assert len(tokenize(rows, tokenizer, DataConfig(train_on="everything"))) == 2


def test_a_refusing_template_names_row_and_reason() -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no system please') }}")
    with pytest.raises(UserError, match=r"row 0: the chat template refuses.*no system please"):
        tokenize([{"messages": talk("q", "a")}], tokenizer)


@pytest.mark.parametrize("template", [CHAT, UNMARKED])
def test_only_the_completion_of_a_chat_is_supervised(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    messages = talk("q", "shot", "r", "answer")
    row = one({"prompt": messages[:3], "completion": messages[3:]}, tokenizer)
    assert supervised(row, tokenizer) == "answer<eos>"
    assert row["input_ids"].tolist() == one({"messages": messages}, tokenizer)["input_ids"].tolist()
    silent = [messages[0], {**messages[1], "loss_weight": 0.0}, *messages[2:]]
    assert supervised(one({"messages": silent}, tokenizer), tokenizer) == "answer<eos>"


def test_marks_around_parts_of_a_turn() -> None:
    # two marked parts in a turn, none for an empty one: spans and turns do not pair off
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% if m.content %}{% generation %}{{ m.content }}"
        "{% endgeneration %}|{% generation %}<eos>{{ m.more }}{% endgeneration %}{% endif %}"
        "{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = talk("q", "one", "r", "", "s", "two")
    for message in messages:
        message["more"] = "!"
    assert supervised(one({"messages": messages}, tokenizer), tokenizer) == "one<eos>!two<eos>!"
    row = one({"prompt": messages[:4], "completion": messages[4:]}, tokenizer)
    assert supervised(row, tokenizer) == "two<eos>!"


def test_content_parts_are_joined() -> None:
    tokenizer = byte_tokenizer()
    parts = [{"type": "text", "text": "an"}, {"type": "text", "value": "swer"}]
    row = one({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]}, tokenizer)
    assert supervised(row, tokenizer) == "answer<eos>"
    picture = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]
    with pytest.raises(UserError, match=r"row 0, message 0.*'image'"):
        tokenize([{"messages": picture}], tokenizer)
    with pytest.raises(UserError, match="unknown role 'human'"):
        tokenize([{"messages": [{"role": "human", "content": "q"}, *talk("q", "a")]}], tokenizer)


def test_tools_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{% if tools %}{{ tools[0].function.name }}{% endif %}" + CHAT)
    row = {"messages": talk("q", "a"), "tools": '[{"name": "search"}]'}
    assert tokenizer.decode(one(row, tokenizer)["input_ids"]).startswith("search<bos>")


# one BOS, one EOS


def test_exactly_one_eos() -> None:
    tokenizer = byte_tokenizer(bos=True)
    rows = [{"text": "x y"}, {"text": "x y<eos>"}, {"prompt": "x ", "completion": "y"}]
    rows.append({"prompt": "x ", "completion": "y<eos>"})
    for row in tokenize(rows, tokenizer):
        assert row["labels"][-1] == tokenizer.eos_token_id
        assert (row["input_ids"] == tokenizer.eos_token_id).sum() == 1


# the border between prompt and answer


def test_a_token_across_the_border_is_split() -> None:
    tokenizer = merging_tokenizer("bytes")
    prompt, answer = "Question: what is number 3?\nAnswer:", " number 3"
    joint = tokenizer(prompt + answer)["input_ids"]
    split = tokenizer(prompt)["input_ids"] + tokenizer(answer)["input_ids"]
    assert joint != split, "the tokenizer of this test must merge across the border"
    row = one({"prompt": prompt, "completion": answer}, tokenizer)
    assert row["input_ids"].tolist() == [*split, tokenizer.eos_token_id]
    # where everything is supervised there is no border, and no reason to split
    whole = one({"prompt": prompt, "completion": answer}, tokenizer, train_on="everything")
    assert whole["input_ids"].tolist() == [*joint, tokenizer.eos_token_id]


def test_a_role_mark_that_merges_with_the_answer() -> None:
    tokenizer = merging_tokenizer("bytes")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Question' if m.role == 'user' else 'Answer' }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
    )
    row = one({"messages": talk("what is number 3?", "number 3", "and 4?", "blue")}, tokenizer)
    assert supervised(row, tokenizer) == "number 3<eos>blue<eos>"


def test_offsets_that_leave_out_white_space() -> None:
    inner = merging_tokenizer("regex").backend_tokenizer
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    for before, after in ((" ", "blue"), ("", " blue"), (" ", " blue"), ("\n", "blue")):
        row = one({"prompt": f"Answer:{before}", "completion": after}, tokenizer)
        assert supervised(row, tokenizer) == after + "<eos>"


def test_a_tokenizer_without_offsets() -> None:
    tokenizer = SlowTokenizer(chat_template=UNMARKED)
    assert not tokenizer.is_fast
    row = one({"messages": talk("abc", "defg", "h", "ijk")}, tokenizer)
    assert supervised(row, tokenizer) == "defg<eos>ijk<eos>"
    row = one({"prompt": "abc", "completion": "de"}, tokenizer)
    assert supervised(row, tokenizer) == "de<eos>"


def test_rows_without_a_token_border_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = merging_tokenizer("bytes")
    good = {"prompt": "<bos>", "completion": "blue"}
    rows = [good, *[{"prompt": "Answer:", "completion": " blue, of course."}] * 2]
    monkeypatch.setattr("lowmem.data.encode.Encoder._candidates", lambda *_: [])
    with pytest.raises(UserError, match=r"2 of 3 rows.*no token border.*row 1"):
        tokenize(rows, tokenizer)
    dataset = tokenize(rows, tokenizer, DataConfig(on_bad_row="skip"))
    assert (len(dataset), dataset.report.dropped) == (1, {"no token border before the answer": 2})


# rows that teach nothing, and cutting


@pytest.mark.parametrize("template", [CHAT, UNMARKED, UNMARKED + PROMPT])
def test_a_blank_turn_among_others_teaches_nothing(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    row = one({"messages": talk("q", "", None, "a")}, tokenizer)
    assert supervised(row, tokenizer) == "a<eos>"
    assert tokenizer.decode(row["input_ids"]) == "<bos><u>q<a><eos><u><a>a<eos>"


def test_batches_keep_the_order_of_rows() -> None:
    tokenizer = byte_tokenizer()
    rows: list[dict[str, Any]] = [{"input_ids": [1, n]} if n % 3 else {"text": f"row {n}"} for n in range(700)]
    dataset = tokenize(rows, tokenizer)
    assert len(dataset) == 700
    for n in range(700):
        ids = dataset[n]["input_ids"].tolist()
        assert ids == [1, n] if n % 3 else tokenizer.decode(ids) == f"row {n}<eos>"


# formats


def test_instruction_rows_are_chats_or_plain_text() -> None:
    row = {"instruction": "Translate.", "input": "hallo", "output": "hello", "system": "Be brief."}
    tokenizer = byte_tokenizer()
    seen = one(row, tokenizer)
    assert tokenizer.decode(seen["input_ids"]) == "<bos><u>Be brief.<u>Translate.\n\nhallo<a>hello<eos>"
    assert supervised(seen, tokenizer) == "hello<eos>"
    bare = byte_tokenizer(None, bos=True)
    seen = one(row, bare)
    prompt = "Be brief.\n\n### Instruction:\nTranslate.\n\nhallo\n\n### Response:\n"
    assert bare.decode(seen["input_ids"]) == f"<bos>{prompt}hello<eos>"
    assert supervised(seen, bare) == "hello<eos>"
    question, _ = prompts_and_answers([row])[0]
    assert plain_prompt(question) == prompt  # type: ignore[arg-type]
    row = {"instruction": "third", "input": None, "output": "3", "history": [["first", "1"], ["second", "2"]]}
    assert supervised(one(row, tokenizer), tokenizer) == "1<eos>2<eos>3<eos>"
    assert supervised(one(row, bare), bare) == "123<eos>"


def test_formats_by_keys_or_by_name() -> None:
    tokenizer = byte_tokenizer()
    mixed = [{"messages": None, "text": "a document"}, {"messages": talk("q", "a"), "text": None}]
    assert tokenize(mixed, tokenizer).report.formats == {"text": 1, "messages": 1}
    both = {"text": "plain", "prompt": "q", "completion": "a"}
    assert supervised(one(both, tokenizer), tokenizer) == "a<eos>"
    assert supervised(one(both, tokenizer, format="text"), tokenizer) == "plain<eos>"
    with pytest.raises(UserError, match=r"row 0: format 'instruction' needs the field 'instruction'.*text, prompt"):
        one(both, tokenizer, format="instruction")
    with pytest.raises(UserError, match=r"row 0: no known format; the row has question.*messages"):
        one({"question": "q"}, tokenizer)
    with pytest.raises(UserError, match="row 0: 'text' is a string; got int"):
        one({"text": 5}, tokenizer)
    with pytest.raises(UserError, match="no chat template"):
        one({"messages": talk("q", "a")}, byte_tokenizer(None))
    with pytest.raises(UserError, match="'text' needs a tokenizer"):
        tokenize([{"text": "a"}], None)


def test_train_on_everything() -> None:
    tokenizer = byte_tokenizer()
    row = one({"messages": talk("q", "a")}, tokenizer, train_on="everything")
    assert supervised(row, tokenizer) == "<bos><u>q<a>a<eos>"
    row = one({"prompt": "q", "completion": "a"}, tokenizer, train_on="everything")
    assert supervised(row, tokenizer) == "qa<eos>"
    with pytest.raises(UserError, match="plain text has no prompt"):
        one({"text": "a"}, tokenizer, train_on="completions")


def test_token_rows_pass_through() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7]},
        {"input_ids": np.array([5, 6, 7]), "labels": [-100, -100, 7], "loss_weights": [0, 0, 0.5]},
        {"input_ids": (1, 2, 3, 4), "labels": None, "loss_weights": [1.0, 2.0, 3.0, 4.0]},
    ]
    dataset = tokenize(rows, None, max_length=3)
    assert isinstance(dataset, TokenizedDataset)
    assert dataset[0].keys() == {"input_ids", "labels"}
    assert dataset[0]["labels"].tolist() == [5, 6, 7]
    assert dataset[1]["labels"].tolist() == [-100, -100, 7]
    assert dataset[1]["loss_weights"].tolist() == [0, 0, 0.5]
    assert dataset[-1]["loss_weights"].tolist() == [1, 2, 3]
    assert [dataset[2][key].dtype for key in ("input_ids", "labels", "loss_weights")] == ["int32", "int32", "float32"]
    assert np.shares_memory(dataset[0]["input_ids"], dataset.input_ids)
    assert len(dataset[1:]) == 2
    with pytest.raises(IndexError):
        dataset[3]
    assert tokenize(dataset, None) is dataset


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 entries, 'input_ids' 2"),
        ({"input_ids": [1, 2], "loss_weights": [1.0]}, "'loss_weights' has 1 entries"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "token ids and -100"),
        ({"input_ids": [1, -2]}, "got -2"),
        ({"input_ids": [1.5, 2]}, "list of integers"),
        ({"input_ids": [[1], [2]]}, "list of integers"),
        ({"input_ids": [1, 2], "loss_weights": [1, -1]}, "0 or more"),
        ({"input_ids": [1, 2], "loss_weights": "ab"}, "list of numbers"),
    ],
)
def test_bad_token_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"row 1: .*{message}"):
        tokenize([{"input_ids": [1, 2]}, row], None)


# files


def test_kinds_of_files(tmp_path: Path) -> None:
    rows = [{"text": "하나"}, {"text": "둘"}]
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(rows, indent=1).encode())
    assert [(row["text"], where) for row, where in read_rows(path)] == [("하나", f"{path}[0]"), ("둘", f"{path}[1]")]
    assert texts(write(path, rows)) == ["하나", "둘"]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in rows))
    assert texts(path) == ["하나", "둘"]
    path.write_text('[\n{"text": "a"},\n{"text": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.json:4: not JSON"):
        texts(path)
    plain = tmp_path / "data.txt"
    plain.write_bytes("\ufeff하나 \r\n\r\n  \n둘".encode())
    assert list(read_rows(plain)) == [({"text": "하나 "}, f"{plain}:1"), ({"text": "둘"}, f"{plain}:4")]


def test_half_a_character_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "a\\ud83d"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"half\.jsonl:1: .*surrogate"):
        tokenize(path, byte_tokenizer())
    assert len(tokenize(path, byte_tokenizer(), DataConfig(on_bad_row="skip"))) == 1


def test_weights_of_files(tmp_path: Path) -> None:
    ten = write(tmp_path / "ten.jsonl", [{"text": str(n)} for n in range(10)])
    few = write(tmp_path / "few.jsonl", [{"text": "x"}, {"text": "y"}])
    assert texts([few, ten]) == ["x", "y", *map(str, range(10))]
    assert texts([WeightedPath(few, 2), Path(few)]) == ["x", "y"] * 3
    assert texts(WeightedPath(ten, 0.5)) == ["1", "3", "5", "7", "9"]
    assert texts([WeightedPath(ten, 0.3)]) == ["3", "6", "9"]
    assert texts([WeightedPath(few, 2.5)]) == ["x", "y", "x", "y", "y"]
    for weight in (0.7, 0.1, 0.29, 1 / 3):
        path = write(tmp_path / "many.jsonl", [{"text": "z"}] * 300)
        assert len(texts([WeightedPath(path, weight)])) == round(300 * weight)
    with pytest.raises(UserError, match="weight is a number above 0"):
        texts([WeightedPath(ten, 0)])
    assert tokenize([WeightedPath(ten, 1.5)], byte_tokenizer()).report.rows_read == 15


def test_sources_in_memory(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    assert list(read_rows(rows)) == [(rows[0], "row 0"), (rows[1], "row 1")]
    data = Dataset.from_list(rows)
    assert texts(data) == texts(iter(rows)) == ["a", "b"]
    data.save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved") == ["a", "b"]
    with pytest.raises(UserError, match=r"choose one of its parts.*train"):
        texts({"train": data})
    with pytest.raises(UserError, match="row 1: a row is an object"):
        texts([rows[0], None])
    with pytest.raises(UserError, match="got int"):
        texts(3)
    with pytest.raises(UserError, match="source is empty"):
        tokenize([], byte_tokenizer())


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"train\.jsonl: no such file \({tmp_path}/train\.jsonl\)"):
        texts("train.jsonl")
    with pytest.raises(UserError, match="a folder without"):
        texts(tmp_path)
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(UserError, match=r"files end in .*\.jsonl.*'\.xlsx'"):
        texts("table.xlsx")

    def load(name: str, split: str) -> Dataset:
        assert split == "train"
        if name == "me/there":
            return Dataset.from_list([{"text": "a"}])
        raise ConnectionError("no route") if name == "me/far" else FileNotFoundError("Dataset doesn't exist\nmore")

    monkeypatch.setattr("datasets.load_dataset", load)
    assert texts("me/there") == ["a"]
    with pytest.raises(UserError, match=rf"^me/far: not found locally \({tmp_path}/me/far\) and the hub cannot be re"):
        texts("me/far")
    with pytest.raises(UserError, match=r"and not on the hub: Dataset doesn't exist$"):
        texts("me/gone")


# report and exact match


def test_report_says_what_happened() -> None:
    tokenizer = byte_tokenizer()
    rows = [{"messages": talk("q", "answer")}, {"text": "x" * 40}, {"messages": []}, {"messages": talk("q", "")}]
    report = tokenize(rows, tokenizer, max_length=20).report
    assert report.as_dict() == {
        "rows_read": 4,
        "rows": 2,
        "tokens": 31,
        "supervised_tokens": 26,
        "truncated": 1,
        "dropped": {"no messages": 1, "empty answer": 1},
        "longest": 20,
        "formats": {"messages": 1, "text": 1},
    }
    assert report.lines() == [
        "2 of 4 rows (1 messages, 1 text)",
        "31 tokens, 26 supervised (84%), longest row 20",
        "1 rows cut at max_length",
        "2 rows left out: 1 empty answer, 1 no messages",
    ]


def test_prompts_and_answers(tmp_path: Path) -> None:
    rows = [
        {"messages": talk("q", "a", "r", "b")},
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": talk("q"), "completion": [{"role": "assistant", "content": "a"}]},
    ]
    path = write(tmp_path / "test.jsonl", rows)
    assert prompts_and_answers(path, DataConfig()) == [
        (talk("q", "a", "r"), "b"),
        (talk("add\n\n1 2"), "3"),
        ("2+2=", "4"),
        (talk("q"), "a"),
    ]
    bad = [{"text": "no prompt"}, {"messages": talk("q", "a", "r")}, {"prompt": "q", "completion": " "}]
    for row in bad:
        with pytest.raises(UserError, match="row 1"):
            prompts_and_answers([rows[2], row])
    assert prompts_and_answers([*bad, rows[2]], DataConfig(on_bad_row="skip")) == [("2+2=", "4")]
    with pytest.raises(UserError, match="no row with a prompt"):
        prompts_and_answers(bad, DataConfig(on_bad_row="skip"))
