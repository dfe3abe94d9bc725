"""Memory before, during and after training: predicted, refused, rehearsed, compared, and explained where it ran out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from registry import ROWS, together
from test_architectures import SHAPES
from torch import Tensor, nn

import lowmem.cli
from lowmem import (
    EMA,
    ChunkedCrossEntropy,
    Compile,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    Quantization,
    RetryOnOOM,
    Stage,
    Strategy,
    Trainer,
    TrainingConfig,
    UserError,
)
from lowmem.batches import Cursor
from lowmem.config import DataConfig, ModelConfig
from lowmem.data import TokenizedDataset, tokenize
from lowmem.data.report import DataReport
from lowmem.memory import bound, dry_step, guard, segments
from lowmem.memory.comparison import MemoryComparison
from lowmem.memory.estimate import estimate
from lowmem.memory.free import free_memory
from lowmem.memory.meter import MemoryLedger
from lowmem.memory.out_of_memory import MemoryExhaustedError, explained_loading
from lowmem.memory.predict import record
from lowmem.memory.remedies import remedies
from lowmem.memory.subject import Subject
from lowmem.memory.twin import without_data
from lowmem.memory.worst_batch import longest_eval_batch, worst_batches, worst_batches_of
from lowmem.recipe import Recipe
from lowmem.report.page import write_report
from lowmem.report.read import read_run


def dataset(lengths: Any) -> TokenizedDataset:
    """Rows of these lengths; their tokens do not matter."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, none = np.zeros(int(offsets[-1]), np.int32), np.zeros(0, np.float32)
    return TokenizedDataset(ids, ids, offsets, none, np.zeros(len(offsets), np.int64), DataReport())


