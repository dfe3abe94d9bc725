from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem.console import Console, memory_now
from lowmem.observers import Event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(file: io.StringIO, events: list[tuple[str, dict[str, Any]]], **options: Any) -> str:
    console = Console(file, **options)
    for kind, metrics in events:
        console(Event(kind, SimpleNamespace(), metrics))  # type: ignore[arg-type]
    console.close()
    return file.getvalue()


def steps(number: int, every: int) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = [("begin", {"step": 0, "total_steps": number})]
    for step in range(1, number + 1):
        metrics = {"step": step, "loss": 2.0, "learning_rate": 1e-4, "tokens": 100 * step, "seconds": 0.5 * step}
        events.append(("step", metrics))
        if step % every == 0:
            events.append(("log", {**metrics, "loss": 1.5, "tokens_per_second": 200.0}))
    return events


END = {
    "step": 30,
    "seconds": 75.0,
    "train_loss": 1.25,
    "peak_bytes": 3 * 1024**3,
    "exact_match_before": 0.05,
    "exact_match_after": 0.925,
    "samples": [
        {"prompt": "x " * 400 + "the question\n?", "reference": "right", "before": "wrong [bold]", "after": "right"},
        *[{"prompt": f"p{i}", "reference": "r", "before": "b", "after": "a"} for i in range(4)],
    ],
    "output_dir": "/runs/한글",
}


def test_a_log_file_gets_one_line_per_log_event():
    text = show(io.StringIO(), steps(30, 10))
    assert "\r" not in text
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "training: 30 steps"
    assert len(lines) == 1 + 3
    assert lines[1].startswith("step 10/30  loss 1.5000  200 tokens/s  ")
    assert "ETA 0:10" in lines[1]  # 5 s for 10 of 30 steps
    assert memory_now()[0] in lines[1]
    assert "GiB" in lines[1]


def test_after_a_resume_the_time_left_counts_the_steps_of_this_process():
    log = ("log", {"step": 90, "loss": 1.0, "seconds": 20.0})
    text = show(io.StringIO(), [("begin", {"step": 80, "total_steps": 100}), log])
    assert text.startswith("training: step 80 of 100\n")
    assert "ETA 0:20" in text


def test_long_lines_are_not_wrapped():
    text = show(io.StringIO(), [("notice", {"text": "word " * 100})])
    assert text.count("\n") == 1


def test_a_terminal_gets_one_bar_and_no_log_lines():
    text = show(Terminal(), [*steps(4, 1), ("evaluate", {"step": 4, "eval_loss": 1.0}), ("end", END)], terminal=True)
    assert "\x1b[" in text
    assert "4/4" in text
    assert "tokens/s" in text
    assert "ETA" in text
    assert "lr 0.0001" not in text
    assert "step 4  evaluation: loss 1.0000" in text


def test_the_bar_is_taken_down_after_an_error():
    file = Terminal()
    console = Console(file, terminal=True)
    console(Event("begin", SimpleNamespace(), {"step": 0, "total_steps": 5}))  # type: ignore[arg-type]
    console.close()
    console.close()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_the_report_comes_in_order():
    text = show(io.StringIO(), [("end", END)])
    parts = [
        "done: 30 steps in 1:15, train loss 1.2500, peak 3.00 GiB",
        "exact match: 5.0 % before, 92.5 % after",
        "sample 1",
        "wrong [bold]",
        "sample 3",
        "run: /runs/한글",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "sample 4" not in text
    prompt = next(line for line in text.splitlines() if "the question ?" in line)
    assert prompt.startswith("  prompt:    ...")
    assert len(prompt) < 150


def test_a_run_without_samples_or_folder_ends_with_its_summary():
    assert show(io.StringIO(), [("end", {"step": 2, "seconds": 4000})]) == "done: 2 steps in 1:06:40\n"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        ("ledger", {"rows": {"weights": 2 * 1024**3, "gradients": 1024**3}, "peak_bytes": 3 * 1024**3}),
        ("begin", {"ledger": [("weights", 2 * 1024**3), ("gradients", 1024**3)], "step": 0, "total_steps": 1}),
    ],
)
def test_the_ledger_names_categories_and_total(event, live):
    text = show(Terminal() if live else io.StringIO(), [event], terminal=live)
    assert "memory (GiB = 1024^3 bytes)" in text
    places = [text.index(part) for part in ("memory", "weights", "2.000", "gradients", "1.000", "total", "3.000")]
    assert places == sorted(places)


def test_saves_notices_and_evaluations_are_lines():
    events = [
        ("save", {"step": 5, "path": "/runs/x/checkpoint-000005"}),
        ("notice", {"text": "paged: no CUDA here"}),
        ("evaluate", {"step": 5, "eval_loss": 0.5, "eval_tokens": 7, "eval_seconds": 1.26}),
        ("status", {"text": "answering 120 prompts"}),
        ("data", {"split": "train", "lines": ["1,000 rows", "3 truncated"]}),
        ("finish", {}),
    ]
    assert show(io.StringIO(), events).splitlines() == [
        "step 5  saved: /runs/x/checkpoint-000005",
        "notice: paged: no CUDA here",
        "step 5  evaluation: loss 0.5000, 7 tokens, 1.3 s",
        "answering 120 prompts",
        "train: 1,000 rows",
        "train: 3 truncated",
    ]
