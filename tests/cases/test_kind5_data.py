"""Kind 5: data, chat templates, masks and packing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import (
    CHAT,
    KOREAN,
    KOREAN_ANSWERS,
    PROMPT,
    UNMARKED,
    byte_tokenizer,
    merging_tokenizer,
    one,
    supervised,
    talk,
    write,
)

from cases.helpers import Log, llama, train
from lowmem import DataConfig, UserError
from lowmem.batches import collate
from lowmem.data import tokenize
from lowmem.data.read import read_rows
from lowmem.strategies.packing import pack

# -- C-501 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHAT, UNMARKED])
def test_c501_labels_go_by_position_when_pad_is_eos(template: str) -> None:
    tokenizer = byte_tokenizer(template, pad_token="<eos>")
    row = one({"messages": talk("hi", "yes", "and?", "no, <eos> is text")}, tokenizer)
    at_eos = row["input_ids"] == tokenizer.eos_token_id
    assert at_eos.sum() == 3
    assert (row["labels"][at_eos] == tokenizer.eos_token_id).all()
    # an eos in a question is not supervised just because it is one
    row = one({"messages": talk("a<eos>", "yes")}, tokenizer)
    assert supervised(row, tokenizer) == "yes<eos>"


def test_c501_padding_of_a_batch_has_no_label_and_every_eos_has_one() -> None:
    tokenizer = byte_tokenizer(pad_token="<eos>")
    rows = [{"messages": talk("q", "a")}, {"messages": talk("first", "one", "second", "two")}]
    dataset = tokenize(rows, tokenizer)
    batch = collate(dataset[:])
    for row, labels, ids in zip(dataset, batch["labels"], batch["input_ids"], strict=True):
        length = len(row["input_ids"])
        assert (labels[length:] == -100).all()
        ends = ids[:length] == tokenizer.eos_token_id
        assert (labels[:length][ends] == tokenizer.eos_token_id).all()
    assert (batch["labels"] == tokenizer.eos_token_id).sum() == 3


# -- C-502 -------------------------------------------------------------------------------------------------------------


def test_c502_exactly_one_bos() -> None:
    tokenizer = byte_tokenizer(bos=True)
    rows = [
        {"messages": talk("q", "a")},
        {"text": "plain"},
        {"text": "<bos>plain"},
        {"prompt": "q ", "completion": "a"},
        {"instruction": "q", "output": "a"},
    ]
    dataset = tokenize(rows, tokenizer)
    bare = byte_tokenizer(template=None, bos=True)
    for row in [*dataset, tokenize(rows[-1:], bare)[0]]:
        assert row["input_ids"][0] == tokenizer.bos_token_id
        assert (row["input_ids"] == tokenizer.bos_token_id).sum() == 1
    # without a post-processor plain text gets none
    assert tokenizer.bos_token_id not in one({"text": "plain"}, byte_tokenizer())["input_ids"]


# -- C-503 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [UNMARKED, UNMARKED + PROMPT])
def test_c503_answers_are_found_without_generation_marks(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    rows = [{"messages": talk("q", "a", "r", "b" * n)} for n in range(1, 5)]
    dataset = tokenize(rows, tokenizer, DataConfig(train_on="completions"))
    assert [supervised(row, tokenizer) for row in dataset] == [f"a<eos>{'b' * n}<eos>" for n in range(1, 5)]
    marked = tokenize(rows, byte_tokenizer(CHAT), DataConfig(train_on="completions"))
    assert [row["labels"].tolist() for row in dataset] == [row["labels"].tolist() for row in marked]


# -- C-504 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("template", [CHAT, UNMARKED, UNMARKED + PROMPT], ids=["marks", "no marks", "prompt"])
def test_c504_mask_is_exact_for_multi_byte_text(template: str, trim: bool) -> None:
    tokenizer = byte_tokenizer(template, trim=trim)
    row = one({"messages": KOREAN}, tokenizer)
    assert supervised(row, tokenizer) == KOREAN_ANSWERS
    assert tokenizer.decode(row["input_ids"]) == ("<bos><u>안녕 👋🏽<a>네, 반가워요 😀<eos><u>bye<a>안녕히<eos>")


@pytest.mark.parametrize("template", [CHAT, UNMARKED])
def test_c504_cutting_inside_a_character(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    whole = one({"messages": KOREAN[:2]}, tokenizer)
    for length in range(len(whole["input_ids"]) - 6, len(whole["input_ids"])):
        row = one({"messages": KOREAN[:2]}, tokenizer, max_length=length)
        for key in ("input_ids", "labels"):
            assert row[key].tolist() == whole[key][:length].tolist()


# -- C-505 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["metaspace", "bytes", "regex"])
@pytest.mark.parametrize(
    ("before", "after"), [(" ", "blue, of course."), ("", " blue, of course."), ("\n", "number 7"), ("", "blue")]
)
def test_c505_the_answer_is_found_by_text(kind: str, before: str, after: str) -> None:
    tokenizer = merging_tokenizer(kind)
    prompts = [f"Question: what is number {n}?\nAnswer:{before}" for n in range(20)]
    dataset = tokenize([{"prompt": prompt, "completion": after} for prompt in prompts], tokenizer)
    assert len(dataset) == 20
    for prompt, row in zip(prompts, dataset, strict=True):
        # the decoder of a SentencePiece tokenizer leaves out the first space of a text
        text = supervised(row, tokenizer)
        assert text == after + "<eos>" or (kind == "metaspace" and text == after.lstrip() + "<eos>")
        assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(tokenizer(prompt + after)["input_ids"]) + "<eos>"


# -- C-506 -------------------------------------------------------------------------------------------------------------


def test_c506_a_prompt_that_fills_the_row_is_dropped_and_counted() -> None:
    tokenizer = byte_tokenizer(None)
    rows = [{"prompt": "q" * n, "completion": "abc"} for n in (3, 30, 4, 16)]
    dataset = tokenize(rows, tokenizer, max_length=16)
    assert len(dataset) == 2
    assert dataset.report.dropped == {"prompt fills max_length": 2}
    assert all((row["labels"][1:] != -100).any() for row in dataset)
    with pytest.raises(UserError, match=r"no supervised token in 2 rows.*2 prompt fills max_length.*raise max_length"):
        tokenize([rows[1], rows[3]], tokenizer, max_length=16)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_c506_training_stays_finite(batch_size: int) -> None:
    rows = [{"prompt": "q" * n, "completion": "abc"} for n in (3, 30, 4, 5)]
    dataset, log = tokenize(rows, byte_tokenizer(None), max_length=16), Log()
    assert dataset.report.dropped == {"prompt fills max_length": 1}
    trainer = train(llama(vocab_size=261), dataset, observers=[log], batch_size=batch_size, max_length=16)
    assert all(map(math.isfinite, log.all("step", "loss")))
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


# -- C-507 -------------------------------------------------------------------------------------------------------------


SPOKEN = [("system", "Be brief."), ("user", "안녕"), ("assistant", "네"), ("user", "bye"), ("assistant", "안녕히")]


@pytest.mark.parametrize("template", [CHAT, UNMARKED, UNMARKED + PROMPT])
def test_c507_sharegpt_and_openai_forms_agree(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    shared = {"system": "system", "user": "human", "assistant": "gpt"}
    plain = [{"from": role, "value": text} for role, text in SPOKEN]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": text} for role, text in SPOKEN]},
        {"conversations": [{"from": shared[role], "value": text} for role, text in SPOKEN]},
        {"conversations": plain},
        {"conversations": [{"role": role, "content": text} for role, text in SPOKEN]},
        {"conversations": [{"from": shared[role], "value": text} for role, text in SPOKEN[1:]], "system": "Be brief."},
        {"messages": plain},
    ]
    first, *others = tokenize(rows, tokenizer)
    assert tokenizer.decode(first["input_ids"]) == "<bos><u>Be brief.<u>안녕<a>네<eos><u>bye<a>안녕히<eos>"
    assert supervised(first, tokenizer) == "네<eos>안녕히<eos>"
    for other in others:
        assert other["input_ids"].tolist() == first["input_ids"].tolist()
        assert other["labels"].tolist() == first["labels"].tolist()


def test_c507_an_unknown_role_is_named_and_never_skipped(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": name, "value": "x"}, {"from": "gpt", "value": "y"}]} for name in ("human", "narr")
    ]
    path = write(tmp_path / "shared.jsonl", rows)
    with pytest.raises(UserError, match=r"shared\.jsonl:2, message 0: unknown role 'narr'; known are system, .*human"):
        tokenize(path, byte_tokenizer())
    report = tokenize(path, byte_tokenizer(), DataConfig(on_bad_row="skip")).report
    assert (report.rows, report.rows_read, report.dropped) == (1, 2, {"unknown role": 1})


def test_c507_a_system_turn_that_the_template_skips_is_an_error() -> None:
    skipping = UNMARKED.replace("{% else %}<u>", "{% elif m.role == 'user' %}<u>")
    row = {"messages": [{"role": role, "content": text} for role, text in SPOKEN]}
    with pytest.raises(UserError, match=r"row 0: message 0 \(system\): the chat template leaves out 'Be brief.'"):
        tokenize([row], byte_tokenizer(skipping))


# -- C-508 -------------------------------------------------------------------------------------------------------------


def test_c508_types_that_change_late(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"t{n}", "system": None, "id": n} for n in range(2900)]
    rows += [{"text": f"t{n}", "system": f"s{n}", "id": str(n), "extra": [n]} for n in range(2900, 3000)]
    path = write(tmp_path / "late.jsonl", rows)
    assert [dict(row) for row, _ in read_rows(path)] == rows
    assert len(tokenize(path, byte_tokenizer())) == 3000
    late = [{"instruction": "q", "output": "a", "system": row["system"]} for row in rows]
    dataset = tokenize(write(tmp_path / "system.jsonl", late), byte_tokenizer())
    assert len(dataset) == 3000
    assert byte_tokenizer().decode(dataset[-1]["input_ids"]) == "<bos><u>s2999<u>q<a>a<eos>"


# -- C-509 -------------------------------------------------------------------------------------------------------------


def test_c509_broken_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    good = [json.dumps({"text": f"t{n}"}) for n in range(5)]
    path.write_text("\n".join([*good[:2], "", *good[2:4], '{"text": "cut', good[4]]), encoding="utf-8")
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match=r"broken\.jsonl:6: not JSON"):
        tokenize(path, tokenizer)
    report = tokenize(path, tokenizer, DataConfig(on_bad_row="skip")).report
    assert (report.rows, report.rows_read, report.dropped) == (5, 6, {"not JSON": 1})
    path.write_text("[1]\n".join(good[:1]) + '\n3\n{"text": 5}\n', encoding="utf-8")
    report = tokenize(path, tokenizer, DataConfig(on_bad_row="skip")).report
    assert report.dropped == {"not an object": 1, "wrong type": 1}
    # a paragraph separator or a carriage return inside a line is no line break
    path.write_bytes('{"text": "a\u2028b"}\r\n{"text":\r"c"}\r\nx'.encode())
    with pytest.raises(UserError, match=r"broken\.jsonl:3: not JSON"):
        list(read_rows(path))


# -- C-510 -------------------------------------------------------------------------------------------------------------


def test_c510_the_locale_does_not_matter(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT.replace("<u>", "<u>질문: "))
    tokenizer.save_pretrained(tmp_path / "model")
    path = write(tmp_path / "한국어.jsonl", [{"messages": KOREAN}])
    recipe = "# 한국어 주석\nmodel: {name_or_path: model}\ndata: {train: 한국어.jsonl}\nstrategies: {lora: {}}\n"
    (tmp_path / "x.yaml").write_text(recipe, encoding="utf-8")
    code = (
        "import sys; from transformers import PreTrainedTokenizerFast; from lowmem.data import tokenize\n"
        "from lowmem.recipe import load_recipe; r = load_recipe(sys.argv[1])\n"
        "d = tokenize(r.data.train, PreTrainedTokenizerFast.from_pretrained(r.model.name_or_path), r.data)\n"
        "print(d[0]['input_ids'].tolist(), d[0]['labels'].tolist())"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.yaml")],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
    )
    row = tokenize(path, tokenizer)[0]
    assert "질문: 안녕" in tokenizer.decode(row["input_ids"])
    assert done.stdout.decode().strip() == f"{row['input_ids'].tolist()} {row['labels'].tolist()}"


def test_c510_a_file_in_another_encoding(tmp_path: Path) -> None:
    skip = DataConfig(on_bad_row="skip")
    for name in ("cp949.jsonl", "cp949.txt", "cp949.json", "cp949.csv"):
        path = tmp_path / name
        row = "안녕하세요" if name.endswith(("csv", "txt")) else '{"text": "안녕하세요"}'
        first = {"cp949.json": "[", "cp949.csv": "text", "cp949.txt": "a"}.get(name, '{"text": "a"}')
        path.write_bytes(f"{first}\n{row}{']' if first == '[' else ''}\n".encode("cp949"))
        with pytest.raises(UserError, match=rf"{name}:2: the file is not UTF-8 \(byte 0xbe, perhaps CP949\)"):
            tokenize(path, byte_tokenizer(), skip if first == "[" else None)
    report = tokenize(tmp_path / "cp949.jsonl", byte_tokenizer(), skip).report
    assert (report.rows, report.rows_read, report.dropped) == (1, 2, {"not UTF-8": 1})
    path.write_bytes('\ufeff{"text": "a"}\n'.encode("utf-16-le"))
    with pytest.raises(UserError, match=r"cp949\.csv:1: the file is UTF-16"):
        tokenize(path, byte_tokenizer(), skip)


# -- C-511 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_c511_packed_rows_do_not_see_each_other(attention: str) -> None:
    first, second = ({"input_ids": np.asarray(ids), "labels": np.asarray(ids)} for ids in ([5, 6, 7, 8], [9, 10, 11]))
    model = llama(attn_implementation=attention).eval()
    (packed,) = pack([first, second], max_length=8)
    batch = collate([packed])
    assert "attention_mask" not in batch
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = model(input_ids=collate([second])["input_ids"]).logits[0]
    assert (together[4:] - alone).abs().max() < 1e-5


# -- C-512 -------------------------------------------------------------------------------------------------------------


def test_c512_no_token_is_lost_without_a_count() -> None:
    ids = [list(range(start, start + length)) for start, length in ((10, 5), (20, 2), (30, 3), (40, 1), (50, 9))]
    dataset = tokenize([{"input_ids": row} for row in ids], None, max_length=8)
    assert [row["input_ids"].tolist() for row in dataset] == [ids[0], ids[1], ids[2], ids[4][:8]]
    report = dataset.report
    assert (report.rows_read, report.rows, report.truncated, report.longest) == (5, 4, 1, 8)
    assert (report.tokens, report.supervised_tokens) == (18, 14)
    assert report.dropped == {"nothing to learn": 1}
    assert dataset.lengths.tolist() == [5, 2, 3, 8]


@pytest.mark.parametrize("length", [4, 8])
def test_c512_every_row_is_in_one_pack_and_whole(length: int) -> None:
    ids = [list(range(start, start + n)) for start, n in ((10, 5), (20, 2), (30, 3), (40, 1), (50, 9))]
    dataset = tokenize([{"input_ids": row} for row in ids], None, max_length=length)
    kept = [row[:length] for row in ids if len(row) > 1]
    assert dataset.report.truncated == sum(len(row) > length for row in ids)
    assert dataset.report.dropped == {"nothing to learn": 1}
    packs = pack(dataset[:], length)
    assert all(len(row["input_ids"]) <= length for row in packs)
    found = sorted(number for row in packs for number in row["input_ids"].tolist())
    assert found == sorted(number for row in kept for number in row)
    for row in kept:
        (home,) = (one for one in packs if row[0] in one["input_ids"])
        at = home["input_ids"].tolist().index(row[0])
        assert home["input_ids"][at : at + len(row)].tolist() == row
        assert home["position_ids"][at : at + len(row)].tolist() == list(range(len(row)))


# -- C-514 -------------------------------------------------------------------------------------------------------------


def test_c514_empty_and_null_rows() -> None:
    tokenizer = byte_tokenizer()
    good = [{"messages": talk(f"q{n}", f"a{n}")} for n in range(4)]
    odd = [
        {"messages": []},
        {"messages": None},
        {"messages": talk("q", "")},
        {"messages": talk("q", None)},
        {"messages": talk("q", " \n")},
        {"messages": [{"role": "system", "content": "s"}]},
    ]
    dataset = tokenize([good[0], *odd, *good[1:]], tokenizer)
    assert dataset.report.dropped == {"no messages": 2, "empty answer": 3, "no answer": 1}
    assert [supervised(row, tokenizer) for row in dataset] == [f"a{n}<eos>" for n in range(4)]
    assert [row["input_ids"].tolist() for row in dataset] == [
        row["input_ids"].tolist() for row in tokenize(good, tokenizer)
    ]
    others = [
        {"text": " "},
        {"text": None},
        {"prompt": "q", "completion": ""},
        {"prompt": "q", "completion": None},
        {"instruction": "q", "output": " "},
        {"input_ids": []},
        {"input_ids": [1]},
        {"input_ids": [1, 2], "labels": [-100, -100]},
    ]
    report = tokenize([good[0], *others], tokenizer).report
    assert report.dropped == {"empty text": 2, "empty answer": 3, "empty row": 1, "nothing to learn": 2}


def test_c514_training_on_what_is_left_stays_finite() -> None:
    odd: list[dict[str, Any]] = [{"messages": []}, {"messages": talk("q", "")}, {"messages": talk("q", " \n")}]
    rows = [{"messages": talk(f"q{n}", f"a{n}")} for n in range(4)] + odd
    dataset, log = tokenize(rows, byte_tokenizer()), Log()
    assert dataset.report.dropped == {"no messages": 1, "empty answer": 2}
    train(llama(vocab_size=261), dataset, observers=[log])
    assert all(map(math.isfinite, log.all("step", "loss")))