def tell(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """So much memory is free from here on."""
    monkeypatch.setattr(guard, "free_memory", lambda device: free)


# -- expandable segments ----------------------------------------------------------------------------------------------

CONF, OLDER = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
ON = "expandable_segments:True"


@pytest.mark.parametrize(
    ("before", "after", "used"),
    [
        ({}, {CONF: ON}, True),
        ({CONF: "max_split_size_mb:128"}, {CONF: f"max_split_size_mb:128,{ON}"}, True),
        ({OLDER: "max_split_size_mb:128,"}, {OLDER: f"max_split_size_mb:128,{ON}"}, True),
        ({CONF: "a:1", OLDER: "b:2"}, {CONF: f"a:1,{ON}", OLDER: f"b:2,{ON}"}, True),
        ({CONF: ON}, {CONF: ON}, True),
        ({CONF: "expandable_segments: False"}, {CONF: "expandable_segments: False"}, False),
        ({OLDER: "a:1,expandable_segments:False"}, {OLDER: "a:1,expandable_segments:False"}, False),
        ({CONF: "backend:cudaMallocAsync"}, {CONF: "backend:cudaMallocAsync"}, False),
        (
            {CONF: "roundup_power2_divisions:[256:1,512:2,>:4]"},
            {CONF: f"roundup_power2_divisions:[256:1,512:2,>:4],{ON}"},
            True,
        ),
    ],
)
def test_segments_are_switched_on_unless_the_user_decided(
    before: dict[str, str], after: dict[str, str], used: bool
) -> None:
    environment = dict(before)
    assert segments.turn_on(environment, supported=True) is used
    assert environment == after
    assert segments.will_be_used(environment, supported=True) is used
    segments.turn_on(environment, supported=True)
    assert environment == after


def test_segments_stay_off_where_the_platform_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    assert not segments.turn_on(environment, supported=False)
    assert not environment
    assert not segments.will_be_used({CONF: ON}, supported=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert not segments.platform_has_them()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(segments.platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert not segments.platform_has_them()


def test_a_trainer_switches_them_on_before_cuda_starts_or_says_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONF, raising=False)
    monkeypatch.delenv(OLDER, raising=False)
    monkeypatch.setattr(segments, "platform_has_them", lambda: True)
    run = make_trainer().run
    assert CONF not in segments.os.environ  # on a CPU there is nothing to set
    run.device = torch.device("cuda")
    for started in (True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda started=started: started)
        segments.prepare_allocator(run)
        assert segments.will_be_used() is not started
        assert len(run.all_notices) == 1
        assert "CUDA was started before" in run.all_notices[0]
    monkeypatch.delenv(CONF)


# -- the worst batch --------------------------------------------------------------------------------------------------


def test_c704_the_longest_batch_is_planned_for_not_the_average(tmp_path: Path) -> None:
    """C-704: 99 rows of 10 tokens and one of 200, batches of four."""
    (tmp_path / "config.json").write_text(json.dumps(make_llama().config.to_dict()))

    def predicted(lengths: list[int]) -> tuple[tuple[int, ...], int]:
        file = tmp_path / f"{len(lengths)}.jsonl"
        file.write_text("\n".join(json.dumps({"input_ids": [1] * n}) for n in lengths))
        training = TrainingConfig(batch_size=4, max_length=256)
        recipe = Recipe(ModelConfig(str(tmp_path)), DataConfig(train=str(file)), training)
        worst, _ = worst_batches_of(recipe)
        return worst.batches[0], estimate(recipe, lengths=worst.batches[0], band=False).peak_reserved_bytes

    with_it, bytes_with = predicted([10] * 99 + [200])
    without, bytes_without = predicted([10] * 99)
    assert sorted(with_it) == [10, 10, 10, 200]
    assert set(without) == {10}
    assert bytes_with > bytes_without


def test_the_candidates_come_from_the_real_order_of_all_epochs() -> None:
    lengths = np.random.default_rng(3).integers(5, 60, 103)
    rows = dataset(lengths)
    for training in (
        TrainingConfig(batch_size=4, num_train_epochs=2.5, max_length=64),
        TrainingConfig(batch_size=7, max_steps=9, max_length=64, shuffle=False),
        TrainingConfig(batch_size=200, max_length=64, num_train_epochs=3),
    ):
        cursor = Cursor(rows, training.batch_size, training.seed, training.shuffle)
        steps = cursor.total_steps(training.max_steps, training.num_train_epochs)
        batches = [
            tuple(len(sample["input_ids"]) for sample in batch)
            for batch, _ in zip(cursor.batches(), range(steps), strict=False)
        ]
        found = worst_batches(rows, training)
        assert all(sorted(batch) in [sorted(b) for b in batches] for batch in found.batches)
        assert max(map(max, found.batches)) == max(map(max, batches))
        assert max(map(sum, found.batches)) == max(map(sum, batches))
        assert max(len(b) * max(b) for b in found.batches) == max(len(b) * max(b) for b in batches)
        assert [tuple(sorted(lengths[n], reverse=True)) for n in found.rows] == found.batches


def test_a_million_rows_take_less_than_a_second() -> None:
    rows = dataset([1])
    rows.lengths = np.random.default_rng(0).integers(5, 2000, 1_000_000)
    start = time.process_time()
    found = worst_batches(rows, TrainingConfig(batch_size=16, max_length=2048))
    assert time.process_time() - start < 1
    assert max(map(max, found.batches)) == 1999
    # very many epochs: the longest rows, as if they came together
    many = worst_batches(rows, TrainingConfig(batch_size=16, max_length=2048, num_train_epochs=100))
    assert many.batches == [(1999,) * 16]
    assert "longest of 1,000,000 rows" in many.words


def test_of_a_stream_no_lengths_are_known() -> None:
    trainer = make_trainer(rows=iter(make_rows()))  # type: ignore[arg-type]
    found = worst_batches(trainer.train_dataset, trainer.training)
    assert found.batches == [(64,) * 4]
    assert not found.rows
    assert "stream" in found.words


def test_the_longest_evaluation_batch() -> None:
    assert longest_eval_batch(dataset([30, 5, 31, 6, 7]), 2) == (7, 30)  # by length: (5, 6), (7, 30), (31)
    assert longest_eval_batch(dataset([3]), 8) == (3,)


# -- the check before training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHAPES])
def test_the_bound_is_above_what_architectures_need(name: str) -> None:
    config: Any = SHAPES[name].build().config
    config.pad_token_id = None  # with one, GPT-2 looks for it in its input
    with torch.device("meta"):
        model = type(SHAPES[name].build())(config)
    most = bound.upper_bound(model, 4 * 200, 200)
    try:
        peak = estimate(Subject.of_module(model, TrainingConfig(batch_size=4, max_length=200), []), device="cpu")
    except Exception:  # experts look at their data
        assert SHAPES[name].experts
        return
    assert peak.peak_allocated_bytes < most - bound._WORKSPACES


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.id in ("adamw", "ema", "packing", "dora", "bf16-autocast", "nf4")]
)
def test_the_bound_is_above_what_strategies_need(row: Any) -> None:
    with torch.device("meta"):
        model = make_llama(hidden_size=128, intermediate_size=256, vocab_size=1024, attn_implementation="eager")
    training = TrainingConfig(batch_size=4, max_length=256)
    peak = record(model, training, together(row), "cpu", (256,) * 4).peak()[0]
    assert peak < bound.upper_bound(model, 4 * 256, 256) - bound._WORKSPACES


