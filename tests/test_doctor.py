"""`lowmem doctor`: what it says was tried."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
import torch

from lowmem import cli, doctor
from lowmem.errors import UserError
from lowmem.strategies import EMA, STRATEGIES, GradientClipping, Quantization


@pytest.fixture(autouse=True)
def few_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are enough here: the composition tests train with all."""
    few = {name: STRATEGIES[name] for name in ("quantization", "lora", "ema", "adamw_8bit")}
    monkeypatch.setattr(doctor, "STRATEGIES", few)


def test_every_fact_is_there_and_the_text_holds_it() -> None:
    said: list[str] = []
    facts = doctor.diagnose(said.append)
    assert facts["versions"]["torch"]["version"] == version("torch")
    assert facts["versions"]["torch"]["wanted"].startswith(">=2.")
    assert 0 < facts["host"]["memory_free_bytes"] <= facts["host"]["memory_bytes"]
    assert facts["dtypes"]["cpu"]["float32"] == "works"
    assert all(entry["works"] for entry in facts["strategies"].values())
    assert any("managed memory" in note for note in facts["strategies"]["adamw_8bit"]["notes"])
    assert "trying quantization (format=int8)" in said
    text = "\n".join(doctor.lines(facts))
    for word in ("torch", "host memory", "pinned memory", "cpu      bfloat16", "ema                      runs here"):
        assert word in text


def test_a_strategy_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, config: Any, run: Any) -> Any:
        raise UserError("quantization: bitsandbytes is broken here")

    monkeypatch.setattr(Quantization, "configure", refuse)
    found = doctor.diagnose()["strategies"]
    assert not found["quantization"]["works"]
    assert found["ema"]["works"]
    assert "quantization: bitsandbytes is broken here" in found["quantization"]["notes"]
    entry = {"quantization": found["quantization"]}
    facts = {**_no_facts(), "strategies": entry}
    assert any("does not run here" in line for line in doctor.lines(facts))


def test_a_dtype_that_cannot_be_multiplied_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this\nand a long trace")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert doctor._matrix_product("cpu", "float8_e4m3fn") == "no: no kernel for this"
    assert doctor._matrix_product("cpu", "float32") == "works"


@pytest.mark.parametrize(("found", "wanted", "good"), [("2.9", ">=2.10", False), ("2.13.0+cpu", ">=2.10", True)])
def test_an_old_package_is_pointed_out(found: str, wanted: str, good: bool) -> None:
    facts = {**_no_facts(), "versions": {"torch": {"version": found, "wanted": wanted}}}
    assert ("puts this right" in "\n".join(doctor.lines(facts))) is not good


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "STRATEGIES", {"ema": EMA, "gradient_clipping": GradientClipping})
    cli.app(["doctor", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["strategies"]) == {"ema", "gradient_clipping"}
    assert facts["strategies"]["gradient_clipping"]["works"]


def _no_facts() -> dict[str, Any]:
    return {"versions": {}, "extras": {}, "host": doctor._host(), "devices": [], "dtypes": {}, "strategies": {}}
