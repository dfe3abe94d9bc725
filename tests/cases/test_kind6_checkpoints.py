"""Kind 6: checkpoints and resume."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from durable_jobs import assert_same, go_on, killed_between_files, limited, mid_epoch, one_step, outcome, train
from new_process import run as run_in_new_process
from new_process import with_peak
from resuming import DATA, Stopped, run, stop_after, with_losses

from cases.helpers import Log, SeeMicroBatches, llama, numbers, row, rows
from lowmem import AdamW8bit, GradientAccumulation, PureBF16, Trainer
from lowmem.checkpoint import checkpoints
from lowmem.durable import verify

# -- C-601 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "qlora_ema"])
def test_c601_interrupted_equals_uninterrupted_in_a_new_process(tmp_path, name):
    """Other strategies, in one process: test_resume.py."""
    log = tmp_path / "log"
    assert run_in_new_process(mid_epoch, tmp_path / "straight", name, None, log=log) == 0, log.read_text()
    assert run_in_new_process(mid_epoch, tmp_path / "run", name, 3, log=log) == 0, log.read_text()
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000003"]
    assert run_in_new_process(mid_epoch, tmp_path / "run", name, None, log=log) == 0, log.read_text()
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "straight"))


# -- C-602 ------------------------------------------------------------------------------------------------------------


def test_c602_every_row_is_seen_once(tmp_path):
    """The cursor counts rows, not micro-batches."""
    data = [row(i, i + 1, i + 2) for i in range(40)]

    def seen(folder, **options) -> list[int]:
        record = SeeMicroBatches()
        trainer = Trainer(
            llama(), train_dataset=data,
            training=numbers(max_steps=10, save_steps=3, output_dir=str(folder)),
            strategies=[GradientAccumulation(), record], observers=[stop_after(3)] if options.get("stop") else [],
        )  # fmt: skip
        with suppress(Stopped):
            trainer.train(resume_from=options.get("resume"))
        return [first for batch in record.first_tokens for first in batch]

    straight = seen(tmp_path / "straight")
    pieces = seen(tmp_path / "run", stop=True) + seen(tmp_path / "run", resume=True)
    assert pieces == straight
    assert sorted(pieces) == list(range(40))


# -- C-603 ------------------------------------------------------------------------------------------------------------


def test_c603_killed_while_saving(tmp_path):
    """After the model file and before the state of checkpoint 4: checkpoint 2 is taken, the rest swept."""
    assert run_in_new_process(killed_between_files, tmp_path / "run", "qlora_ema", 4) == -9
    left = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert left[:2] == ["checkpoint-000002", "checkpoint-000003"]
    assert left[2].startswith("checkpoint-000004.partial-")
    assert {p.name for p in (tmp_path / "run" / left[2]).iterdir()} >= {"adapter_model.safetensors"}
    assert not (tmp_path / "run" / left[2] / "optimizer.pt").exists()
    assert [p.name for p in checkpoints(tmp_path / "run")] == left[:2]
    log = tmp_path / "log"
    assert run_in_new_process(go_on, tmp_path / "run", "qlora_ema", log=log) == 0, log.read_text()
    assert f"resume: {left[2]} was left half-made by a process that is gone; it is removed" in log.read_text()
    assert run_in_new_process(train, tmp_path / "straight", "qlora_ema", log=log) == 0, log.read_text()
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "straight"))
    assert not list((tmp_path / "run").glob("*.partial-*"))


# -- C-604 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "kept"), [(1, [2, 5]), (2, [2, 5]), (3, [2, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_c604_the_best_and_the_newest_survive_the_limit(tmp_path, limit, kept):
    with_losses(tmp_path / "run", 3, 1, 2, 4, 5, save_total_limit=limit, metric_for_best_model="eval_loss")
    assert [p.name for p in checkpoints(tmp_path / "run")] == [f"checkpoint-{step:06d}" for step in kept]


# -- C-605 ------------------------------------------------------------------------------------------------------------

RECIPE = """\
model: {name_or_path: base}
data: {train: data.jsonl}
training: {batch_size: 4, max_steps: 6, learning_rate: 1e-3, max_length: 64, save_steps: 2, output_dir: out}
"""


def recipe(folder: Path) -> Path:
    llama().save_pretrained(folder / "base")
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows(12)), encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.mark.parametrize("file_bytes", [300_000, 500_000], ids=["model", "optimizer"])  # files: 362 KB and 724 KB
def test_c605_disk_full(tmp_path, monkeypatch, file_bytes):
    """From the second save on no file may grow that large: one line, exit code 2, the first checkpoint is whole."""
    monkeypatch.chdir(tmp_path)
    path, log = recipe(tmp_path), tmp_path / "log"
    assert run_in_new_process(limited, path, file_bytes, 4, log=log) == 2, log.read_text()
    text = log.read_text()
    assert "Traceback" not in text
    line = next(line for line in text.splitlines() if line.startswith("error: "))
    for word in ("out/checkpoint-000004 could not be written", "File too large", "bytes are free", "--resume"):
        assert word in line
    assert "it needs 1,085,268 bytes" in line  # 90,432 weights and two moments, 21 step counters, 4 bytes each
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-000002"]
    verify(tmp_path / "out" / "checkpoint-000002")
    assert not list((tmp_path / "out").glob("*.partial-*"))
    assert run_in_new_process(limited, path, 10**9, 99, "--resume", log=log) == 0, log.read_text()
    assert [p.name for p in checkpoints(tmp_path / "out")] == [f"checkpoint-00000{n}" for n in (2, 4, 6)]


# -- C-606 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategies", [[PureBF16()], [AdamW8bit()], [PureBF16(), AdamW8bit()]])
def test_c606_state_keeps_its_precision(tmp_path, strategies):
    """bfloat16 weights with float32 moments, and 8-bit moments: nothing is rounded to the weights' dtype."""
    before = run(tmp_path / "run", *strategies, stop=3)
    after = Trainer(
        llama(),
        train_dataset=DATA,
        training=numbers(max_steps=6, output_dir=str(tmp_path / "run")),
        strategies=[type(s)() for s in strategies],
    )
    after.load_checkpoint(tmp_path / "run" / "checkpoint-000003")
    dtypes, beyond_bf16 = set(), False
    for name, parameter in after.run.trainable.items():
        saved, loaded = before.optimizer.state[before.run.trainable[name]], after.optimizer.state[parameter]
        assert saved.keys() == loaded.keys()
        for key, value in saved.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == loaded[key].dtype
                assert torch.equal(value, loaded[key])
                dtypes.add(value.dtype)
                beyond_bf16 |= value.dtype == torch.float32 and not torch.equal(value, value.bfloat16().float())
            else:
                assert value == loaded[key]
    assert beyond_bf16
    assert dtypes == ({torch.float32, torch.uint8} if strategies[-1].name == "adamw_8bit" else {torch.float32})


