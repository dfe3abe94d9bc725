"""Kind 9: recipes and the command line on an ordinary day."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from new_process import command, ended, start
from safetensors.torch import load_file

from cases.helpers import Done, cli, here, llama, rows

RECIPE = """\
model:
  name_or_path: base
data:
  train: data.jsonl
training:
  batch_size: 4
  max_steps: 2
  learning_rate: 1e-4
  max_length: 64
  output_dir: out
strategies:
  lora: {r: 4}
"""


def write(folder: Path, text: str = RECIPE, data: str = "data.jsonl", name: str = "recipe.yaml") -> Path:
    """A recipe with its model and its rows in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / data).write_text("".join(json.dumps(r) + "\n" for r in rows(12)), encoding="utf-8")
    if not (folder / "base").exists():
        llama().save_pretrained(folder / "base")
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def resolved(folder: Path, text: str, *overrides: str) -> dict:
    done = here("explain", str(write(folder, text)), "--json", *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["recipe"]


def refused(done: Done | CompletedProcess, *words: str) -> str:
    """One line on standard error, no traceback, and an exit code of its own."""
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last, last
    return last


# -- C-901 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (RECIPE + "learning_rat: 1e-3\n", ("recipe.yaml:13", "learning_rat", "training.learning_rate")),
        (
            RECIPE.replace("  learning_rate:", "  learning_rat:"),
            ("recipe.yaml:8", "training", "learning_rat", "did you mean"),
        ),
        (RECIPE.replace("{r: 4}", "{ranl: 4}"), ("recipe.yaml:12", "lora", "ranl", "r")),
        (
            RECIPE.replace("{r: 4}", "{lora_alhpa: 4}"),
            ("recipe.yaml:12", "lora.lora_alhpa", "did you mean lora_alpha?"),
        ),
        (RECIPE.replace("  lora:", "  loar:"), ("recipe.yaml:12", "strategies.loar", "did you mean lora?")),
    ],
    ids=["top", "training", "strategy", "strategy_near", "strategies"],
)
def test_c901_an_unknown_key_stops_the_run(tmp_path, monkeypatch, recipe, words):
    path = write(tmp_path, recipe)
    monkeypatch.chdir(tmp_path)
    refused(here("train", str(path)), *words)
    assert not (tmp_path / "out").exists()


def test_c901_an_unknown_override_too(tmp_path):
    """In a process of its own: the exit code is the shell's, and no weights are there to be loaded."""
    path = write(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    refused(cli("train", str(path), "training.learning_rat=1", cwd=tmp_path), "training.learning_rat", "learning_rate")


# -- C-902 ------------------------------------------------------------------------------------------------------------


def test_c902_an_override_reaches_the_run(tmp_path):
    done = cli("explain", str(write(tmp_path)), "training.learning_rate=3e-5", "strategies.lora.r=2", "--json")
    found = json.loads(done.stdout)["recipe"]
    assert (found["training"]["learning_rate"], found["strategies"]["lora"]["r"]) == (3e-5, 2)


@pytest.mark.parametrize(("text", "override"), [("1e-4", None), ("0.5", "1e-4"), ("1E-4", None), ("1.0e-4", None)])
def test_c902_scientific_notation_is_a_number(tmp_path, text, override):
    changed = [f"training.learning_rate={override}"] if override else []
    value = resolved(tmp_path, RECIPE.replace("1e-4", text), *changed)["training"]["learning_rate"]
    assert isinstance(value, float)
    assert value == 1e-4


@pytest.mark.parametrize("where", ["recipe", "override"])
@pytest.mark.parametrize("value", ["fast", '"1e-4"', "1e-4x", "1,5e-4"])
def test_c902_text_is_no_number(tmp_path, where, value):
    path = write(tmp_path, RECIPE.replace("1e-4", value) if where == "recipe" else RECIPE)
    override = [f"training.learning_rate={value}"] if where == "override" else []
    line = refused(here("explain", str(path), *override), "training.learning_rate", "a number", value.strip('"'))
    assert ("recipe.yaml:8" in line) == (where == "recipe")


# -- C-903 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  max_grad_norm: None", ("training.max_grad_norm", "None", "null")),
        ("  max_grad_norm: off", ("training.max_grad_norm", "off", "null")),
        ("  max_grad_norm: false", ("training.max_grad_norm", "false", "null")),
        ("  save_steps: no", ("training.save_steps", "no", "null")),
        ("  lr_scheduler_type: off", ("training.lr_scheduler_type", "off", "constant")),
        ("  shuffle: no", ("training.shuffle", "no", "false")),
    ],
)
def test_c903_switched_off_in_other_words(tmp_path, line, words):
    """In YAML 1.2 `no`, `off` and `None` are text: each is refused with what to write instead."""
    path = write(tmp_path, RECIPE.replace("  output_dir: out", f"  output_dir: out\n{line}"))
    refused(here("explain", str(path)), "recipe.yaml:11", *words)