def folder_without_weights(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(make_llama(**config).config.to_dict()))
    return folder


def test_a_run_that_will_not_fit_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has no weights to load. What is recommended is predicted to fit."""
    model = folder_without_weights(tmp_path, num_hidden_layers=4)
    training = TrainingConfig(batch_size=4, max_length=64)

    def make(check: guard.MemoryCheck, *strategies: Strategy) -> Trainer:
        return Trainer(str(model), make_rows(), training=training, strategies=strategies, check_memory=check)

    with pytest.raises(UserError, match=r"no file|weights|safetensors"):
        make("off")
    whole = estimate(Subject.of_config(make_llama(num_hidden_layers=4).config, ModelConfig("x"), training, []),
                     lengths=(29,) * 4, device="cpu").peak_allocated_bytes  # fmt: skip
    tell(monkeypatch, whole // 2)
    with pytest.raises(UserError) as refused:
        make("refuse")
    text = str(refused.value)
    assert "this run will not fit" in text
    assert "--force" in text
    assert "activations" in text
    assert "4 rows of up to" in text
    assert "allocator slack" not in text
    line = next(line for line in text.splitlines() if "would fit with" in line)
    assert "gradient_checkpointing" in line
    assert "saves" in line
    tell(monkeypatch, 10 * whole)
    with pytest.raises(UserError, match=r"no file|weights|safetensors"):  # it fits, so it goes on
        make("refuse")


def test_remedies_are_exact_first_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = TrainingConfig(batch_size=4, max_length=128)
    run = Subject.of_module(make_llama(vocab_size=2048), numbers, [])
    rows = (128,) * 4
    before = estimate(run, lengths=rows, device="cpu").peak_allocated_bytes
    alone = remedies(run, rows, None, device="cpu")
    names = [remedy.added[0].name for remedy in alone]
    assert names[:2] == ["gradient_checkpointing", "chunked_cross_entropy"]
    assert "gradient_accumulation" in names
    assert not any(remedy.fits for remedy in alone)
    for remedy in alone[:2]:
        found = estimate(run.with_strategies(remedy.strategies), lengths=rows, device="cpu")
        assert remedy.needed == pytest.approx(found.peak_allocated_bytes, rel=0.01)
        assert before - remedy.saved == pytest.approx(remedy.needed, rel=0.01)
    least = min(remedy.needed for remedy in alone)
    last = remedies(run, rows, least - 1, device="cpu", needed=before)[-1]
    assert len(last.added) > 1
    assert last.fits
    assert " + " in last.words
    hopeless = remedies(run, rows, 1000, device="cpu", needed=before)
    assert hopeless
    assert not hopeless[-1].fits
    # what is there already is not offered again, and what conflicts never
    run = replace(run, training=replace(numbers, max_grad_norm=None))
    there = remedies(run.with_strategies([GradientCheckpointing(), LoRA(), OptimizerInBackward()]), rows, None,
                     device="cpu")  # fmt: skip
    assert not {r.added[0].name for r in there} & {"gradient_checkpointing", "lora", "gradient_accumulation"}


@pytest.mark.parametrize("there", [[], [GradientCheckpointing(every_n_layers=2)]], ids=["plain", "every second"])
def test_remedies_of_a_deep_model_are_told_by_its_first_layers(there: list[Strategy]) -> None:
    numbers = TrainingConfig(batch_size=2, max_length=64)
    config = make_llama(num_hidden_layers=15, vocab_size=512).config
    run = Subject.of_config(config, ModelConfig("deep"), numbers, there)
    for remedy in remedies(run, (64, 64), None, device="cpu")[:4]:
        whole = run.with_strategies(remedy.strategies).trace((64, 64), "cpu").peak()[0]
        assert remedy.needed == pytest.approx(whole, rel=0.01)


def test_warn_trains_with_a_notice_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction draws random numbers, too; they are not those of the run."""

    def run(check: guard.MemoryCheck) -> tuple[list[float], dict[str, Any]]:
        losses: list[float] = []
        trainer = Trainer(
            make_llama(), make_rows(), training=TrainingConfig(batch_size=4, max_steps=3, max_length=64),
            strategies=[LoRA(r=2, lora_dropout=0.2)], check_memory=check,
            observers=[lambda event: losses.append(event.metrics["loss"]) if event.kind == "step" else None],
        )  # fmt: skip
        return losses, trainer.train()

    tell(monkeypatch, 100_000)
    plain, _ = run("off")
    warned, result = run("warn")
    assert warned == plain
    assert any("predicted not to fit" in text for text in result["notices"])
    tell(monkeypatch, 64 * 2**20)
    assert not [text for text in run("refuse")[1]["notices"] if "memory" in text]


