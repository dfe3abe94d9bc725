"""Runs side by side: what differs and nothing else, the results, and their lines over each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import RECIPE, Page, write_run
from typer.testing import CliRunner

from lowmem import UserError
from lowmem.cli import app
from lowmem.report.compare import dash, differences, read_runs, render


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    recipe = RECIPE.replace("0.001", "0.002").replace("output_dir: out", "output_dir: other")
    recipe = recipe.replace("  gradient_checkpointing: {}\n", "")
    done = {"train_loss": 0.25, "eval_loss": 0.5, "exact_match_before": 0.0, "exact_match_after": 0.925}
    return [
        write_run(tmp_path / "a", 20, evaluate=5, result={**done, "peak_rss_bytes": 3 * 2**30}),
        write_run(tmp_path / "b", 12, recipe=recipe),
    ]


def test_only_what_differs_is_named(two):
    facts = differences(read_runs(two))
    assert facts["settings"] == {
        "training.learning_rate": {"a": 0.001, "b": 0.002},
        "strategies.gradient_checkpointing": {"a": {}, "b": "(not there)"},
    }
    assert facts["versions"] == {}
    (two[1] / "versions.json").write_text(json.dumps({"lowmem": "0.1.0", "torch": "2.10.0"}))
    assert differences(read_runs(two))["versions"] == {"torch": {"a": "2.13.0", "b": "2.10.0"}}


def test_results_stand_side_by_side_also_of_an_unfinished_shorter_run(two):
    results = differences(read_runs(two))["results"]
    assert results["state"] == {"a": "finished", "b": "unfinished"}
    assert results["steps"] == {"a": 20, "b": 12}
    assert results["train loss (last logged)"] == {"a": 3 / 20, "b": 3 / 12}
    assert results["eval loss (last)"] == {"a": 1.5, "b": None}
    assert results["exact match after"] == {"a": 0.925, "b": None}
    assert results["peak resident bytes"] == {"a": 3 * 2**30, "b": 2**30}  # of b: the largest that was logged
    assert results["train seconds"] == {"a": 10.0, "b": 6.0}
    assert "peak GPU bytes" not in results  # nobody measured it


def test_the_page_draws_every_run_over_steps_tokens_and_seconds(two):
    page = Page(render(read_runs(two)))
    drawn = {json.loads(data)["name"]: json.loads(data) for data in page.values("figure", "data-hover")}
    assert set(drawn) == {"step", "tokens", "seconds"}
    for over in drawn.values():
        assert [name for name, _ in over["series"]] == ["a", "b"]
    assert drawn["tokens"]["series"][1][1][-1] == [1200, 0.25]
    assert "training.learning_rate 0.001 0.002" in page.words
    assert "92.5 %" in page.words
    assert "All versions are the same." in page.words


def test_ten_runs_can_be_told_apart_and_eleven_are_refused(tmp_path):
    folders = [write_run(tmp_path / f"r{i}", 3) for i in range(11)]
    page = Page(render(read_runs(folders[:10])))
    assert len({(f"c{i}", dash(i)) for i in range(10)}) == 10
    lines = {value for value in page.values("path", "class") if value.startswith("line")}
    assert lines == {f"line c{i}" for i in range(10)}
    with pytest.raises(UserError, match="from 2 to 10 runs; got 11"):
        read_runs(folders)
    with pytest.raises(UserError, match="got 1"):
        read_runs(folders[:1])


def test_the_same_run_twice_is_refused_by_whatever_name(two, tmp_path):
    (tmp_path / "link").symlink_to(two[0])
    for twin in (two[0], tmp_path / "b" / ".." / "a", tmp_path / "link"):
        with pytest.raises(UserError, match="is there twice"):
            read_runs([two[0], two[1], twin])


def test_runs_of_one_name_are_told_apart_by_their_place(tmp_path):
    folders = [write_run(tmp_path / place / "out", 3) for place in ("x", "y")]
    assert list(read_runs(folders)) == ["x/out", "y/out"]


def test_names_and_values_are_text(tmp_path):
    evil = "<script>alert(1)</script>"
    folders = [
        write_run(tmp_path / f"{i}<script>", 3, recipe=f"model: {{name_or_path: '{i}{evil}'}}\n") for i in (1, 2)
    ]
    assert f"1{evil} 2{evil}" in Page(render(read_runs(folders))).words


def test_long_runs_give_a_small_page(tmp_path):
    folders = [write_run(tmp_path / f"r{i}", 5000) for i in range(4)]
    assert len(render(read_runs(folders))) < 1_000_000


def test_the_command_prints_a_table_json_and_a_page(two, tmp_path):
    run = [str(path) for path in two]
    done = CliRunner().invoke(app, ["compare", *run, "-o", str(tmp_path / "x.html")])
    assert done.exception is None
    for text in ("training.learning_rate", "0.002", "92.5 %", "versions that differ: none", "3.00 GiB"):
        assert text in done.output
    assert "batch_size" not in done.output
    Page((tmp_path / "x.html").read_text(encoding="utf-8"))
    (two[1] / "metrics.jsonl").write_text('{"event": "log", "step": 1, "loss": "nan"}\n')
    done = CliRunner().invoke(app, ["compare", *run, "--json"])
    facts = json.loads(done.output)
    assert facts["runs"] == {"a": run[0], "b": run[1]}
    assert facts["results"]["train loss (last logged)"] == {"a": 0.15, "b": "nan"}


def test_what_is_no_run_is_said(two, tmp_path):
    done = CliRunner().invoke(app, ["compare", str(two[0]), str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "is no run folder" in str(done.exception)
