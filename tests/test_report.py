"""`report.html`: charts to the coordinate, hostile text, broken and unfinished runs, and a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from conftest import make_llama, make_rows, make_trainer
from run_folders import Page, log_line, write_run
from typer.testing import CliRunner

from lowmem import UserError
from lowmem.memory.meter import MemoryLedger
from lowmem.report.charts import HEIGHT, WIDTH, Chart, Series, area_chart, line_chart
from lowmem.report.html import esc, table
from lowmem.report.page import render, write_report
from lowmem.report.read import read_run
from lowmem.report.scale import Axis, number, tick_texts
from lowmem.report.thin import sample_rows, smooth, thin

SECTIONS = ["curves", "memory", "answers", "data", "strategies", "settings", "notices", "checkpoints", "versions"]
CHROMIUM = shutil.which("chromium")


def page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def paths(html: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}[^"]*"[^>]* d="([^"]*)"', html)


# -- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "ticks", "texts"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10], ["0", "2", "4", "6", "8", "10"]),
        (0.9, 2.1, [1.0, 1.25, 1.5, 1.75, 2.0], ["1.00", "1.25", "1.50", "1.75", "2.00"]),
        (0, 100_000, [0, 20_000, 40_000, 60_000, 80_000, 100_000], ["0", "20k", "40k", "60k", "80k", "100k"]),
        (0, 2.1e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4], ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
    ],
)
def test_ticks_are_round_and_equally_written(low, high, ticks, texts):
    found = Axis(low, high).ticks(5)
    assert found == pytest.approx(ticks)
    assert tick_texts(found) == texts


@pytest.mark.parametrize("exponent", range(-12, 13))
def test_any_range_gets_between_two_and_seven_ticks_inside_it(exponent):
    for low, high in ((0.0, 1.0), (1.0, 1.001), (-3.7, 9.1), (99.0, 101.0)):
        axis = Axis(low * 10.0**exponent, high * 10.0**exponent)
        found = axis.ticks(6)
        assert 2 <= len(found) <= 7
        slack = 1e-6 * (axis.high - axis.low)
        assert all(axis.low - slack <= tick <= axis.high + slack for tick in found)
        assert len(set(tick_texts(found))) == len(found)  # no two ticks read the same


def test_a_logarithmic_axis_gives_factors_equal_room():
    axis = Axis(1.0, 1000.0, log=True)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert axis.ticks(5) == pytest.approx([1, 10, 100, 1000])
    assert tick_texts(axis.ticks(5), log=True) == ["1", "10", "100", "1000"]
    assert tick_texts([1e-4, 1e-3, 1e4], log=True) == ["1e-4", "0.001", "1e4"]


def test_an_axis_has_room_around_values_also_equal_missing_or_infinite_ones():
    assert Axis.around([1.0, 3.0]) == Axis(0.9, 3.1)
    assert Axis.around([2.0, 2.0]).at(2.0) == pytest.approx(0.5)
    assert Axis.around([0.0, 0.0]) == Axis(-1.0, 1.0)
    assert Axis.around([0.0], zero=True) == Axis(0.0, 1.0)
    assert Axis.around([math.nan, math.inf, 4.0, 8.0], zero=True) == Axis(0.0, pytest.approx(8.4))
    assert Axis.around([]) == Axis.around([0.0, 1.0])


def test_numbers_in_tables():
    given = [None, math.nan, -math.inf, 1234, 1234.5, 0.12345, 2e-5, 0.0]
    assert [number(value) for value in given] == [
        "-",
        "NaN",
        "-infinite",
        "1,234",
        "1,234",
        "0.1235",
        "2e-05",
        "0.0000",
    ]


# -- fewer points -----------------------------------------------------------------------------------------------------


def test_few_points_all_stay():
    points = [(float(i), float(i % 7)) for i in range(600)]
    assert thin(points, 600) == points


def test_many_points_keep_both_ends_spikes_and_gaps_and_are_real_ones():
    points = [(float(i), math.sin(i / 50)) for i in range(100_000)]
    points[77_777] = (77_777.0, 99.0)
    points[31_313] = (31_313.0, -99.0)
    points[55_555] = (55_555.0, math.nan)
    found = thin(points, 600)
    assert len(found) <= 610
    assert found[0] == points[0]
    assert found[-1] == points[-1]
    assert {points[77_777], points[31_313]} <= set(found)
    assert sum(math.isnan(y) for _, y in found) == 1
    assert set(found) <= set(points)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    assert sum(x < 1000 for x, _ in found) > 100  # the beginning is denser: 1 % of the steps


def test_means_leave_gaps():
    points = [(0.0, 2.0), (1.0, 4.0), (2.0, math.nan), (3.0, 6.0), (4.0, 8.0)]
    found = smooth(points, 2)
    assert [y for _, y in found if not math.isnan(y)] == [2.0, 3.0, 5.0, 7.0]
    assert math.isnan(found[2][1])


@pytest.mark.parametrize("length", [0, 1, 5, 12, 13, 1000])
def test_rows_of_a_table_are_few_with_both_ends(length):
    found = sample_rows(length, 12)
    assert len(found) <= 12
    assert not length or (found[0], found[-1]) == (0, length - 1)


# -- charts -----------------------------------------------------------------------------------------------------------


def test_a_line_goes_through_the_right_places():
    html = line_chart(Chart("c", "Loss"), [Series("train", [(0, 0.0), (5, 10.0), (10, 5.0)])])
    room = 0.5 / 11  # five hundredths of the range at either end
    top, bottom, middle = (_place(value, room) for value in (1, 0, 0.5))
    assert paths(html, "line c0") == [f"M0 {bottom}L{WIDTH // 2} {top}L{WIDTH} {middle}"]
    Page(f"<script></script>{html}")


def _place(share: float, room: float) -> str:
    return f"{HEIGHT * (1 - (room + share * (1 - 2 * room))):.1f}".removesuffix(".0")


def test_gaps_split_a_line_and_are_marked():
    html = line_chart(
        Chart("c", "Loss"), [Series("train", [(0, 1.0), (1, math.nan), (2, 1.0), (3, math.inf), (4, 1.0)])]
    )
    assert paths(html, "line c0") == ["M0 150M500 150M1000 150"]
    assert paths(html, "dots c0") == ["M0 150h0M500 150h0M1000 150h0"]  # points between gaps are seen at all
    assert paths(html, "broken") == ["M250 0v14M750 0v14"]
    assert "train 2 points" in html
    assert "nan" not in re.findall(r'd="([^"]*)"', html)


def test_one_point_is_a_dot_in_the_middle_and_none_is_a_remark():
    html = line_chart(Chart("c", "Loss"), [Series("train", [(7, 2.0)]), Series("eval", [])])
    assert paths(html, "dots c0") == ["M500 150h0"]
    assert "eval" not in html
    html = line_chart(Chart("c", "Loss", empty="Nothing <yet>."), [Series("train", [])])
    assert "Nothing &lt;yet&gt;." in html
    assert "<svg" not in html


def test_only_broken_points_are_drawn_without_a_line():
    html = line_chart(Chart("c", "Loss", may_be_log=True), [Series("train", [(1, math.nan), (2, math.nan)])])
    assert paths(html, "broken") == ["M0 0v14M1000 0v14"]
    assert paths(html, "dots c0") == []


def test_wide_ranges_are_logarithmic_where_allowed():
    series = [Series("norm", [(0, 0.1), (1, 10.0), (2, 1000.0)])]
    assert "logarithmic" in line_chart(Chart("c", "Norm", may_be_log=True), series)
    assert "logarithmic" not in line_chart(Chart("c", "Norm"), series)
    zero = [Series("norm", [(0, 0.0), (1, 1000.0)])]
    assert "logarithmic" not in line_chart(Chart("c", "Norm", may_be_log=True), zero)


def test_layers_stand_on_each_other():
    html = area_chart(Chart("c", "Memory"), [0.0, 1.0], [("below", [1.0, 1.0], 0), ("above", [1.0, 3.0], 1)])
    high = 4 * 1.05
    y = [f"{HEIGHT * (1 - value / high):.1f}".removesuffix(".0") for value in (0, 1, 2, 4)]
    assert paths(html, "area c0") == [f"M0 {y[1]}L1000 {y[1]}L1000 {y[0]}L0 {y[0]}z"]
    assert paths(html, "area c1") == [f"M0 {y[2]}L1000 {y[3]}L1000 {y[1]}L0 {y[1]}z"]


def test_text_is_escaped_wherever_it_comes_in():
    evil = "\"><script>alert('x')</script>\x00\ud800"
    assert "<script" not in table(evil, [evil], [[evil, evil]])
    assert esc("\x00\ud800") == "\ufffd\ufffd"
    chart = Chart("c", evil, evil, evil, marks=[(0.0, evil)])
    html = line_chart(chart, [Series(evil, [(0, 1.0)]), Series(evil, [(0, 1.0)])])
    assert "<script" not in html
    html.encode()


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_has_every_section_and_nothing_from_elsewhere(tmp_path):
    found = page(write_run(tmp_path / "run", evaluate=5, result={"train_loss": 1.0}))
    assert found.values("section", "id") == SECTIONS
    assert found.values("a", "href") == [f"#{name}" for name in SECTIONS]
    assert "finished" in found.words
    assert all(found.values("svg", "aria-label"))
    assert len(found.values("figure", "data-hover")) == 5
    for data in found.values("figure", "data-hover"):
        assert json.loads(data)["series"]
    assert "lora approximate" in found.words
    assert "gradient_checkpointing exact" in found.words
    assert "added by the trainer" in found.words  # adamw, gradient_clipping


def test_a_script_in_a_prompt_is_text(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    sample = {"prompt": evil, "reference": evil, "before": "</dd></html>", "after": evil}
    result = {"samples": [sample], "notices": [evil], "train_data": {evil: {evil: 1}}, "stopped": evil}
    folder = write_run(tmp_path / "a<b>&'\"", recipe=f"model: {{name_or_path: {json.dumps(evil)}}}\n", result=result)
    found = page(folder)  # would count more than one script
    assert found.words.count("<script>alert(1)</script>") >= 6
    assert "a<b>&'\"" in found.words


def test_a_page_of_100000_steps_is_small_and_says_what_it_leaves_out(tmp_path):
    file = write_report(write_run(tmp_path / "run", 100_000, evaluate=1000))
    assert file.stat().st_size < 500_000
    assert "of 100,000; the lowest and highest of each stretch" in Page(file.read_text()).words


@pytest.mark.parametrize("steps", [0, 1])
def test_runs_that_have_hardly_begun(tmp_path, steps):
    found = page(write_run(tmp_path / "run", steps))
    assert "unfinished" in found.words
    assert "No evaluation loss was measured" in found.words
    assert ("Nothing was logged yet." in found.words) is (steps == 0)


def test_losses_that_are_not_finite_are_marked(tmp_path):
    found = page(
        write_run(tmp_path / "run", 10, loss=lambda step: "nan" if step in (4, 5) else "inf" if step == 9 else 1.0)
    )
    assert "NaN or infinite (gaps, marked at the upper edge): train 3 points." in found.words


def test_a_damaged_folder_says_so(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"event": "log"}\n' + json.dumps(log_line(1, 1.0)) + '\n{"event": "lo')
    assert [line["step"] for line in read_run(folder).lines] == [1]
    (folder / "result.json").write_text('{"steps"')
    with pytest.raises(UserError, match=r"result\.json: cannot be read"):
        write_report(folder)
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path)


def test_a_recipe_of_another_version_is_still_shown(tmp_path):
    recipe = "model: {name_or_path: x}\ntraining: {gone: 1}\nstrategies: {lora: {r: 4}, never_heard_of: {a: 1}}\n"
    found = page(write_run(tmp_path / "run", recipe=recipe))
    assert "never_heard_of not known a: 1" in found.words
    assert "gone 1" in found.words


def test_a_class_of_the_user_is_not_imported_for_a_page(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", recipe="model: {name_or_path: x}\nstrategies: {evil.Mine: {a: 1}}\n")
    (folder / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(folder))
    assert "evil.Mine not known a: 1" in page(folder).words


def test_a_resumed_run_is_one_history(tmp_path):
    folder = write_run(tmp_path / "run", 10)
    with (folder / "metrics.jsonl").open("a") as file:  # a kill after step 10, and on from the checkpoint of step 6
        for step in range(7, 15):
            file.write(json.dumps(log_line(step, 0.5, seconds=0.5 * (step - 6))) + "\n")
    record = read_run(folder)
    assert [line["step"] for line in record.lines] == list(range(1, 15))
    assert [line["loss"] for line in record.lines if line["step"] > 6] == [0.5] * 8
    assert [line["seconds"] for line in record.lines] == [0.5 * step for step in range(1, 15)]
    assert record.resumed_at == [6]
    assert "Dotted line: the run was resumed here." in page(folder).words


def test_a_result_of_an_earlier_stop_is_not_the_end(tmp_path):
    folder = write_run(tmp_path / "run", 10, result={"stopped": "SIGTERM"})
    assert read_run(folder).state == "stopped"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(log_line(11, 0.5, seconds=0.1)) + "\n")
    assert read_run(folder).state == "unfinished"


def test_answers_of_every_kind_are_shown_and_counted(tmp_path):
    kinds = {"better": ("x", "r"), "worse": ("r", "x"), "bad": ("x", "y"), "good": ("r", "r")}
    lines = [{"prompt": f"{kind} {i}", "reference": "r", "before": b, "after": a}
             for kind, (b, a) in kinds.items() for i in range(50)]  # fmt: skip
    folder = write_run(tmp_path / "run", result={})
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = page(folder).words
    assert "Of 200 held-out prompts 50 became right, 50 became wrong, 50 stayed wrong, 50 stayed right." in words
    assert all(f"{kind} 2" in words and f"{kind} 3" not in words for kind in kinds)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_page_with_the_memory_of_a_step(tmp_path):
    folder = tmp_path / "run"
    trainer = make_trainer(observers=[MemoryLedger()], eval_rows=make_rows(4, seed=1), output_dir=str(folder),
                           logging_steps=1, save_steps=2, max_steps=4)  # fmt: skip
    trainer.train()
    found = page(folder)
    assert (folder / "report.html").is_file()
    words = found.words
    assert "finished" in words
    assert "Live bytes within step 2, by category" in words
    assert "What lived at the peak of the measured step" in words
    assert "checkpoint-000004" in words
    assert "rows read" in words
    hover = {json.loads(data)["series"][0][0]: json.loads(data) for data in found.values("figure", "data-hover")}
    total = [y for _, y in hover["total"]["series"][0][1]]
    assert max(total) == pytest.approx(trainer.result["peak_live_bytes"] / 2**30, rel=1e-4)
    assert hover["resident set"]["series"][0][1][0][1] > 0.05  # GiB


def test_a_run_without_a_folder_leaves_no_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer().train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_cut_short_gets_its_page_when_the_process_ends(tmp_path, monkeypatch, error):
    at_exit: list = []
    monkeypatch.setattr("atexit.register", at_exit.append)

    def break_off(event):
        if event.kind == "step" and event.metrics["step"] == 2:
            raise error

    trainer = make_trainer(observers=[break_off], output_dir=str(tmp_path / "run"), logging_steps=1)
    with pytest.raises(error):
        trainer.train()
    assert not (tmp_path / "run" / "report.html").exists()
    for call in at_exit:
        call()
    assert "unfinished" in Page((tmp_path / "run" / "report.html").read_text()).words


def test_a_page_that_cannot_be_written_does_not_spoil_the_run(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("lowmem.report.page.render", lambda record: 1 / 0)
    trainer = make_trainer(observers=[lambda e: told.append(e.metrics.get("text"))], output_dir=str(tmp_path / "run"))
    assert trainer.train()["steps"] == 3
    assert "report.html was not written: division by zero" in told


def test_the_command_writes_and_refuses(tmp_path, monkeypatch):
    from lowmem.cli import app

    folder = write_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.output.strip() == str(folder / "report.html")
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "nowhere" / "x.html")])
    assert isinstance(done.exception, UserError)
    assert "could not be written" in str(done.exception)


# -- a browser --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_in_light_and_dark_and_runs_its_script(tmp_path):
    folder = write_run(tmp_path / "run", 200, evaluate=20, result={"notices": ["<b>"]})
    file = write_report(folder)
    light, dark = (_browse(file, tmp_path, scheme) for scheme in (1, 0))
    assert _brightness(light) > 200
    assert _brightness(dark) < 60


def _browse(file: Path, tmp_path: Path, scheme: int) -> Path:
    picture = tmp_path / f"{scheme}.png"
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,1400",
                 f"--user-data-dir={tmp_path}/{scheme}", f"--screenshot={picture}", "--enable-logging=stderr",
                 "--virtual-time-budget=2000", f"--blink-settings=preferredColorScheme={scheme}"]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *arguments, file.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ":CONSOLE" not in done.stderr, done.stderr
    assert picture.is_file(), done.stderr
    return picture


def _brightness(picture: Path) -> float:
    """Mean of the samples of a PNG; the picture must have many colours."""
    content, place, packed = picture.read_bytes(), 8, b""
    while place < len(content):
        size, kind = struct.unpack(">I4s", content[place : place + 8])
        chunk = content[place + 8 : place + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
        packed += chunk if kind == b"IDAT" else b""
        place += 12 + size
    channels = {2: 3, 6: 4}[colour]
    assert (width, height, depth) == (900, 1400, 8)
    rows = _unfiltered(zlib.decompress(packed), width * channels, channels)
    pixels = [bytes(row[x : x + 3]) for row in rows[::7] for x in range(0, len(row), channels * 3)]
    assert len(set(pixels)) > 50
    return sum(map(sum, pixels)) / (3 * len(pixels))


def _unfiltered(data: bytes, stride: int, channels: int) -> list[bytearray]:
    rows = [bytearray(stride)]
    for start in range(0, len(data), stride + 1):
        line, above = bytearray(data[start + 1 : start + 1 + stride]), rows[-1]
        for i in range(stride if data[start] else 0):
            left, corner = (line[i - channels], above[i - channels]) if i >= channels else (0, 0)
            guess = left + above[i] - corner
            nearest = min((left, above[i], corner), key=lambda value: abs(guess - value))
            line[i] = (line[i] + (0, left, above[i], (left + above[i]) // 2, nearest)[data[start]]) & 255
        rows.append(line)
    return rows[1:]


def test_the_page_of_a_python_model_needs_no_name(tmp_path):
    trainer = make_trainer(model=make_llama(), output_dir=str(tmp_path / "run"))
    trainer.train()
    assert "LlamaForCausalLM" in Page(render(read_run(tmp_path / "run"))).words
