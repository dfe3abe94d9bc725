"""The suite for the card, on a CPU: it runs to its end, and writes what it says it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_suite.py"


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_a_small_part_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    names = ["nf4_parity", "packing_sdpa", "pinned", "ladder"]
    done = run_suite("--device", "cpu", "--tiny", "--only", ",".join(names), "--commit", "abc", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr

    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["schema"] == 1
    assert content["device"] == "cpu"
    assert content["tiny"] is True
    machine = content["machine"]
    assert machine["commit"] == "abc"
    assert machine["gpu"] is machine["cuda"] is machine["memory_bytes"] is None or machine["cuda"]
    assert {"lowmem", "torch", "transformers", "peft", "bitsandbytes"} <= machine["versions"].keys()

    checks = {check["name"]: check for check in content["checks"]}
    assert sorted(checks) == sorted(names)
    keys = {"name", "what", "status", "reason", "seconds", "allowance_seconds", "facts", "bytes", "tables"}
    assert all(check.keys() == keys for check in checks.values())
    assert content["summary"] == {"pass": ["packing_sdpa"], "fail": [], "not run": ["nf4_parity", "pinned", "ladder"]}
    assert {check["reason"] for check in checks.values()} == {"", "no CUDA"}
    assert checks["pinned"]["facts"]["different"] == 0
    # nothing was measured, so no byte is claimed
    assert checks["ladder"]["bytes"]
    assert set(checks["ladder"]["bytes"].values()) == {None}
    assert "not run: ladder (no CUDA)" in done.stdout


@pytest.mark.slow
def test_long_rows_and_fused_kernels_on_a_cpu(tmp_path: Path) -> None:
    """The recipe for long rows, transformers and peft beside it, and fused kernels: all of it but the card's bytes."""
    out = tmp_path / "suite.json"
    names = ["long_4k", "long_longest", "hf_4k", "fused_4k"]
    arguments = ("--device", "cpu", "--tiny", "--minutes", "20", "--only", ",".join(names), "--out", str(out))
    done = run_suite(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(out.read_text(encoding="utf-8"))["checks"]}
    assert sorted(checks) == sorted(names)
    assert {(check["status"], check["reason"]) for check in checks.values()} == {("not run", "no CUDA")}
    for name, steps in (("long_4k", 3), ("long_longest", 1)):
        facts, sizes = checks[name]["facts"], checks[name]["bytes"]
        assert facts["called_fitting"] is True
        assert len(facts["losses"]) == steps
        assert 0 < sizes["predicted allocated"] <= sizes["predicted reserved"]
        assert sizes["predicted pinned"] > 0
        assert sizes["peak allocated"] is sizes["peak reserved"] is sizes["pinned"] is None  # nothing was measured
    assert checks["long_4k"]["facts"]["tokens"] == 32
    assert len(checks["hf_4k"]["facts"]["losses"]) == 3
    cases = [c + k for c in ("checkpointing", "+ tiled MLP", "+ chunked layers") for k in ("", ", fused")]
    assert [name for name in checks["fused_4k"]["bytes"] if not name.startswith("predicted")] == cases
    assert all(checks["fused_4k"]["bytes"][f"predicted, {case}"] > 0 for case in cases)


@pytest.mark.slow
def test_several_cards_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run_suite("--device", "cpu", "--tiny", "--only", "cards_ddp,cards_tensor", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(out.read_text(encoding="utf-8"))["checks"]
    assert {(check["status"], check["reason"]) for check in checks} == {("not run", "no CUDA")}
    for check in checks:
        assert check["facts"]["processes"] == 2
        assert all(check["facts"][kind]["loss_off_by"] <= 1e-4 for kind in ("full", "lora"))
        assert check["bytes"] == {}  # nothing was measured


def suite() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_suite_here", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_what_is_called_fitting_has_to_fit() -> None:
    found, usable = suite(), int(23.5 * 2**30)
    found.must_fit(True, True, usable)
    found.must_fit(True, True, None)
    for arguments, words in (
        ((False, True, usable), "does not call it fitting"),
        ((True, False, None), "was not enough"),
        ((True, True, usable + 1), "reserved, of"),
    ):
        with pytest.raises(AssertionError, match=words):
            found.must_fit(*arguments)


def test_what_it_predicts_and_measures_goes_the_same_way(tmp_path: Path) -> None:
    """The process that the check `predict` starts: at least 12 recipes, SOLAR's shape among them; here, one of them."""
    script, out = SCRIPT.with_name("gpu_predict.py"), tmp_path / "predicted.json"
    command = [sys.executable, str(script), "--tiny", "--only", "SOLAR", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ((name, found),) = json.loads(out.read_text(encoding="utf-8")).items()
    assert name == "SOLAR's shape in 24 GiB"
    assert "failed" not in found
    assert found["measured"] == [None, None]
    assert 2 * 8_519_680 < found["predicted"][0] <= found["predicted"][1]
    assert script.read_text(encoding="utf-8").count("Recipe(") - 1 >= 12


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--list"], 0, ["exact_fp32", "ladder", "whole_solar"]),
        (["--help"], 0, ["bitsandbytes", "wheels"]),
        (["--only", "nothing_like_it"], 1, ["no check is called nothing_like_it", "exact_fp32"]),
    ],
)
def test_answers_at_once(arguments: list[str], status: int, words: list[str]) -> None:
    done = run_suite(*arguments)
    assert done.returncode == status
    assert all(word in done.stdout + done.stderr for word in words)


def test_without_time_nothing_starts_and_all_is_named(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    done = run_suite("--device", "cpu", "--tiny", "--minutes", "0.01", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text(encoding="utf-8"))
    assert not content["summary"]["pass"]
    assert not content["summary"]["fail"]
    assert all("of the budget left" in check["reason"] for check in content["checks"])
    assert len(content["checks"]) == len(content["summary"]["not run"]) >= 11
