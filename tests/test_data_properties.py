"""Data rows nobody would write: whatever stands in a file, there is one clear error, or every row is counted."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from data_helpers import CHAT, PROMPT, UNMARKED, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowmem import DataConfig, UserError
from lowmem.data import TokenizedDataset, tokenize
from lowmem.data.encode import Rendered
from lowmem.data.files import READERS, BadRowError
from lowmem.data.read import read_rows
from lowmem.data.render import Renderer
from lowmem.data.rows import FORMATS, Dropped

TOKENIZER = byte_tokenizer()
CHATML = byte_tokenizer(
    "{% if tools %}<u>{{ tools | tojson }}<eos>{% endif %}{% for m in messages %}<u>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<eos>\n{% endfor %}{% if add_generation_prompt %}<u>assistant\n{% endif %}"
)
SKIP = DataConfig(on_bad_row="skip")
QUICK = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

KEYS = (
    "messages", "conversations", "role", "content", "from", "value", "text", "type", "prompt", "completion", "chosen",
    "rejected", "instruction", "input", "output", "system", "history", "tools", "tool_calls", "function", "name",
    "arguments", "input_ids", "labels", "loss_weights", "loss_weight", "weight", "train", "reasoning_content", "id",
)  # fmt: skip
WORDS = (
    "user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "text", "reasoning",
    "tool_call", "image_url", '{"name": "f", "arguments": {"a": 1}}', "[]", "[1]", "{", "{{name}}", "<eos>", "\ue000",
    "안녕 👋🏽", "\ud83d", "", " ",
)  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.just(10**400),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
rows_of_anything = st.dictionaries(st.sampled_from(KEYS), values, max_size=5)

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
GOOD: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss_weight": 0.5}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": "[]", "system": "s"},
    {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
        "tools": '[{"name": "add", "parameters": {}}]',
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "q"}]},
            {"role": "assistant", "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "x"},
            {"role": "assistant", "content": "a", "weight": 1},
        ]
    },
    {"instruction": "q", "input": "i", "output": "a", "history": [["x", "y"]]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": "b"},
    {"text": "a document"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_weights": [0, 0.5, 1]},
]


def outcome(source: Any, data: DataConfig, tokenizer: Any = TOKENIZER) -> TokenizedDataset | str:
    """The rows, with their counts checked, or the one error that may come."""
    try:
        dataset = tokenize(source, tokenizer, data, max_length=64)
    except UserError as error:
        text = str(error)
        assert text == text.strip()
        assert "\n" not in text
        return text
    report = dataset.report
    assert report.rows == len(dataset) == sum(report.formats.values())
    assert report.rows + sum(report.dropped.values()) == report.rows_read
    for row in dataset:
        assert 2 <= len(row["input_ids"]) == len(row["labels"]) <= 64
        assert (row["labels"][1:] != -100).any()
    return dataset


@given(
    st.lists(rows_of_anything, max_size=4), st.sampled_from(["auto", *FORMATS]), st.sampled_from([TOKENIZER, CHATML])
)
@settings(QUICK, max_examples=100)
def test_any_row_is_read_or_counted(rows: list[Any], wanted: Any, tokenizer: Any) -> None:
    # a good row is there, so that nothing but the bad ones can be the reason to stop
    source = [*rows, {"input_ids": [1, 2, 3]}]
    dataset = outcome(source, DataConfig(format=wanted, on_bad_row="skip"), tokenizer)
    if wanted in ("auto", "tokens"):
        assert isinstance(dataset, TokenizedDataset), dataset
        assert dataset.report.rows_read == len(source)
    outcome(source, DataConfig(format=wanted), tokenizer)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A good row with one or two places changed, taken out or doubled."""
    row = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(_places(row)) or [(row, None)]))
        how = draw(st.sampled_from(["value", "remove", "wrap", "unwrap"]))
        if key is None:
            continue
        if how == "value":
            holder[key] = draw(values)
        elif how == "wrap":
            holder[key] = [holder[key]]
        elif how == "unwrap" and isinstance(holder[key], list) and holder[key]:
            holder[key] = holder[key][0]
        else:
            del holder[key]
    return row


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@given(st.lists(mutated(), min_size=1, max_size=3), st.sampled_from(["auto", "preference_chosen"]))
@settings(QUICK, max_examples=200)
def test_a_good_row_gone_wrong(rows: list[Any], wanted: Any) -> None:
    for tokenizer in (TOKENIZER, CHATML):
        outcome(rows, DataConfig(format=wanted), tokenizer)
        text = outcome(rows, DataConfig(format=wanted, on_bad_row="skip"), tokenizer)
        # with bad rows skipped, only an empty rest is an error
        assert isinstance(text, TokenizedDataset) or text.startswith("no supervised token in "), text


