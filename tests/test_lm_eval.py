"""lm-evaluation-harness on run folders: a tiny task, made here, gives what the model itself says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from cases.helpers import llama, numbers
from test_data import CHAT, PROMPT, byte_tokenizer

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
try:
    import lm_eval.models.huggingface  # noqa: F401
except (ImportError, AttributeError) as error:
    pytest.skip(f"no lm-evaluation-harness that goes with these transformers: {error}", allow_module_level=True)

from lowmem import LoRA, MixedPrecision, Quantization, Trainer, UserError, load_run

CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
WRITE = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  max_gen_toks: 6
  until: ["!"]
metric_list:
  - metric: exact_match
"""
ROWS = [{"question": question, "choices": ["no", "ok", "hmm"], "answer": 1} for question in ("a", "bb", "a long one")]


@pytest.fixture
def tasks(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "choice.yaml").write_text(CHOICE.format(name="tiny_choice", file=file), encoding="utf-8")
    (folder / "write.yaml").write_text(WRITE.format(name="tiny_write", file=file), encoding="utf-8")
    return folder


def run(folder, *strategies) -> str:
    """A run that has learnt to answer ok."""
    llama(vocab_size=261).save_pretrained(folder / "base")
    byte_tokenizer(CHAT + PROMPT).save_pretrained(folder / "base")
    trainer = Trainer(
        str(folder / "base"),
        [{"prompt": row["question"], "completion": "ok!"} for row in ROWS],
        training=numbers(max_steps=80, learning_rate=5e-3, output_dir=str(folder / "out")),
        strategies=strategies,
    )
    trainer.train()
    return str(folder / "out")


SETS = {
    "full": list,
    "lora on nf4, autocast": lambda: [LoRA(r=8, modules_to_save=["lm_head"]), Quantization(), MixedPrecision()],
}


@pytest.mark.parametrize("name", SETS)
def test_the_harness_measures_a_run(tmp_path, tasks, name):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lowmem.lm_eval import LowmemLM

    model = LowmemLM(run(tmp_path, *SETS[name]()), batch_size=2)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model, tasks=["tiny_choice", "tiny_write"], task_manager=manager, bootstrap_iters=0)
    assert found["results"]["tiny_choice"]["acc,none"] == 1.0
    loaded = load_run(tmp_path / "out")
    written = [sample["filtered_resps"][0] for sample in found["samples"]["tiny_write"]]
    assert written == [a.partition("!")[0] for a in loaded.generate([row["question"] for row in ROWS], 6, 2)]
    assert found["results"]["tiny_write"]["exact_match,none"] == written.count("ok") / 3 > 0
    for sample in found["samples"]["tiny_choice"]:
        question = loaded.tokenizer(sample["doc"]["question"] + "no")["input_ids"]
        with loaded.inference() as plain:
            logits = plain(torch.tensor([question])).logits[0].float().log_softmax(-1)
        expected = sum(float(logits[i - 1, question[i]]) for i in range(len(question) - 2, len(question)))
        got = float(sample["resps"][0][0][0])
        assert abs(got - expected) < 0.05 * abs(expected) + 1e-3


def test_settings_that_the_run_has_already_are_refused(tmp_path):
    from lowmem.lm_eval import LowmemLM

    with pytest.raises(UserError, match="peft has no effect beside run"):
        LowmemLM(str(tmp_path), peft="x")
    with pytest.raises(UserError, match="no run"):
        LowmemLM(str(tmp_path))


def test_the_command_line_names_the_model_and_errors_take_one_line(tmp_path, monkeypatch, capsys):
    import lm_eval.__main__
    from lm_eval.api.registry import get_model

    from lowmem.lm_eval import LowmemLM, main

    assert get_model("lowmem") is LowmemLM
    seen: list[list[str]] = []

    def harness() -> None:
        seen.append(sys.argv[1:])
        LowmemLM(str(tmp_path))

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", harness)
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model_args", "run=x", "--tasks", "t"])
    with pytest.raises(SystemExit) as left:
        main()
    assert seen == [["--model_args", "run=x", "--tasks", "t", "--model", "lowmem"]]
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow  # the harness reads the names of all its own tasks first
def test_the_command_line_of_the_harness(tmp_path, tasks):
    options = ["--model_args", f"run={run(tmp_path)}", "--tasks", "tiny_write", "--include_path", str(tasks)]
    done = subprocess.run(
        [sys.executable, "-m", "lowmem.lm_eval", *options], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[7].strip() for line in done.stdout.splitlines() if "exact_match" in line] == ["1"]
