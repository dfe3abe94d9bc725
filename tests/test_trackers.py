"""Trackers get every logged number, go on after a resume, and cannot spoil a run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import make_rows, make_trainer

from lowmem import Trainer, TrainingConfig, UserError
from lowmem.recipe import RecipeError, load_recipe
from lowmem.trackers import TensorBoard, Trackio, Wandb

DOCS = Path(__file__).parents[1] / "docs"


class Fake(ModuleType):
    """Stands for wandb or trackio: keeps the calls."""

    def __init__(self, name: str, fail_at: int | None = None) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.fail_at = fail_at

    def init(self, **arguments: Any) -> SimpleNamespace:
        self.begun.append(arguments)
        run = {"id": f"id{len(self.begun)}", "define_metric": lambda *_, **__: None}
        return SimpleNamespace(**run, log=self.log, finish=self.finish)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        metrics = {**metrics, **({"step": step} if step is not None else {})}
        if metrics["step"] == self.fail_at:
            raise ConnectionError("no network")
        self.logged.append(metrics)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def fake(request, monkeypatch) -> Fake:
    module = Fake(request.param)
    monkeypatch.setattr("lowmem.trackers.import_module", {request.param: module}.__getitem__)
    for variable in ("WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return module


def run(folder: Path, *observers: Any, resume: bool = False, **training: Any) -> Trainer:
    numbers = {"logging_steps": 1, "save_steps": 2, "max_steps": 4, "max_grad_norm": 1.0, **training}
    trainer = make_trainer(observers=observers, eval_rows=make_rows(4, seed=1), output_dir=str(folder), **numbers)
    trainer.train(resume_from=resume or None)
    return trainer


def stop_after(step: int):
    def stop(event: Any) -> None:
        if event.kind == "save" and event.metrics["step"] == step:
            raise RuntimeError("stopped")

    return stop


def test_every_number_of_the_log_is_passed_on(fake, tmp_path):
    run(tmp_path / "run", report_to=[fake.__name__])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for kind, prefix in (("log", "train/"), ("evaluate", "eval/")):
        logged = [line for line in fake.logged if any(key.startswith(prefix) for key in line)]
        written = [line for line in lines if line["event"] == kind]
        assert len(logged) == len(written) > 0
        for ours, theirs in zip(written, logged, strict=True):
            expected = {prefix + k.removeprefix("eval_"): v for k, v in ours.items() if k not in ("event", "step")}
            assert theirs == {"step": ours["step"], **expected}
    known = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "rss_bytes"}
    assert {f"train/{name}" for name in known} <= set(fake.logged[0])
    assert fake.logged[-1]["result/train_loss"] > 0
    assert fake.finished == 1


def test_a_run_is_named_like_its_folder_and_carries_its_settings(fake, tmp_path):
    run(tmp_path / "한글", report_to=[fake.__name__], learning_rate=0.25)
    (begun,) = fake.begun
    assert begun["name"] == "한글"
    assert begun["project"] == "lowmem"
    assert begun["config"]["training"]["learning_rate"] == 0.25
    assert begun["config"]["versions"]["torch"]


def test_an_observer_object_takes_the_packages_own_arguments(fake, tmp_path):
    tracker = {"wandb": Wandb, "trackio": Trackio}[fake.__name__](project="mine", group="g")
    run(tmp_path / "run", tracker)
    assert fake.begun[0]["project"] == "mine"
    assert fake.begun[0]["group"] == "g"


def test_a_resumed_run_goes_on_in_the_same_one(fake, tmp_path):
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path / "run", stop_after(2), report_to=[fake.__name__])
    run(tmp_path / "run", resume=True, report_to=[fake.__name__])
    first, second = fake.begun
    assert second["resume"] == "allow"
    assert second.get("id", second["name"]) == ("id1" if fake.__name__ == "wandb" else "run")
    assert first.get("resume", "never") == "never"
    assert [line["step"] for line in fake.logged if "train/loss" in line] == [1, 2, 3, 4]


def test_a_second_run_is_another_one(fake, tmp_path):
    for _ in range(2):
        run(tmp_path / "run", report_to=[fake.__name__])
    assert [begun["name"] for begun in fake.begun] == ["run", "run-2"]
    assert "id" not in fake.begun[1]


@pytest.mark.parametrize("step", [2, 4])
def test_a_tracker_that_fails_is_left_out_with_one_notice(fake, tmp_path, step):
    fake.fail_at = step
    told = []
    trainer = run(tmp_path / "run", lambda e: told.append(e.metrics.get("text")), report_to=[fake.__name__])
    notice = f"{fake.__name__} failed: no network; the run goes on without it"
    assert told.count(notice) == 1
    assert trainer.result["steps"] == 4
    assert notice in json.loads((tmp_path / "run" / "result.json").read_text())["notices"]
    assert max(line["step"] for line in fake.logged) == step - 1


def test_a_tracker_that_cannot_start_stops_the_run_before_its_first_step(fake, tmp_path):
    def refuse(**_: Any) -> None:
        raise PermissionError("no API key")

    fake.init = refuse
    with pytest.raises(UserError, match=f"{fake.__name__} cannot start: no API key; take it out of report_to"):
        run(tmp_path / "run", report_to=[fake.__name__])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_said_before_the_model_is_looked_for(name, tmp_path, monkeypatch):
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    training = TrainingConfig(report_to=[name], output_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=rf"pip install 'lowmem\[{name}\]'"):
        Trainer("no/such-model", [{"text": "x"}], training=training)


def test_a_folder_of_that_name_is_not_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # what a bare folder is imported as
    with pytest.raises(UserError, match="not installed"):
        Wandb()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tensorboard", "must be a list"),
        ("[mlflow]", "tensorboard"),
        ("[wandb, wandb]", "each tracker once"),
        ("[tensorboard]", "set training.output_dir"),
    ],
)
def test_recipes_name_trackers_that_exist_once(tmp_path, value, words):
    recipe = tmp_path / "x.yaml"
    recipe.write_text(f"model: {{name_or_path: x}}\ntraining: {{report_to: {value}}}\n")
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe)
    recipe.write_text("model: {name_or_path: x}\ntraining: {report_to: [tensorboard, wandb], output_dir: out}\n")
    assert load_recipe(recipe).training.report_to == ["tensorboard", "wandb"]


def test_python_users_hear_the_same():
    with pytest.raises(UserError, match=r"training\.report_to: a list of tensorboard, wandb, trackio; got 'wandb'"):
        TrainingConfig(report_to="wandb")  # type: ignore[arg-type]


# -- the real ones ----------------------------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def loaded(folder: Path, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events(folder).Scalars(tag)}


def test_tensorboard_has_the_curves_the_settings_and_one_history_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path / "run", stop_after(4), report_to=["tensorboard"], max_steps=6)
    folder = tmp_path / "run" / "tensorboard"
    assert list(loaded(folder, "train/loss")) == [1, 2, 3, 4]  # flushed, though never closed
    shutil.rmtree(tmp_path / "run" / "checkpoint-000004")  # so that steps 3 and 4 are done again
    trainer = run(tmp_path / "run", resume=True, report_to=["tensorboard"], max_steps=6, learning_rate=0.0)
    assert list(loaded(folder, "train/loss")) == [1, 2, 3, 4, 5, 6]
    rates = loaded(folder, "train/learning_rate")
    assert rates[2] > 0 == rates[3] == rates[4]
    assert loaded(folder, "eval/loss")[6] == pytest.approx(trainer.result["eval_loss"])
    assert loaded(folder, "result/train_loss")[6] == pytest.approx(trainer.result["train_loss"])
    assert "training/text_summary" in events(folder).Tags()["tensors"]
    assert "tensorboard failed" not in " ".join(trainer.run.all_notices)


def test_tensorboard_takes_a_place_of_its_own_and_needs_one(tmp_path):
    pytest.importorskip("tensorboard")
    trainer = make_trainer(observers=[TensorBoard(tmp_path / "tb")], logging_steps=1)
    trainer.train()
    assert list(loaded(tmp_path / "tb", "train/loss")) == [1, 2, 3]
    with pytest.raises(UserError, match="tensorboard cannot start: it needs a log_dir"):
        make_trainer(observers=[TensorBoard()]).train()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_writes_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = run(tmp_path / "run", report_to=["wandb"])
    assert trainer.run.all_notices == []
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"train/loss" in content
    assert b"eval/loss" in content
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] in written.name


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_writes_into_its_local_database(tmp_path, monkeypatch):
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    trainer = run(tmp_path / "run", Trackio(project="lowmem-test", auto_log_cpu=False))
    assert trainer.run.all_notices == []
    logs = SQLiteStorage.get_logs("lowmem-test", "run")
    assert [line["step"] for line in logs if "train/loss" in line] == [1, 2, 3, 4]


# -- a callable of the user's own -------------------------------------------------------------------------------------


def test_a_callable_of_three_lines_is_an_observer(capsys):
    page = (DOCS / "see-a-run.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def watch" in block)
    definition = next(node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    lines = ast.unparse(definition).splitlines()
    assert len(lines) == 3
    namespace: dict[str, Any] = {}
    exec(ast.unparse(definition), namespace)
    make_trainer(observers=[namespace["watch"]], logging_steps=1).train()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3"]
