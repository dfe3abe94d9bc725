"""Real public files: every one loads, and what is learnt from it is what it says. Skipped where they are absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from data_helpers import byte_tokenizer, supervised

from lowmem import DataConfig, UserError
from lowmem.data import TokenizedDataset, tokenize

SHARED = Path(os.environ.get("LOWMEM_SHARED_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
TOKENIZER = byte_tokenizer(
    "{% if tools %}<u>tools{% for t in tools %} {{ t | tojson }}{% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}<u>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant\n{% endif %}"
)
LONG = 200_000


def load(name: str, tokenizer: Any = TOKENIZER, **settings: Any) -> tuple[TokenizedDataset, list[Any]]:
    text = (SHARED / name).read_text(encoding="utf-8")
    rows = json.loads(text) if name.endswith("json") else [json.loads(line) for line in text.splitlines()]
    dataset = tokenize(SHARED / name, tokenizer, DataConfig(**settings), LONG)
    report = dataset.report
    assert (report.rows_read, report.rows, report.truncated, report.dropped) == (len(rows), len(rows), 0, {})
    return dataset, rows


@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "alpaca_zh_demo.json"])
def test_instructions(name: str) -> None:
    dataset, rows = load(name)
    assert dataset.report.formats == {"instruction": {"alpaca_en_demo.json": 999, "alpaca_zh_demo.json": 1000}[name]}
    for index in range(0, len(rows), 37):
        assert supervised(dataset[index], TOKENIZER) == rows[index]["output"] + "<eos>"


def test_identity_with_open_placeholders() -> None:
    dataset, rows = load("identity.json")
    # six answers name nobody
    assert dataset.report.formats == {"instruction with {{placeholders}}": 85, "instruction": 6}
    assert [supervised(row, TOKENIZER) for row in dataset] == [row["output"] + "<eos>" for row in rows]


def test_tool_calls_in_sharegpt_form() -> None:
    dataset, rows = load("glaive_toolcall_en_demo.json")
    assert dataset.report.formats == {"sharegpt": 300}
    for seen, row in zip(dataset, rows, strict=True):
        said = []
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                said.append(f"<call>{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}</call><eos>")
            elif turn["from"] == "gpt":
                said.append(turn["value"] + "<eos>")
        assert supervised(seen, TOKENIZER) == "".join(said)
    first = TOKENIZER.decode(dataset[0]["input_ids"])
    assert first.startswith('<u>tools {"type": "function", "function": {"name": "search_recipes"')
    assert '<u>tool\n{"recipes": [' in first


def test_messages_of_parts_with_weights() -> None:
    dataset, rows = load("v1_sft_demo.jsonl")
    assert sum(dataset.report.formats.values()) == 500
    for seen, row in zip(dataset, rows, strict=True):
        answers = [m["content"][0]["value"] + "<eos>" for m in row["messages"] if m["loss_weight"]]
        assert supervised(seen, TOKENIZER) == "".join(answers)
        assert "loss_weights" not in seen


def test_reasoning_and_tool_calls() -> None:
    dataset, rows = load("reason_tool_use_demo_50.jsonl")
    assert dataset.report.formats == {"messages": 50}
    for seen, row in zip(dataset, rows, strict=True):
        said = ""
        for message in row["messages"]:
            for part in message["content"] if message["role"] == "assistant" else []:
                if part["type"] == "tool_call":
                    call = json.loads(part["value"])
                    said += f"<call>{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}</call>"
                else:
                    said += f"<think>{part['value']}</think>\n" if part["type"] == "reasoning" else part["value"]
            said += "<eos>" if message["role"] == "assistant" else ""
        assert supervised(seen, TOKENIZER) == said


def test_preferences_are_refused_or_their_chosen_answers_learnt() -> None:
    with pytest.raises(UserError, match=r"dpo_en_demo\.json\[0\]: a preference row; format: preference_chosen learns"):
        tokenize(SHARED / "dpo_en_demo.json", TOKENIZER)
    dataset, rows = load("dpo_en_demo.json", format="preference_chosen")
    assert dataset.report.formats == {"preference_chosen": 300}
    assert [supervised(seen, TOKENIZER) for seen in dataset] == [row["chosen"]["value"] + "<eos>" for row in rows]


def test_plain_documents() -> None:
    lines = (SHARED / "wiki_demo.txt").read_text(encoding="utf-8").splitlines()
    dataset = tokenize(SHARED / "wiki_demo.txt", TOKENIZER, max_length=LONG)
    assert dataset.report.formats == {"text": 30}
    assert TOKENIZER.decode(dataset[7]["input_ids"]) == lines[7] + "<eos>"


@pytest.mark.slow
def test_a_template_without_tools_and_reasonings() -> None:
    """SmolLM2's template, which has neither: they are written as text, and counted."""
    cached = Path.home() / ".cache" / "lowmem" / "smollm2"
    weights = sorted(cached.glob("*.gguf"))
    if not weights:
        pytest.skip("the weights are not cached")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cached, gguf_file=weights[0].name)
    tools, rows = load("glaive_toolcall_en_demo.json", tokenizer)
    assert tools.report.formats == {"sharegpt with tools as text": 191, "sharegpt": 109}
    call = json.loads(rows[0]["conversations"][3]["value"])
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    assert said in supervised(tools[0], tokenizer)
    thoughts, _ = load("reason_tool_use_demo_50.jsonl", tokenizer)
    assert set(thoughts.report.formats) == {
        "messages with reasoning and tools as text",
        "messages with reasoning as text",
    }
    assert supervised(thoughts[0], tokenizer).startswith("<think>\nOkay, the user is asking for schools")