@given(st.data())
@settings(QUICK, max_examples=200)
def test_any_bytes_as_a_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    pieces = [
        *(json.dumps(row).encode() for row in GOOD),
        b"\n",
        b"\r\n",
        b"\xff",
        b"\x00",
        b"[",
        b"]",
        b",",
        b'"',
        b"text",
    ]
    body = b"".join(data.draw(st.lists(st.sampled_from(pieces) | st.binary(max_size=6), max_size=10)))
    suffix = data.draw(st.sampled_from(sorted(READERS)))
    packed = data.draw(st.sampled_from(["plain", "gzip", "called gzip"]))
    path = tmp_path_factory.mktemp("any") / f"file{suffix}{'' if packed == 'plain' else '.gz'}"
    path.write_bytes(gzip.compress(body) if packed == "gzip" else body)
    bad: list[BadRowError] = []
    try:
        rows = list(read_rows(path, bad.append))
    except UserError as error:
        refusal = str(error)
    else:
        refusal = str(path)
        assert all(where.startswith(str(path)) and isinstance(row, dict) for row, where in rows)
        assert all(str(error).startswith(str(path)) for error in bad)
        if rows or bad:
            skipped = outcome(path, SKIP)
            assert isinstance(skipped, TokenizedDataset) or f"in {len(rows) + len(bad)} rows" in skipped
    assert refusal.startswith(str(path))


words = st.text(st.characters(exclude_categories=["Cs", "Co"], exclude_characters="<>"), min_size=1, max_size=12)
spoken = words.filter(str.strip)


@given(st.lists(st.tuples(words, spoken), min_size=1, max_size=4), st.sampled_from([CHAT, UNMARKED, UNMARKED + PROMPT]))
@settings(QUICK, max_examples=100)
def test_what_is_supervised_is_what_the_assistant_says(turns: list[tuple[str, str]], template: str) -> None:
    tokenizer = byte_tokenizer(template)
    shared = [{"from": who, "value": text} for turn in turns for who, text in zip(("human", "gpt"), turn, strict=True)]
    name, rendered = Renderer(tokenizer).render({"conversations": shared}, "here")
    assert isinstance(rendered, Rendered)
    assert [rendered.text[start:end] for start, end in rendered.spans] == [f"{answer}<eos>" for _, answer in turns]
    (row,) = tokenize([{"conversations": shared}], tokenizer, max_length=4096)
    labels = row["labels"][row["labels"] != -100].tolist()
    assert tokenizer.decode(labels) == "".join(f"{answer}<eos>" for _, answer in turns)
    assert name.startswith("sharegpt")


@given(st.lists(st.sampled_from(GOOD) | mutated(), min_size=1, max_size=5))
@settings(QUICK, max_examples=40)
def test_a_renderer_works_the_same_in_another_process(rows: list[Any]) -> None:
    here = Renderer(CHATML)
    there = pickle.loads(pickle.dumps(here))
    assert [_said(here, row) for row in rows] == [_said(there, row) for row in rows]


def _said(renderer: Renderer, row: Any) -> str:
    try:
        return repr(renderer.render(row, "here"))
    except (BadRowError, Dropped) as error:
        return repr(error) if repr(pickle.loads(pickle.dumps(error))) == repr(error) else "changed on its way"