def test_what_cannot_be_predicted_gets_one_notice_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    class LooksAtData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_llama()
            self.config = self.inner.config  # type: ignore[assignment]

        def forward(self, input_ids: Tensor) -> Any:
            assert int(input_ids.max()) >= 0
            return self.inner(input_ids=input_ids)

    tell(monkeypatch, 1)
    numbers = TrainingConfig(batch_size=4, max_steps=2, max_length=64)
    for model, strategies in ((LooksAtData(), []), (make_llama(), [Compile(backend="eager")])):
        trainer = Trainer(model, make_rows(), training=numbers, strategies=strategies, check_memory="refuse")
        assert len(trainer.run.all_notices) == 1
        assert "not predicted" in trainer.run.all_notices[0]
    assert "compile" in trainer.run.all_notices[0]


def test_a_module_in_memory_is_predicted_by_a_twin_without_data() -> None:
    model = make_llama(tied=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    twin = without_data(model)
    assert all(t.is_meta for t in (*twin.parameters(), *twin.buffers()))
    assert len(list(twin.parameters())) == len(list(model.parameters()))  # a tied head stays tied
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    quantised = Trainer(make_llama(), make_rows(), training=TrainingConfig(max_length=64),
                        strategies=[Quantization(), LoRA()]).model  # fmt: skip
    state = next(p for p in quantised.parameters() if hasattr(p, "quant_state")).quant_state
    copied = next(p for p in without_data(quantised).parameters() if hasattr(p, "quant_state")).quant_state
    assert copied.absmax.is_meta
    assert copied is not state
    assert not state.absmax.is_meta


def test_free_memory_heeds_the_limit_of_a_container(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    without = free_memory(cpu, tmp_path)
    assert without > 2**20
    for name, text in (("memory.max", "5000000"), ("memory.current", "3000000"), ("memory.stat", "inactive_file 500")):
        (tmp_path / name).write_text(f"{text}\n")
    assert free_memory(cpu, tmp_path) == 2_000_500
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(free_memory(cpu, tmp_path) - without) < 2**30


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`lowmem train` in this process on a small model; returns the exit code."""
    make_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in make_rows(12)))
    (tmp_path / "x.yaml").write_text(
        "model: {name_or_path: model}\ndata: {train: rows.jsonl, eval: rows.jsonl}\n"
        "training: {batch_size: 2, max_steps: 6, max_length: 64, output_dir: out}\n"
    )
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lowmem", *arguments])
        with pytest.raises(SystemExit) as end:
            lowmem.cli.main()
        return int(end.value.code or 0)

    return command


def test_the_command_refuses_with_exit_code_2_and_force_trains(
    recipe: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(monkeypatch, 100_000)
    capsys.readouterr()  # what was shown while the model was written
    assert recipe("train", "x.yaml") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this run will not fit")
    assert len(error.splitlines()) >= 4
    assert "Traceback" not in error
    assert not Path("out").exists()
    assert recipe("train", "x.yaml", "--force") == 0
    shown = capsys.readouterr().out
    assert "predicted not to fit" in shown
    assert "measured" in shown
    assert recipe("estimate", "x.yaml", "--data", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    longest = sorted(len(row["input_ids"]) for row in make_rows(12))
    assert max(found["lengths"]) == longest[-1]
    assert found["eval_lengths"] == longest[:8]  # padded larger than the four longest
    assert "12 rows" in found["batch"]
    assert recipe("estimate", "x.yaml") == 0
    assert "batch_size rows of max_length" in capsys.readouterr().out


# -- the longest batch first ------------------------------------------------------------------------------------------


def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """As on a card, also here; the lengths of the batches that were run dry."""
    seen: list[list[int]] = []
    monkeypatch.setattr(
        "lowmem.bookkeeping.longest_batch_first", lambda trainer: seen.append(dry_step.run_dry(trainer))
    )
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: [LoRA(r=2, lora_dropout=0.3), GradientCheckpointing()],
        lambda: [MixedPrecision(dtype="float16"), EMA(decay=0.5)],
        lambda: [Packing(), ChunkedCrossEntropy(chunk_size=8)],
        lambda: [GradientAccumulation(), RetryOnOOM()],
    ],
    ids=["dropout", "float16", "packed", "split"],
)
def test_a_dry_step_changes_no_bit(make: Callable[[], list[Strategy]], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"eval_rows": make_rows(3), "shuffle": True, "max_steps": 4, "max_grad_norm": 1.0}
    plain = run_training(make(), **options)
    seen = rehearsed(monkeypatch)
    dry = run_training(make(), **options)
    assert max(seen[0]) == max(len(row["input_ids"]) for row in make_rows())
    for a, b in zip(plain.steps, dry.steps, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert all(torch.equal(plain.weights[name], dry.weights[name]) for name in plain.weights)
    assert plain.result["eval_loss"] == dry.result["eval_loss"]


def test_a_dry_step_puts_back_what_grows_with_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.longest = make_llama(), 0
            self.config = self.inner.config  # type: ignore[assignment]
            self.register_buffer("table", torch.zeros(1))

        def forward(self, input_ids: Tensor) -> Any:
            self.longest = max(self.longest, input_ids.shape[1])
            self.table = torch.ones(self.longest)
            self.inner.seen = True
            return self.inner(input_ids=input_ids)

    model = Grows()
    trainer = make_trainer(model=model)
    dry_step.run_dry(trainer)
    assert model.longest == 0
    assert model.table.shape == (1,)
    assert not hasattr(model.inner, "seen")
    assert all(p.grad is None for p in model.parameters())
    assert not trainer.guard.batch


def test_a_dry_step_of_a_stream_is_made_up_and_none_is_made_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(rows=iter(make_rows()))  # type: ignore[arg-type]
    assert dry_step.run_dry(trainer) == [64] * 4
    monkeypatch.setattr(dry_step, "run_dry", lambda trainer: pytest.fail("a dry step on a CPU"))
    dry_step.longest_batch_first(trainer)
    trainer = make_trainer([OptimizerInBackward()])
    trainer.device = torch.device("cuda")
    dry_step.longest_batch_first(trainer)  # its backward is the update


# -- measured beside predicted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategies",
    [
        list,
        lambda: [LoRA(r=4), GradientCheckpointing(), GradientAccumulation()],
        lambda: [EMA(), MixedPrecision()],
    ],
    ids=["plain", "three", "autocast"],
)
def test_measured_stands_beside_predicted(strategies: Callable[[], list[Strategy]], tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in make_rows()]  # every token is a target
    said: list[str] = []
    watch = lambda event: said.append(event.metrics["text"]) if event.kind == "status" else None  # noqa: E731
    result = run_training(strategies(), rows=rows, output_dir=str(tmp_path / "run"), shuffle=True,
                          observers=[MemoryLedger(), MemoryComparison(), watch]).result  # fmt: skip
    assert set(result["predicted_memory_ledger"]) == set(result["memory_ledger"])
    off = result["predicted_peak_live_bytes"] - result["peak_live_bytes"]
    # a checkpointed layer keeps a random state (5,056 bytes), which the measurement does not see
    assert abs(off) < 0.001 * result["peak_live_bytes"] + 5056 * 4
    written = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert written["device"] == "cpu"
    assert written["step"]["difference_percent"] == round(100 * off / result["peak_live_bytes"], 3)
    assert written["step"]["predicted"] == result["predicted_memory_ledger"]
    assert len(said) == 1
    assert "measured" in said[0]
    assert "predicted" in said[0]
    record = read_run(tmp_path / "run")
    assert record.memory == written
    page = write_report(tmp_path / "run").read_text()
    assert "The measured step, measured and predicted" in page


def test_one_step_alone_is_not_compared(tmp_path: Path) -> None:
    result = run_training(max_steps=1, observers=[MemoryLedger(), MemoryComparison()]).result
    assert "memory_ledger" in result
    assert "predicted_memory_ledger" not in result


# -- out of memory ----------------------------------------------------------------------------------------------------


class _Fails(torch.autograd.Function):
    """Passes a tensor on; memory runs out in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")


@dataclass
class RunsOut(Strategy):
    """Memory runs out in one place of the second step."""

    stage: ClassVar[Stage] = Stage.KERNEL
    where: str = "forward"

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        def failing(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            if run.device.type == "meta" or run.global_step < 1:
                return loss(model, inputs)
            if self.where == "forward" or (self.where == "evaluate" and not torch.is_grad_enabled()):
                torch.empty(2**60, dtype=torch.uint8)  # what the CPU's allocator says
            return _Fails.apply(loss(model, inputs)) if self.where == "backward" else loss(model, inputs)

        return failing

    def wrap_step(self, step: Any, run: Any) -> Any:
        def failing() -> None:
            if self.where == "step" and run.global_step >= 1 and run.device.type != "meta":
                raise MemoryError
            step()

        return failing


@pytest.mark.parametrize(
    ("where", "phase"),
    [("forward", "forward"), ("backward", "backward"), ("step", "the optimizer's step"), ("evaluate", "evaluation")],
)
def test_memory_that_runs_out_is_explained(where: str, phase: str) -> None:
    measured = where == "evaluate"
    observers = [MemoryLedger()] if measured else []
    trainer = make_trainer([RunsOut(where)], observers=observers, eval_rows=make_rows(3))
    with pytest.raises(MemoryExhaustedError) as error:
        trainer.train()
    assert isinstance(error.value, UserError)
    assert isinstance(error.value, MemoryError)
    first, held, *rest = str(error.value).splitlines()
    assert first.startswith(f"out of memory in {phase}, step {4 if measured else 2} (")
    assert f"{len(make_rows()[4:8])} rows of up to" in first
    assert "GPU 0" not in first
    assert "2**60" not in first
    assert ("measured step" in held) is measured
    assert "weights, trainable" in held
    assert "would help: " in rest[0]
    assert "gradient_checkpointing saves" in rest[0]
    assert "MiB" in rest[0]


def test_other_errors_stay_what_they_are_and_a_retry_is_left_to_its_strategy() -> None:
    def fail(event: Any) -> None:
        if event.kind == "step":
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        make_trainer(observers=[fail]).train()
    with pytest.raises(UserError, match="retry_on_oom: step 2") as error:
        make_trainer([RunsOut("forward"), RetryOnOOM()]).train()
    assert not isinstance(error.value, MemoryExhaustedError)


def test_memory_that_runs_out_while_loading_is_explained() -> None:
    def load_model() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    told = r"loading the model: CUDA out of memory\n  quantization"
    with pytest.raises(MemoryExhaustedError, match=told), explained_loading():
        load_model()
    with pytest.raises(ValueError, match="plain"), explained_loading():
        raise ValueError("plain")


def test_the_longest_batch_fails_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed(monkeypatch)

    def fails(trainer: Trainer) -> Any:
        def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            if inputs["input_ids"].shape[1] == 26:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return plain(model, inputs)

        plain, trainer.loss = trainer.loss, loss

    steps: list[int] = []
    trainer = make_trainer(observers=[lambda event: steps.append(1) if event.kind == "step" else None])
    fails(trainer)
    with pytest.raises(MemoryExhaustedError, match=r"out of memory in forward, step 1 \(4 rows of up to 26 tokens\)"):
        trainer.train()
    assert not steps


def test_tokenised_rows_are_what_the_trainer_reads() -> None:
    """The guard looks at the rows that were tokenised, cut ones included."""
    rows = tokenize([{"input_ids": [1] * 300}], None, max_length=64)
    assert worst_batches(rows, TrainingConfig(batch_size=1, max_length=64)).batches == [(64,)]
