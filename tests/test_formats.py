"""Row formats as they are found: ShareGPT, content parts, tool calls, reasonings, loss weights and preference rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from data_helpers import CHAT, PROMPT, UNMARKED, byte_tokenizer, merging_tokenizer, one, supervised, talk

from lowmem import DataConfig, UserError
from lowmem.data import prompts_and_answers, tokenize
from lowmem.data.as_text import Abilities
from lowmem.data.sharegpt import ROLE_NAMES

# reads tools, calls, results and reasonings; of a reasoning only that of the last turn, as Qwen3 does
FULL = (
    "{% if tools %}<u>tools{% for t in tools %} {{ t | tojson }}{% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}<u>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}: {{ c.function.arguments | tojson }}</call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}<u>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}" + PROMPT.replace(
    "<a>", "<u>assistant\n"
)
ADD = {"name": "add", "parameters": {"type": "object"}}
ARGUMENTS = {"a": 1, "b": "둘"}


def rendered(row: dict[str, Any], tokenizer: Any, **settings: Any) -> str:
    return str(tokenizer.decode(one(row, tokenizer, max_length=4096, **settings)["input_ids"]))


def refusal(row: dict[str, Any], tokenizer: Any = None, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        tokenize([row], tokenizer or byte_tokenizer(), DataConfig(**settings))
    return str(caught.value)


# ShareGPT


@pytest.mark.parametrize("name", ROLE_NAMES)
def test_every_role_name_of_sharegpt(name: str) -> None:
    call = json.dumps({"name": "add", "arguments": {}})
    role = ROLE_NAMES[name]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    turns.insert(1, {"from": name.upper(), "value": call if role == "call" else "said"})
    text = rendered({"conversations": turns}, byte_tokenizer(FULL))
    seen = "<u>assistant\n<call>add: {}</call>" if role == "call" else f"<u>{role}\nsaid"
    assert seen + "<eos>" in text


CALLS = [
    {"name": "add", "arguments": ARGUMENTS},
    {"name": "add", "arguments": json.dumps(ARGUMENTS)},
    [{"name": "add", "arguments": ARGUMENTS}],
    {"type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}},
]


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_function_calls_and_observations(call: Any, as_text: bool) -> None:
    tokenizer = byte_tokenizer(FULL)
    row = {
        "conversations": [
            {"from": "human", "value": "1 + 둘"},
            {"from": "function_call", "value": json.dumps(call) if as_text else call},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "three"},
        ],
        "tools": json.dumps([ADD]),
    }
    found = one(row, tokenizer)
    assert tokenizer.decode(found["input_ids"]) == (
        '<u>tools {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}<eos>\n'
        '<u>user\n1 + 둘<eos>\n<u>assistant\n<call>add: {"a": 1, "b": "둘"}</call><eos>\n<u>tool\n3<eos>\n'
        "<u>assistant\nthree<eos>\n"
    )
    assert supervised(found, tokenizer) == '<call>add: {"a": 1, "b": "둘"}</call><eos>three<eos>'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("add(1)", "the tool call is not JSON"),
        ("", "the function_call is empty"),
        ('{"arguments": {}}', "a tool call has a name and arguments"),
        ('{"name": "add", "arguments": [1]}', "'arguments' of add is an object"),
        ('{"name": "add", "arguments": "a=1"}', "'arguments' of add is not JSON"),
    ],
)
def test_broken_function_calls(value: str, message: str) -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": value}]}
    assert f"row 0, message 1: {message}" in refusal(row)


def test_sharegpt_rows_that_contradict_themselves() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert "'from' and 'role' contradict" in refusal({"conversations": [{**turns[0], "role": "assistant"}, turns[1]]})
    system = [{"from": "system", "value": "one"}, *turns]
    assert "'system' and the system message contradict" in refusal({"conversations": system, "system": "two"})
    assert rendered({"conversations": system, "system": "one"}, byte_tokenizer(PLAIN)).count("one") == 1
    assert "'tools' is not JSON" in refusal({"conversations": turns, "tools": "{"})
    assert "'tools' is a list of tool schemas" in refusal({"conversations": turns, "tools": "[1]"})
    assert rendered({"conversations": turns, "tools": "[]"}, byte_tokenizer(FULL)).startswith("<u>user")


# OpenAI's messages


def test_typed_parts_of_every_kind() -> None:
    tokenizer = byte_tokenizer(FULL)
    call = {"name": "add", "arguments": ARGUMENTS}
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "text": "an"},
        {"type": "text", "value": "swer"},
        {"type": "tool_call", "value": json.dumps(call)},
        {"type": "tool_call", "value": call},
    ]
    row = {"messages": [*talk("q"), {"role": "assistant", "content": parts}]}
    said = '<call>add: {"a": 1, "b": "둘"}</call>'
    assert supervised(one(row, tokenizer), tokenizer) == f"<think>hm</think>answer{said}{said}<eos>"
    for kind in ("image_url", "image", "input_audio", "video"):
        bad = {"messages": [{"role": "user", "content": [{"type": kind}]}, *talk("q", "a")]}
        assert "row 0, message 0: content parts are text, reasoning and tool_call (pictures" in refusal(bad)
        assert f"got '{kind}'" in refusal(bad)
    bad = {"messages": [{"role": "user", "content": [{"type": "text", "words": "q"}]}, *talk("q", "a")]}
    assert "a part of type text has its text in 'text', 'value'" in refusal(bad)


def test_tool_calls_in_the_older_form_and_with_ids() -> None:
    older = [
        *talk("q"),
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "1"},
        *talk(None, "one")[1:],
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    newer = [
        *talk("q"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        *talk(None, "one")[1:],
    ]
    tokenizer = byte_tokenizer(FULL.replace("<call>", "<call>{{ c.id }}"))
    first = rendered({"messages": older, "functions": [ADD]}, tokenizer)
    assert first.replace("<call>", "<call>c1") == rendered({"messages": newer, "tools": [ADD]}, tokenizer)
    user = {"role": "user", "content": "q", "tool_calls": [call]}
    assert "reasoning and tool calls are an assistant's; the role is user" in refusal({"messages": [user, *newer]})


def test_a_template_that_joins_arguments_gets_them_as_text() -> None:
    joining = FULL.replace(
        "{{ c.function.name }}: {{ c.function.arguments | tojson }}",
        "{{ c.function.name + ': ' + c.function.arguments }}",
    )
    row = {"messages": [*talk("q"), {"role": "assistant", "tool_calls": [CALLS[0]]}], "tools": [ADD]}
    assert rendered(row, byte_tokenizer(joining)) == rendered(row, byte_tokenizer(FULL))


def test_a_template_without_tools_gets_them_as_text() -> None:
    tokenizer = byte_tokenizer(PLAIN)
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *talk("q"),
            {"role": "assistant", "content": "Wait.", "tool_calls": [CALLS[0], CALLS[1]]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            *talk(None, "three")[1:],
        ],
        "tools": [ADD],
    }
    dataset = tokenize([row, {"messages": talk("q", "a")}], tokenizer, max_length=4096)
    assert dataset.report.formats == {"messages with tools as text": 1, "messages": 1}
    text = tokenizer.decode(dataset[0]["input_ids"])
    assert text.startswith("<u>system\nBe brief.\n\n# Tools\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "둘"}}\n</tool_call>'
    assert supervised(dataset[0], tokenizer) == f"Wait.\n{call}\n{call}<eos>three<eos>"
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert f"<u>user\n{results}<eos>" in text


def test_a_template_that_reads_tool_calls_and_drops_them() -> None:
    forgetful = FULL.replace("m.tool_calls or []", "(m.tool_calls if not m.content is string else [])")
    row = {"messages": [*talk("q"), {"role": "assistant", "content": "x", "tool_calls": [CALLS[0]]}], "tools": [ADD]}
    assert "message 1 (assistant): the chat template leaves out a tool call" in refusal(row, byte_tokenizer(forgetful))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasonings(key: str) -> None:
    messages = [*talk("q"), {"role": "assistant", "content": "a", key: "hm"}]
    full, plain = byte_tokenizer(FULL), byte_tokenizer(PLAIN)
    own = byte_tokenizer(FULL.replace("reasoning_content", "thinking"))
    for tokenizer in (full, own):
        assert supervised(one({"messages": messages}, tokenizer), tokenizer) == "<think>hm</think>a<eos>"
    assert supervised(one({"messages": messages}, plain), plain) == "<think>\nhm\n</think>\n\na<eos>"
    # an earlier reasoning is left out by this template, and the turn still found
    longer = {"messages": [*messages, *talk("r", "b")]}
    assert supervised(one(longer, full), full) == "a<eos>b<eos>"
    assert tokenize([longer], plain).report.formats == {"messages with reasoning as text": 1}
    twice = [*talk("q"), {**messages[1], "content": [{"type": "thinking", "thinking": "other"}]}]
    assert "two different reasonings" in refusal({"messages": twice})
    assert "is a string; got bool" in refusal({"messages": [*talk("q"), {**messages[1], key: True}]})


def test_what_a_template_reads() -> None:
    assert Abilities.of(FULL) == Abilities(True, True, "reasoning_content")
    assert Abilities.of(PLAIN) == Abilities(False, False, None)
    assert Abilities.of("{# tools and tool_calls #}{{ message['thinking'] }}") == Abilities(False, False, "thinking")
    assert Abilities.of("{% if enable_thinking %}{{ 'reasoning effort' }}{% endif %}").reasoning is None


# loss weights


@pytest.mark.parametrize("template", [CHAT, UNMARKED, UNMARKED + PROMPT])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_weights_of_messages_become_those_of_tokens(template: str, form: str) -> None:
    tokenizer = byte_tokenizer(template)
    messages = talk("q", "half", "r", "whole", "s", "none", "t", "double")
    for index, given in ((0, {"loss_weight": 0.0}), (1, {"loss_weight": 0.5}), (5, {"weight": 0}), (7, {"weight": 2})):
        messages[index] |= given
    found = one({form: messages}, tokenizer)
    assert supervised(found, tokenizer) == "half<eos>whole<eos>double<eos>"
    weights = [0.5] * 5 + [1.0] * 6 + [2.0] * 7
    assert found["loss_weights"][found["labels"] != -100].tolist() == weights
    assert (found["loss_weights"][found["labels"] == -100] == 0).all()
    messages[5] = {"role": "assistant", "content": "none", "train": False}
    again = one({form: messages}, tokenizer)
    assert all(again[key].tolist() == found[key].tolist() for key in found)
    plain = one({form: talk("q", "a")}, tokenizer)
    assert "loss_weights" not in plain


def test_weights_survive_pieces_and_partial_marks() -> None:
    tokenizer = merging_tokenizer("bytes")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'Question' if m.role == 'user' else 'Answer' }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
    )
    messages = talk("what is number 3?", "number 3", "and 4?", "blue")
    messages[1]["loss_weight"] = 0.25
    found = one({"messages": messages}, tokenizer)
    learnt = found["labels"] != -100
    assert tokenizer.decode(found["input_ids"][learnt & (found["loss_weights"] == 0.25)]) == "number 3<eos>"
    assert tokenizer.decode(found["input_ids"][learnt & (found["loss_weights"] == 1)]) == "blue<eos>"
    parts = byte_tokenizer(CHAT.replace("{{ eos_token }}", "{% endgeneration %}|{% generation %}!<eos>"))
    found = one({"messages": messages}, parts)
    learnt = found["labels"] != -100
    assert parts.decode(found["input_ids"][learnt & (found["loss_weights"] == 0.25)]) == "number 3!<eos>"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"loss_weight": -1}, "'loss_weight' is a number of 0 or more; got -1"),
        ({"loss_weight": float("nan")}, "got nan"),
        ({"weight": "1"}, "'weight' is a number of 0 or more"),
        ({"weight": True}, "'weight' is a number of 0 or more"),
        ({"train": 1}, "'train' is true or false; got 1"),
        ({"weight": 1, "loss_weight": 0}, "contradict each other"),
    ],
)
def test_weights_that_are_none(field: dict[str, Any], message: str) -> None:
    assert message in refusal({"messages": [*talk("q"), {**talk(None, "a")[1], **field}]})


def test_weights_where_they_have_no_effect() -> None:
    user = [{"role": "user", "content": "q", "loss_weight": 1.0}, *talk(None, "a")[1:]]
    assert "0 or false for others; got 1.0 for user" in refusal({"messages": user})
    for weight in (0, 0.5):
        row = {"messages": [*talk("q", "a", "r"), {**talk(None, "b")[1], "loss_weight": weight}]}
        assert "no effect with train_on: everything" in refusal(row, train_on="everything")


# preference rows

PREFERENCES: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}},
    {"prompt": talk("q"), "chosen": talk(None, "a")[1:]},
    {"prompt": talk("q"), "chosen": "a"},
    {"prompt": "q", "chosen": talk("q", "a"), "rejected": talk("q", "b")},
    {"chosen": talk("q", "a"), "rejected": talk("q", "b")},
    {"instruction": "q", "input": "", "chosen": "a"},
]


@pytest.mark.parametrize("row", PREFERENCES)
def test_chosen_answers_are_learnt_on_request_only(row: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    row = {"rejected": {"from": "gpt", "value": "b"}, **row}
    found = one(row, tokenizer, format="preference_chosen")
    assert tokenizer.decode(found["input_ids"]) == "<bos><u>q<a>a<eos>"
    assert supervised(found, tokenizer) == "a<eos>"
    message = "row 0: a preference row; format: preference_chosen learns the chosen answers only"
    assert refusal(row) == message
    report = tokenize([row, {"text": "t"}], tokenizer, DataConfig(on_bad_row="skip")).report
    assert report.dropped == {"preference row": 1}


def test_other_preference_rows() -> None:
    tokenizer, chosen = byte_tokenizer(), DataConfig(format="preference_chosen")
    shot = {"chosen": talk("q", "shot", "r", "good"), "rejected": talk("q", "shot", "r", "bad")}
    assert supervised(one(shot, tokenizer, format="preference_chosen"), tokenizer) == "good<eos>"
    plain = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert rendered(plain, tokenizer, format="preference_chosen") == "2+2=4<eos>"
    report = tokenize([plain, {**plain, "chosen": ""}, {**plain, "chosen": []}], tokenizer, chosen).report
    assert report.dropped == {"empty answer": 2}
    assert "there is no 'prompt'" in refusal({"chosen": "a", "rejected": "b"}, format="preference_chosen")
    other = {"prompt": "other", "chosen": talk("q", "a"), "rejected": talk("q", "b")}
    assert "must be the whole conversation" in refusal(other, format="preference_chosen")


# what else is counted


def test_placeholders_are_counted() -> None:
    rows = [
        {"instruction": "who?", "output": f"I am {text}."} for text in ("{{name}}", "${{ github }}", "Ann", "{name}")
    ]
    report = tokenize(rows, byte_tokenizer()).report
    assert report.formats == {"instruction with {{placeholders}}": 1, "instruction": 3}


def test_exact_match_takes_plain_chats_only() -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": talk("q", "a"), "tools": [ADD]},
        {"messages": [*talk("q"), {"role": "assistant", "content": "a", "thinking": "hm"}]},
    ]
    assert prompts_and_answers(rows[:1]) == [(talk("q"), "a")]
    for row in rows[1:]:
        with pytest.raises(UserError, match="tools or a reasoning"):
            prompts_and_answers([row])
    assert prompts_and_answers([rows[0]], DataConfig(format="sharegpt")) == [(talk("q"), "a")]


def test_padding_is_taken_off_and_not_learnt() -> None:
    row = {"input_ids": [0, 5, 6, 7, 0, 0], "loss_weights": [1, 1, 1, 0.5, 1, 1], "attention_mask": [0, 1, 1, 1, 0, 0]}
    found = one(row, None)
    assert found["input_ids"].tolist() == found["labels"].tolist() == [5, 6, 7]
    assert found["loss_weights"].tolist() == [1, 1, 0.5]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 0, 1], "hides tokens between others"),
        ([1, 1], "2 entries"),
        ([0, 0, 0], "empty row"),
        ("a", "list of 0 and 1"),
    ],
)
def test_an_attention_mask_that_is_no_padding(mask: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        one({"input_ids": [5, 6, 7], "attention_mask": mask}, None)