@pytest.mark.parametrize("word", ["no", "off", "None", "false"])
def test_c903_a_strategy_that_is_switched_off(tmp_path, word):
    path = write(tmp_path, RECIPE + f"  mixed_precision: {word}\n")
    refused(here("explain", str(path)), "strategies.mixed_precision", word, "leave the key out")


def test_c903_null_and_false_mean_what_they_say(tmp_path):
    text = RECIPE.replace("  output_dir: out", "  max_grad_norm: null\n  shuffle: false\n  save_steps: ~")
    found = resolved(tmp_path, text)["training"]
    assert (found["max_grad_norm"], found["shuffle"], found["save_steps"]) == (None, False, None)


# -- C-904 ------------------------------------------------------------------------------------------------------------


def test_c904_paths_start_from_the_recipe(tmp_path):
    """Model and data lie beside the recipe; results go to the folder one stands in."""
    path = write(tmp_path / "a")
    for cwd, given in ((tmp_path, "a/recipe.yaml"), (tmp_path / "a", "recipe.yaml")):
        done = cli("train", given, cwd=cwd)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (cwd / "out" / "result.json").is_file()
    results = [json.loads((p / "out" / "result.json").read_text()) for p in (tmp_path, tmp_path / "a")]
    assert results[0]["train_loss"] == results[1]["train_loss"]
    assert path.is_file()


def test_c904_a_missing_file_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a", RECIPE.replace("data.jsonl", "sub/rows.jsonl"))
    done = here("train", "a/recipe.yaml")
    refused(done, "recipe.yaml:4", "data.train", str(path.parent / "sub" / "rows.jsonl"))


def test_c904_a_missing_recipe_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(here("train", "nowhere/recipe.yaml"), str(tmp_path / "nowhere" / "recipe.yaml"))


# -- C-905 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_c905_an_interruption_keeps_the_work(tmp_path, monkeypatch, number, code):
    """Interrupted anywhere after step 5, without save_steps; then resumed: as if nothing had been."""
    text = RECIPE.replace("max_steps: 2", "max_steps: 150\n  logging_steps: 1")
    path, log = write(tmp_path, text), tmp_path / "log"
    monkeypatch.chdir(tmp_path)
    process = start(command, "train", str(path), log=log)
    deadline = time.monotonic() + 120
    while not (log.exists() and "step 5/150" in log.read_text()):
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, number)
    assert ended(process) == code
    assert "Traceback" not in log.read_text()
    last = log.read_text().strip().splitlines()[-1]
    found = re.fullmatch(r"interrupted at step (\d+) of 150; saved (\S+); go on with --resume .*", last)
    assert found, last
    assert 5 <= int(found[1]) < 150
    assert found[2] == str(tmp_path / "out" / f"checkpoint-{int(found[1]):06d}")
    assert ended(start(command, "train", str(path), "--resume", "out", log=log)) == 0, log.read_text()
    assert f"training: step {found[1]} of 150" in log.read_text()
    assert ended(start(command, "train", str(path), "training.output_dir=straight", log=log)) == 0
    weights = [load_file(tmp_path / run / "model" / "adapter_model.safetensors") for run in ("out", "straight")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("out", "straight")]
    assert results[0]["train_loss"] == results[1]["train_loss"]


