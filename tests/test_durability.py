"""Never lose work: kill -9 at any instant, bits that flip, disks that fill, signals, two processes at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from cases.helpers import Log, llama, numbers, rows
from durable_jobs import assert_same, count_lines, go_on, outcome, replace_folder, train
from new_process import ended, run, start
from resuming import DATA, Losses, assert_equal_runs, interrupted
from resuming import run as resumable

from lowmem import EMA, LoRA, Trainer, UserError, durable

KILLED = -9
KILLED_SETS = ("float16_8bit", "qlora_ema", "bf16_dropout")


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """Name of a set -> what an uninterrupted run leaves, and how many lines of the code that saves it went through."""
    found = {}

    def of(name: str) -> tuple[dict, int]:
        if name not in found:
            place = tmp_path_factory.mktemp("straight")
            assert run(count_lines, place / "run", name, place / "lines", log=place / "log") == 0, (
                place / "log"
            ).read_text()
            found[name] = outcome(place / "run"), int((place / "lines").read_text())
        return found[name]

    return of


def assert_goes_on(place: Path, name: str, expected: dict) -> None:
    assert run(go_on, place / "run", name, log=place / "log") == 0, (place / "log").read_text()
    assert_same(outcome(place / "run"), expected)


def kill_at_a_line(place: Path, name: str, straight, draw: random.Random) -> str:
    """At one of the lines that save, log and evaluate: every one is as likely."""
    line = draw.randrange(1, straight(name)[1])
    assert run(train, place / "run", name, None, line) == KILLED
    return f"line {line}"


def kill_in_a_save(place: Path, name: str, straight, draw: random.Random) -> str:
    """As soon as a half-made folder or file is seen, or a moment later."""
    wanted, moment = draw.randrange(1, 5), draw.random() * 0.004
    process, seen = start(train, place / "run", name), set()
    while process.is_alive() and len(seen) < wanted:
        seen |= {p.name for p in (place / "run").glob("*.partial-*")} if place.exists() else set()
    time.sleep(moment)
    process.kill()
    ended(process)
    return f"{len(seen)} partial seen, then {moment:.4f} s"


def kill_at_a_time(place: Path, name: str, straight, draw: random.Random) -> str:
    """At any time after the run folder came into being."""
    process, moment = start(train, place / "run", name), draw.random() * 0.6
    while process.is_alive() and not (place / "run").exists():
        time.sleep(0.001)
    time.sleep(moment)
    process.kill()
    ended(process)
    return f"{moment:.3f} s"


@pytest.mark.parametrize("name", [pytest.param(KILLED_SETS[0], marks=pytest.mark.slow), *KILLED_SETS[1:]])
@pytest.mark.parametrize("kill", [kill_at_a_line, kill_in_a_save])
def test_killed_once_equals_uninterrupted(tmp_path, straight, name, kill):
    draw = random.Random(f"{name} {kill.__name__}")
    kill(tmp_path, name, straight, draw)
    assert_goes_on(tmp_path, name, straight(name)[0])


def test_killed_again_and_again(tmp_path, straight):
    """Every try gets a little further through the code that saves, and one is killed while it resumes."""
    name = "qlora_ema"
    lines = straight(name)[1]
    for tried in (lines // 3, 60, lines // 3, lines // 4):
        assert run(go_on, tmp_path / "run", name, tried) == KILLED
    assert_goes_on(tmp_path, name, straight(name)[0])


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


@pytest.mark.parametrize("damage", [flip, cut, lambda file, draw: file.unlink()], ids=["flipped", "cut", "missing"])
def test_any_damage_is_found(tmp_path, damage):
    draw = random.Random(0)
    whole = interrupted(tmp_path / "run", LoRA(r=4), EMA(decay=0.9))
    files = sorted(p for p in whole.rglob("*") if p.is_file())
    assert {"manifest.json", "trainer.json", "optimizer.pt", "rng.pt", "adapter_model.safetensors"} <= {
        p.name for p in files
    }
    durable.verify(whole)
    for file in files:
        for _ in range(20):
            before = file.read_bytes()
            damage(file, draw)
            if file.name == "manifest.json" and _same_facts(before, file):
                file.write_bytes(before)  # a blank became another one
                continue
            with pytest.raises(durable.DamagedError) as caught:
                durable.verify(whole)
            assert file.name == "manifest.json" or file.name in str(caught.value)
            file.write_bytes(before)
    durable.verify(whole)


def _same_facts(before: bytes, file: Path) -> bool:
    try:
        return json.loads(before) == json.loads(file.read_bytes())
    except (ValueError, OSError):
        return False


@pytest.mark.parametrize("damage", [flip, cut])
def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path, damage):
    straight = resumable(None)
    resumable(tmp_path / "run", stop=4, save_steps=2)
    damage(tmp_path / "run" / "checkpoint-000004" / "optimizer.pt", random.Random(1))
    resumed = resumable(tmp_path / "run", resume=True, save_steps=2)
    assert_equal_runs(straight, resumed)
    told, aside = resumed.result["notices"]
    assert "checkpoint-000004 is damaged: optimizer.pt" in told
    assert "checkpoint-000002 is taken instead" in told
    assert "kept as checkpoint-000004.aside" in aside
    names = [p.name for p in sorted((tmp_path / "run").glob("checkpoint-*"))]
    assert names == [f"checkpoint-00000{n}" for n in ("2", "4", "4.aside", "6")]


def test_a_damaged_best_does_not_cost_the_result(tmp_path):
    def damage(event) -> None:
        if event.kind == "save" and event.metrics["step"] == 3:
            flip(tmp_path / "run" / "checkpoint-000001" / "model.safetensors", random.Random(2))

    trainer = Trainer(
        llama(), train_dataset=DATA, eval_dataset=rows(2), observers=[damage],
        training=numbers(max_steps=3, eval_steps=1, save_steps=1, output_dir=str(tmp_path / "run"),
                         load_best_model_at_end=True),
    )  # fmt: skip
    Losses(1, 2, 3).install(trainer).train()
    assert (tmp_path / "run" / "model").is_dir()
    assert any("is damaged" in t and "last step are the result" in t for t in trainer.result["notices"])


# -- where a run goes on ----------------------------------------------------------------------------------------------


def test_an_older_checkpoint_by_name_sets_the_later_ones_aside(tmp_path):
    """Otherwise the limit would delete the new ones as the oldest, and the next resume would take the old course."""
    straight = resumable(None)
    resumable(tmp_path / "run", save_steps=2)
    log = Log()
    resumed = resumable(
        tmp_path / "run", resume=tmp_path / "run" / "checkpoint-000002", save_steps=2, save_total_limit=1, log=log
    )
    assert_equal_runs(straight, resumed)
    names = [p.name for p in sorted((tmp_path / "run").glob("checkpoint-*"))]
    assert names == ["checkpoint-000004.aside", "checkpoint-000006", "checkpoint-000006.aside"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "log"] == [1, 2, 3, 4, 5, 6]  # no doubles


def test_a_run_folder_by_name(tmp_path):
    straight = resumable(None)
    resumable(tmp_path / "run", stop=3)
    resumable(tmp_path / "run", stop=3, seed=7)  # run-2, which is newer
    resumed = resumable(tmp_path / "run", resume=tmp_path / "run")
    assert resumed.books.folder == tmp_path / "run"
    assert_equal_runs(straight, resumed)
    with pytest.raises(UserError, match=r"no checkpoint, and no run folder"):
        resumable(tmp_path / "run", resume=tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*gone"):
        resumable(tmp_path / "run", resume=tmp_path / "gone")


def test_two_processes_in_one_folder_are_refused(tmp_path):
    process = start(train, tmp_path / "run", "plain", None, None, tmp_path / "wait")
    deadline = time.monotonic() + 120
    while not (tmp_path / "wait").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(UserError, match=rf"process {process.pid} on .* is training in this folder"):
        resumable(tmp_path / "run", resume=True)
    process.kill()  # the lock goes with it
    assert ended(process) == KILLED
    with durable_lock(tmp_path / "run"):
        pass


@contextmanager
def durable_lock(folder: Path):
    lock = durable.Lock(folder)
    try:
        yield
    finally:
        lock.release()


def test_a_folder_is_replaced_at_once(tmp_path):
    """Killed at any line of it, the old or the new one is there after the next resume has swept."""
    place, outcomes = tmp_path / "checkpoint-000001", set()
    for line in range(1, 200):
        shutil.rmtree(tmp_path, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "file").write_text("old")
        durable.seal(place)
        code = run(replace_folder, place, line)
        durable.sweep(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == [place.name]
        durable.verify(place)
        outcomes.add((place / "file").read_text())
        if code == 0:
            break
        assert code == KILLED
    assert line > 30
    assert outcomes == {"old", "new"}


def test_what_living_processes_write_is_not_swept(tmp_path):
    gone = 99_999_999  # no process has such a number
    names = [f"checkpoint-000002.partial-{os.getppid()}", f"checkpoint-000003.partial-{gone}", f"model.partial-{gone}"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f"result.json.partial-{gone}").write_text("{")
    assert len(durable.sweep(tmp_path)) == 3
    assert [p.name for p in tmp_path.iterdir()] == names[:1]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_killed_at_fifty_random_moments(tmp_path, straight, number):
    """Two in five at any line that saves, two in five while a half-made file is there, one in five at any time."""
    draw = random.Random(number)
    name = KILLED_SETS[number % 3]
    kill = (kill_at_a_line, kill_in_a_save, kill_at_a_line, kill_in_a_save, kill_at_a_time)[number % 5]
    print(name, kill.__name__, kill(tmp_path, name, straight, draw))
    assert_goes_on(tmp_path, name, straight(name)[0])
