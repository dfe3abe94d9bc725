"""Never lose work: kill -9 at any instant, bits that flip, disks that fill, signals, two processes at once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from durable_jobs import assert_same, count_lines, go_on, outcome, train
from new_process import ended, run, start

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


@pytest.mark.parametrize("name", KILLED_SETS)
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


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_killed_at_fifty_random_moments(tmp_path, straight, number):
    """Two in five at any line that saves, two in five while a half-made file is there, one in five at any time."""
    draw = random.Random(number)
    name = KILLED_SETS[number % 3]
    kill = (kill_at_a_line, kill_in_a_save, kill_at_a_line, kill_in_a_save, kill_at_a_time)[number % 5]
    print(name, kill.__name__, kill(tmp_path, name, straight, draw))
    assert_goes_on(tmp_path, name, straight(name)[0])
