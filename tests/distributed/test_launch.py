"""`lowmem train --nproc`: what it says and leaves when a rank dies, and when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_llama

OWN = """
import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from lowmem import Stage, Strategy


@dataclass
class Dies(Strategy):
    stage: ClassVar[Stage] = Stage.CLIP
    at: int = 2

    def wrap_step(self, step, run):
        def doomed():
            if run.world.rank == 1 and run.global_step == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            step()

        return doomed
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama().save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [1 + (i + j) % 100 for j in range(8)]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    recipe = {
        "model": {"name_or_path": "model"},
        "data": {"train": "rows.jsonl"},
        "training": {
            "batch_size": 4,
            "max_steps": 4,
            "max_length": 16,
            "learning_rate": 0.001,
            "save_steps": 1,
            "output_dir": "out",
        },
        "strategies": {"ddp": {}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    doomed = {**recipe, "strategies": {"ddp": {}, "own.Dies": {}}}
    (tmp_path / "doomed.yaml").write_text(json.dumps(doomed), encoding="utf-8")
    return tmp_path


def start(folder: Path, recipe: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowmem", "train", recipe, "--nproc", "2", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOWMEM_TIMEOUT": "60", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_rank_that_dies_is_named_and_the_run_goes_on_later(folder: Path) -> None:
    doomed = start(folder, "doomed.yaml")
    _, said = doomed.communicate(timeout=200)
    assert doomed.returncode == 1, said
    assert "rank 1 was ended by SIGKILL; the others were stopped" in said
    assert "Traceback" not in said
    assert (folder / "out" / "checkpoint-000002").is_dir()
    again = start(folder, "recipe.yaml", "--resume")
    _, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))["steps"] == 4


@pytest.mark.slow
def test_an_interrupt_saves_on_all_ranks(folder: Path) -> None:
    running = start(folder, "recipe.yaml", "training.max_steps=100000", "training.save_steps=100000")
    metrics, latest = folder / "out" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"step"' in metrics.read_text(encoding="utf-8")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < latest
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=200)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert list((folder / "out").glob("checkpoint-*")), said


SCRIPT = """
import atexit
import sys

import torch.distributed as dist

atexit.register(lambda: print("still joined:", dist.is_initialized(), flush=True))  # what is registered last goes first
from transformers import AutoModelForCausalLM

from lowmem import DDP, Trainer, TrainingConfig

model = AutoModelForCausalLM.from_pretrained("model")
rows = [{"input_ids": [1, 2, 3, i]} for i in range(8)]
Trainer(model, rows, training=TrainingConfig(batch_size=4, max_steps=2), strategies=[DDP()]).train()
"""


@pytest.mark.slow
def test_a_script_of_its_own_parts_from_the_others_before_it_ends(folder: Path) -> None:
    """Python that goes while gloo's threads hold tensors may be aborted."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("still joined: False") == 2, ended.stdout