# -- C-608 ------------------------------------------------------------------------------------------------------------


def test_c608_changed_numbers_are_announced_and_count(tmp_path):
    """C-608: the new rate and length apply from the next step on, and the run says so."""
    run(tmp_path / "run", stop=5, save_steps=5, max_steps=10, lr_scheduler_type="linear", warmup_steps=0)
    log = Log()
    resumed = run(
        tmp_path / "run", resume=True, save_steps=5, max_steps=20, lr_scheduler_type="linear", warmup_steps=0,
        learning_rate=1e-4, log=log,
    )  # fmt: skip
    assert log.all("step", "step") == list(range(6, 21))
    assert log.all("step", "learning_rate") == pytest.approx([1e-4 * (1 - step / 20) for step in range(5, 20)])
    told = set(resumed.result["notices"])
    assert "resume: training.learning_rate was 0.001 and is 0.0001 from here on" in told
    assert "resume: training.max_steps was 10 and is 20 from here on" in told
    assert len(told) == 2
    assert set(log.all("notice", "text")) == told


# -- C-703 ------------------------------------------------------------------------------------------------------------


def test_c703_resuming_fits_where_a_fresh_start_fits(tmp_path):
    """50 million weights, AdamW: the state is loaded piece by piece, never beside the live one."""
    peaks = {}
    for name, out, steps in (("fresh", "run", 1), ("resumed", "run", 2), ("straight", "other", 2)):
        log = tmp_path / "log"
        code = run_in_new_process(with_peak, tmp_path / name, one_step, tmp_path / out, steps, log=log)
        assert code == 0, log.read_text()
        peaks[name] = int((tmp_path / name).read_text())
    print(peaks)
    assert peaks["resumed"] <= 1.25 * peaks["fresh"]
    assert peaks["resumed"] <= 1.1 * peaks["straight"]  # the first step alone has no moments yet while it computes