# -- C-906 ------------------------------------------------------------------------------------------------------------

needs_no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


PAGED = r"adamw_8bit\.paged: cpu has no managed memory"


@needs_no_card
@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("4 bits", ("  lora: {r: 4}", "  lora: {r: 4}\n  quantization: {}"), None),
        ("paged", ("  lora: {r: 4}", "  lora: {r: 4}\n  adamw_8bit: {paged: true}"), PAGED),
        ("bfloat16", ("  lora: {r: 4}", "  lora: {r: 4}\n  mixed_precision: {dtype: bfloat16}"), None),
    ],
    ids=["4bit", "paged", "bfloat16"],
)  # fmt: skip
def test_c906_what_a_cpu_can_do_runs_and_says_where(tmp_path, monkeypatch, name, change, told):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, RECIPE.replace(*change))
    done = here("train", str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    if told:
        assert len(re.findall(told, done.stdout)) == 1  # said once, on the screen and in the result
        assert [text for text in result["notices"] if re.match(told, text)]
    versions = json.loads((tmp_path / "out" / "versions.json").read_text())
    assert versions["device"]


@needs_no_card
def test_c906_flash_attention_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(
        tmp_path,
        RECIPE.replace("  name_or_path: base", "  name_or_path: base\n  attn_implementation: flash_attention_2"),
    )
    (tmp_path / "base" / "model.safetensors").write_bytes(b"not read")  # the refusal comes before the weights
    start = time.perf_counter()
    done = here("train", str(path))
    refused(done, "model.attn_implementation", "flash_attention_2", "sdpa")
    assert time.perf_counter() - start < 60
    assert not (tmp_path / "out").exists()


# -- C-907 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someorg/not-here", ("model.name_or_path", "someorg/not-here", "no local folder", "connection", "log in")),
        ("./models/tiny", ("model.name_or_path", "models/tiny", "no such")),
        ("/nowhere/at/all", ("model.name_or_path", "/nowhere/at/all", "no such")),
        ("models/weights.gguf", ("model.name_or_path", "models/weights.gguf", "no such")),
    ],
)
def test_c907_a_model_that_is_not_there(tmp_path, monkeypatch, name, words):
    path = write(tmp_path, RECIPE.replace("name_or_path: base", f"name_or_path: {name}"))
    monkeypatch.chdir(tmp_path)
    if name.startswith("someorg"):  # the hub's client reads its environment when it is imported
        done = cli("train", str(path), cwd=tmp_path, env={"HF_HOME": str(tmp_path / "hub")})
    else:
        done = here("train", str(path))
    refused(done, *words)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_c907_a_folder_without_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    for file in (tmp_path / "base").iterdir():
        file.unlink()
    refused(here("train", str(path)), "model.name_or_path", "base")


def test_c907_weights_that_are_broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"\x00" * 64)
    refused(here("train", str(path)), "model.name_or_path", "base")


# -- C-908 ------------------------------------------------------------------------------------------------------------


def test_c908_a_log_file_stays_readable(tmp_path):
    text = RECIPE.replace("max_steps: 2", "max_steps: 30\n  logging_steps: 3")
    done = cli("train", str(write(tmp_path, text)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    output = done.stdout + done.stderr
    assert "\r" not in output
    assert "\x1b" not in output
    steps = [line for line in done.stdout.splitlines() if re.match(r"step \d+/30 ", line)]
    assert len(steps) == 10
    assert all(re.search(r"loss \d+\.\d+", line) for line in steps)
    assert len(output.splitlines()) <= 10 + 25  # the lines of the log, the ledger and the summary
    assert f"run: {tmp_path / 'out'}" in output
