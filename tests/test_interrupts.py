"""Ctrl-C and SIGTERM from Python: the step is finished, what there is is saved, handlers are put back."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
from cases.helpers import Log, rows
from resuming import assert_equal_runs, run

from lowmem import LoRA
from lowmem.checkpoint import checkpoints
from lowmem.interrupts import Interrupted, Terminated

ACTIVE = [LoRA(r=4, lora_dropout=0.3)]


@pytest.fixture(autouse=True)
def handlers():
    """As in a shell's foreground, and the same afterwards."""
    before = {n: signal.signal(n, h) for n, h in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, 0))}
    here = {n: signal.getsignal(n) for n in before}
    yield
    assert {n: signal.getsignal(n) for n in before} == here
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_at(step: int, *numbers: int, kind: str = "step"):
    """An observer that stands for a user: signals in the middle of what follows a step."""

    def observer(event) -> None:
        if event.kind == kind and event.metrics["step"] == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    return observer


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_saves_and_the_run_goes_on(tmp_path, number, kind):
    """Also where save_steps is null."""
    straight = run(None, *ACTIVE)
    with pytest.raises(kind) as caught:
        run(tmp_path / "run", *ACTIVE, log=raise_at(2, number), save_steps=None)
    assert f"interrupted at step 2 of 6; saved {tmp_path / 'run' / 'checkpoint-000002'}; go on" in str(caught.value)
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped"] == f"interrupted by {number.name}"
    assert result["steps"] == 2
    assert not (tmp_path / "run" / "model").exists()
    resumed = run(tmp_path / "run", *ACTIVE, resume=True, save_steps=None)
    assert_equal_runs(straight, resumed)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped"] is None


def test_the_same_trainer_goes_on(tmp_path):
    """As in a notebook: interrupted, then trained again."""
    straight = run(None, *ACTIVE)
    trainers = []
    with pytest.raises(Interrupted):
        run(tmp_path / "run", *ACTIVE, log=lambda event: (trainers.append(event.trainer), raise_at(2, 2)(event)))
    trainers[0].train(resume_from=True)
    assert_equal_runs(straight, trainers[0])


def test_a_second_signal_ends_at_once(tmp_path):
    with pytest.raises(Interrupted, match="stopped at once"):
        run(tmp_path / "run", log=raise_at(4, signal.SIGINT, signal.SIGINT), save_steps=3)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000003"]
    assert not (tmp_path / "run" / "result.json").exists()


def test_without_an_output_dir_the_message_says_so():
    with pytest.raises(Interrupted, match=r"step 2 of 6; nothing is saved, as training\.output_dir is null"):
        run(None, log=raise_at(2, signal.SIGINT))


def test_in_the_last_step_the_run_is_complete(tmp_path):
    with pytest.raises(Interrupted, match="it is complete"):
        run(tmp_path / "run", log=raise_at(6, signal.SIGINT))
    assert (tmp_path / "run" / "model").is_dir()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped"] is None


def test_an_evaluation_is_cut_short_and_made_up_for(tmp_path):
    """The signal comes during the evaluation of step 2: no number of half the rows; when the run goes on, all of it."""
    data = {"eval_data": rows(5, seed=1), "eval_steps": 2, "eval_batch_size": 1}
    straight, pieces = Log(), Log()
    run(None, *ACTIVE, log=straight, **data)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", *ACTIVE, log=lambda e: (pieces(e), raise_at(2, 2, kind="log")(e)), **data)
    assert pieces.all("evaluate", "step") == []
    run(tmp_path / "run", *ACTIVE, log=pieces, resume=True, **data)
    for key in ("step", "eval_loss"):
        assert pieces.all("evaluate", key) == straight.all("evaluate", key)


def test_other_threads_and_ignored_signals_are_left_alone(tmp_path):
    seen = []

    def look(event) -> None:
        if event.kind == "step":
            seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    thread = threading.Thread(target=run, args=(None,), kwargs={"log": look, "max_steps": 1})
    thread.start()
    thread.join()
    assert seen == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(None, log=look, max_steps=1)
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert seen[1][0] == signal.SIG_IGN
    assert seen[1][1] not in (signal.SIG_DFL, signal.SIG_IGN)


def test_handlers_are_put_back_after_an_error(tmp_path):
    """What the fixture checks; the error itself is not hidden by a signal that came before it."""

    def fail(event) -> None:
        if event.kind == "step" and event.metrics["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", log=fail)
