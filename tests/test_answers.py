"""Greedy answers: batching must not change them, and exact match is counted before and after."""

from __future__ import annotations

import json

import pytest
import torch
from cases.helpers import Log, llama
from test_data import CHAT, PROMPT, byte_tokenizer

from lowmem import DataConfig, Trainer, TrainingConfig, UserError
from lowmem.answers import ExactMatch, generate

ROWS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
    for text in ("a", "bb", "a long one", "cc")
]


@pytest.fixture
def tokenizer():
    return byte_tokenizer(CHAT + PROMPT)


def test_batches_of_any_size_give_the_same_answers(tokenizer):
    model = llama(torch.float64, vocab_size=300).eval()
    prompts = [row["messages"][:1] for row in ROWS]
    one_by_one = generate(model, tokenizer, prompts, max_new_tokens=6, batch_size=1)
    assert generate(model, tokenizer, prompts, max_new_tokens=6, batch_size=4) == one_by_one
    direct = []
    for prompt in prompts:
        ids = tokenizer(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))["input_ids"]
        sequence = torch.tensor([ids])
        with torch.no_grad():
            for _ in range(6):
                following = model(sequence).logits[0, -1].argmax()
                if int(following) == tokenizer.eos_token_id:
                    break
                sequence = torch.cat([sequence, following.view(1, 1)], 1)
        direct.append(tokenizer.decode(sequence[0, len(ids) :], skip_special_tokens=True).strip())
    assert one_by_one == direct


def test_a_run_learns_its_answers_and_says_so(tokenizer, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    log = Log()
    trainer = Trainer(
        llama(vocab_size=300),
        ROWS,
        tokenizer=tokenizer,
        training=TrainingConfig(batch_size=4, max_steps=60, learning_rate=1e-2, output_dir=str(tmp_path / "out")),
        observers=[ExactMatch(str(held_out), batch_size=2), log],
        data=DataConfig(),
    )
    result = trainer.train()
    assert result["exact_match_before"] == 0.0
    assert result["exact_match_after"] == 1.0
    assert result["exact_match_rows"] == 4
    kept = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert kept["exact_match_after"] == 1.0
    assert len(kept["samples"]) == 3
    assert kept["seconds"] >= kept["train_seconds"] > 0
    answers = [
        json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [answer["after"] for answer in answers] == ["ok"] * 4
    assert all(answer["before"] != "ok" for answer in answers)


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = byte_tokenizer(CHAT + PROMPT)
    tokenizer.eos_token = None
    model = llama(vocab_size=300).eval()
    model.generation_config.eos_token_id = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        generate(model, tokenizer, ["x"], max_new_tokens=2, batch_size=1)


def asked(tmp_path, texts, **data) -> Trainer:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    numbers = TrainingConfig(batch_size=4, max_steps=2, save_steps=1, output_dir=str(tmp_path / "out"))
    return Trainer(
        llama(vocab_size=300), ROWS, tokenizer=byte_tokenizer(CHAT + PROMPT), training=numbers,
        observers=[ExactMatch(str(held_out))], data=DataConfig(**data),
    )  # fmt: skip


@pytest.mark.parametrize("changed", [ROWS[:3], [*ROWS[:3], ROWS[0]]], ids=["fewer", "others"])
def test_other_rows_than_before_are_refused_on_resume(tmp_path, changed):
    asked(tmp_path, map(json.dumps, ROWS)).train()
    assert asked(tmp_path, map(json.dumps, ROWS)).train(resume_from=True)["exact_match_rows"] == 4
    with pytest.raises(UserError, match="other rows than those answered before the first step"):
        asked(tmp_path, map(json.dumps, changed)).train(resume_from=True)


def test_rows_left_out_are_counted(tmp_path):
    trainer = asked(tmp_path, [*map(json.dumps, ROWS), "no JSON", '{"text": "no answer"}'], on_bad_row="skip")
    result = trainer.train()
    assert result["exact_match_rows"] == 4
    assert "data.exact_match: 2 rows left out: 1 not JSON, 1 no prompt" in result["notices"]
