"""What a run notices by itself: values that are not finite, growing memory, empty adapters, a loss at a standstill."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from cases.helpers import ONE_TARGET, FactorOnLoss, Log, SlopeLoss, Weights, llama, numbers, rows, train, weights
from torch import nn

from lowmem import (
    EMA,
    AdamW8bit,
    GradientAccumulation,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Stage,
    Strategy,
    Trainer,
    TrainingConfig,
    UserError,
)
from lowmem.checkpoint import checkpoints
from lowmem.checks import NonFiniteError
from lowmem.memory.flat import MemoryWatch, resident, steady_growth
from lowmem.world import World

NAN, INF = float("nan"), float("inf")
FP16 = {"dtype": "float16"}


@dataclass
class BadGradient(Strategy):
    """Poisons the gradient of one tensor at chosen steps, while the loss stays fine."""

    stage: ClassVar[Stage] = Stage.OFFLOAD

    steps: tuple[int, ...] = ()
    value: float = NAN

    def wrap_model(self, model: nn.Module, run: Any) -> nn.Module:
        parameter = next(p for p in model.parameters() if p.requires_grad)

        def poisoned(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * self.value if run.global_step + 1 in self.steps else gradient

        parameter.register_hook(poisoned)
        return model


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


# -- stop -------------------------------------------------------------------------------------------------------------

PLACES: dict[str, list[Any]] = {
    "plain": [],
    "accumulation": [GradientAccumulation],
    "packing": [Packing],
    "ema": [EMA],
    "pure_bf16": [PureBF16],
    "8bit": [AdamW8bit],
    "lora": [LoRA],
}


@pytest.mark.parametrize("clipping", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", PLACES)
def test_c305_a_bad_gradient_behind_a_good_loss_stops_the_run(tmp_path, place, value, clipping):
    """Also without clipping, which looks at the norm anyway: the weights are those of the step before."""
    seen = []
    with pytest.raises(NonFiniteError, match=r"step 3: the gradient's norm is (nan|inf) \(loss \d.*not updated") as got:
        train(
            llama(), rows(16), BadGradient((3,), value), *(make() for make in PLACES[place]), max_grad_norm=clipping,
            observers=[lambda e: seen.append((e.kind, e.trainer, weights(e.trainer.model)))],
            max_steps=6, save_steps=1, output_dir=str(tmp_path / "run"),
        )  # fmt: skip
    assert not got.value.damaged
    _, trainer, last = [event for event in seen if event[0] == "step"][-1]
    assert all(torch.equal(w, last[n]) for n, w in weights(trainer.model).items())
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000001", "checkpoint-000002"]
    assert len((tmp_path / "run" / "nonfinite" / "step-000003.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("extra", [[], [PureBF16]], ids=["alone", "pure_bf16"])
def test_c305_in_backward_the_damage_is_told_and_kept_from_the_disk(tmp_path, extra):
    strategies = [BadGradient((3,)), OptimizerInBackward(), *(make() for make in extra)]
    text = r"step 3: the gradient's norm is nan .*are damaged. The last checkpoint is good"
    with pytest.raises(NonFiniteError, match=text) as got:
        train(llama(), rows(16), *strategies, max_steps=6, save_steps=1, output_dir=str(tmp_path / "run"))
    assert got.value.damaged
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000001", "checkpoint-000002"]
    kept = (tmp_path / "run" / "nonfinite" / "step-000003.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in kept] == [None] * 4  # nothing can be said with damaged weights
    again = Trainer(
        llama(), rows(16), strategies=[type(s)() for s in strategies],
        training=numbers(max_steps=6, save_steps=1, output_dir=str(tmp_path / "run")),
    )  # fmt: skip
    again.train(resume_from=True)
    assert all(torch.isfinite(w).all() for w in weights(again.model).values())


@pytest.mark.parametrize("extra", [[], [OptimizerInBackward]], ids=["at-the-step", "in-backward"])
def test_the_norm_is_logged_without_clipping(extra):
    log = Log()
    model = Weights(torch.ones(4))
    train(model, ONE_TARGET, SlopeLoss(0.5), *(make() for make in extra), batch_size=1, observers=[log])
    assert log.all("step", "grad_norm") == pytest.approx([1.0] * 3)  # four slopes of 0.5


# -- skip -------------------------------------------------------------------------------------------------------------


def ten_steps(folder: Path | None, *strategies: Strategy, data: Any = None, log: Any = None, **changes: Any) -> Trainer:
    changes = {"on_nonfinite": "skip", "max_steps": 6, "shuffle": False, "lr_scheduler_type": "linear", **changes}
    return train(
        llama(), rows(24) if data is None else data, *strategies, observers=[log] if log else [],
        output_dir=str(folder) if folder else None, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["plain", "accumulation", "ema", "lora", "8bit"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_c305_a_step_left_out_is_as_if_it_had_not_been(tmp_path, bad, place):
    """Weights, averages and schedule are those of a run over the other batches alone; the log shows the step."""
    poison = FactorOnLoss({3: NAN}) if bad == "loss" else BadGradient((3,))
    log = Log()
    skipped = ten_steps(tmp_path / "run", poison, *(make() for make in PLACES[place]), log=log, max_grad_norm=1.0)
    assert log.all("step", "nonfinite") == [None, None, True, None, None, None]
    assert log.all("step", "skipped") == [None, None, True, None, None, None]
    assert log.all("step", "learning_rate")[3] == log.all("step", "learning_rate")[2]  # the schedule stood still
    assert all(torch.isfinite(w).all() for w in weights(skipped.model).values())
    data = rows(24)

    def enough(event: Any) -> None:
        if event.kind == "step" and event.metrics["step"] == 5:
            event.trainer.run.stopped = "enough"

    shorter = Trainer(
        llama(), data[:8] + data[12:], strategies=[make() for make in PLACES[place]], observers=[enough],
        training=numbers(max_steps=6, shuffle=False, lr_scheduler_type="linear", max_grad_norm=1.0),
    )  # fmt: skip
    shorter.train()
    assert all(torch.equal(w, weights(shorter.model)[n]) for n, w in weights(skipped.model).items())
    for one, other in zip([s for s in skipped.strategies if s is not poison], shorter.strategies, strict=True):
        assert str(one.state_dict()) == str(other.state_dict())
    (line,) = lines(tmp_path / "run", "nonfinite")
    assert line["step"] == 3
    assert line["nonfinite"] is line["skipped"] is True
    assert skipped.result["nonfinite_steps"] == 1
    assert math.isfinite(skipped.result["train_loss"])
    (notice,) = skipped.result["notices"]
    assert notice.startswith("step 3: the ")
    assert str(tmp_path / "run" / "nonfinite" / "step-000003.jsonl") in notice


def test_the_row_that_did_it_can_be_told(tmp_path):
    """Only one row of the batch is bad; its loss alone shows it, and its text is there."""

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    @dataclass
    class BadToken(Strategy):
        stage: ClassVar[Stage] = Stage.OFFLOAD

        def wrap_loss(self, loss: Any, run: Any) -> Any:
            return lambda model, inputs: loss(model, inputs) * (NAN if (inputs["input_ids"] == 127).any() else 1)

    data = rows(8, vocabulary=120)
    data[6] = {"input_ids": [5, 127, 9], "labels": [-100, 127, 9]}
    trainer = Trainer(
        llama(), data, tokenizer=Tokenizer(), strategies=[BadToken(), GradientAccumulation()],
        training=numbers(max_steps=2, shuffle=False, on_nonfinite="skip", output_dir=str(tmp_path / "run")),
    )  # fmt: skip
    trainer.save_model = lambda folder: folder  # type: ignore[method-assign]  # the stand-in cannot be saved
    trainer.train()
    kept = [json.loads(t) for t in (tmp_path / "run" / "nonfinite" / "step-000002.jsonl").read_text().splitlines()]
    assert [line["row"] for line in kept] == [0, 1, 2, 3]
    assert [line["input_ids"] for line in kept] == [row["input_ids"] for row in data[4:]]
    assert kept[2] == {"row": 2, "input_ids": [5, 127, 9], "labels": [-100, 127, 9], "text": "5 127 9", "loss": "nan"}
    assert all(isinstance(kept[i]["loss"], float) for i in (0, 1, 3))
    assert trainer.model.training is False


def test_the_bound_counts_steps_in_a_row():
    apart = FactorOnLoss(dict.fromkeys((1, 2, 4, 5), NAN))
    assert ten_steps(None, apart, max_nonfinite_steps=2).result["nonfinite_steps"] == 4
    log = Log()
    with pytest.raises(NonFiniteError, match=r"step 4: .*training.max_nonfinite_steps: 2 steps in a row"):
        ten_steps(None, FactorOnLoss(dict.fromkeys((2, 3, 4), NAN)), max_nonfinite_steps=2, log=log)
    assert log.all("step", "step") == [1, 2, 3]
    with pytest.raises(NonFiniteError, match=r"step 6: .*max_nonfinite_steps: 5 steps"):
        ten_steps(None, FactorOnLoss(dict.fromkeys(range(1, 9), NAN)), max_steps=8)


def test_the_count_survives_a_resume(tmp_path):
    ten_steps(tmp_path / "run", FactorOnLoss({2: NAN}), save_steps=3, max_steps=3)
    second = Trainer(
        llama(), rows(24), strategies=[FactorOnLoss({2: NAN})],
        training=numbers(
            on_nonfinite="skip", shuffle=False, save_steps=3, output_dir=str(tmp_path / "run"), max_steps=6
        ),
    )  # fmt: skip
    assert second.train(resume_from=True)["nonfinite_steps"] == 1


def test_float16_overflow_is_the_scaler_s_business_but_not_for_ever():
    log = Log()
    ten_steps(None, MixedPrecision(**FP16), FactorOnLoss({3: INF}), log=log)
    assert log.all("step", "skipped") == [False, False, True, False, False, False]
    assert log.all("step", "nonfinite") == [None] * 6
    with pytest.raises(NonFiniteError, match=r"step 8: 6 steps in a row were skipped, and the loss is NaN"):
        ten_steps(None, MixedPrecision(**FP16), FactorOnLoss(dict.fromkeys(range(3, 99), NAN)), max_steps=20)
    with pytest.raises(NonFiniteError, match=r"step 51: 51 steps in a row .*gradients overflow at any scale"):
        ten_steps(None, MixedPrecision(**FP16), BadGradient(tuple(range(1, 99))), max_steps=60)


def test_a_loss_that_only_looks_bad_leaves_the_scaler_usable():
    """An infinite constant has finite gradients: the scaler lets the step through, and the guard leaves it out."""

    @dataclass
    class Constant(Strategy):
        stage: ClassVar[Stage] = Stage.OFFLOAD

        def wrap_loss(self, loss: Any, run: Any) -> Any:
            return lambda model, inputs: loss(model, inputs) + (INF if run.global_step in (1, 2) else 0.0)

    log = Log()
    ten_steps(None, MixedPrecision(**FP16), Constant(), log=log)
    assert log.all("step", "nonfinite") == [None, True, True, None, None, None]


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(UserError, match=r"optimizer_in_backward: training.on_nonfinite: skip cannot be honoured"):
        ten_steps(None, OptimizerInBackward())
    with pytest.raises(UserError, match="max_nonfinite_steps: has no effect without on_nonfinite: skip"):
        TrainingConfig(max_nonfinite_steps=3)
    with pytest.raises(UserError, match="max_nonfinite_steps: must be above 0"):
        TrainingConfig(on_nonfinite="skip", max_nonfinite_steps=0)


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass
class Spoils(Strategy):
    """After the update of one step, a weight is not finite: an optimizer that overflows."""

    stage: ClassVar[Stage] = Stage.ROUNDING

    at: int = 3

    def wrap_step(self, step: Any, run: Any) -> Any:
        def spoilt() -> None:
            step()
            if run.global_step + 1 == self.at:
                run.trainable["model.norm.weight"].data[7] = INF

        return spoilt


@pytest.mark.parametrize("when", ["save", "evaluate", "end"])
def test_damaged_weights_are_neither_evaluated_nor_saved(tmp_path, when):
    numbers_of = {"save": {"save_steps": 3}, "evaluate": {"eval_steps": 3}, "end": {"max_steps": 3}}[when]
    trainer = Trainer(
        llama(), rows(24), rows(4) if when == "evaluate" else None, strategies=[Spoils()],
        training=numbers(**{"max_steps": 9, "output_dir": str(tmp_path / "run"), **numbers_of}),
    )  # fmt: skip
    with pytest.raises(
        NonFiniteError, match=r"step 3: NaN or infinite weights in 1 .*model.norm.weight.*nothing was s"
    ):
        trainer.train()
    assert not checkpoints(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_float16_weights_of_any_size_are_finite():
    """The norm of these would overflow; they themselves do not."""
    from lowmem.checks import require_finite_weights

    large = nn.Parameter(torch.full((64, 64), 60000.0, dtype=torch.float16))
    run = SimpleNamespace(trainable={"w": large}, world=World())
    require_finite_weights(run)  # type: ignore[arg-type]


def test_an_adapter_without_gradients_is_no_result(tmp_path):
    """Weight decay moves lora_A, so a weight has moved; but the adapter adds nothing, and the run says so."""

    @dataclass
    class OnlyDecay(Strategy):
        stage: ClassVar[Stage] = Stage.CLIP

        def wrap_step(self, step: Any, run: Any) -> Any:
            def without() -> None:
                for parameter in run.trainable.values():
                    parameter.grad = torch.zeros_like(parameter)
                step()

            return without

    with pytest.raises(UserError, match=r"step 3: all 14 adapters are empty .*nothing was saved"):
        train(
            llama(), rows(24), LoRA(r=4), OnlyDecay(), weight_decay=0.1, learning_rate=0.1, save_steps=3, max_steps=6,
            output_dir=str(tmp_path / "run"),
        )  # fmt: skip
    assert not checkpoints(tmp_path / "run")


def test_a_warm_up_leaves_an_adapter_empty_and_is_no_fault(tmp_path):
    trainer = train(llama(), rows(24), LoRA(r=4), warmup_steps=3, save_steps=1, max_steps=3, output_dir=str(tmp_path))
    assert trainer.result["notices"] == []


def test_tensors_that_no_gradient_reaches_are_named():
    model = llama()
    model.unused = nn.Parameter(torch.ones(3))
    (notice,) = train(model, rows(24), max_steps=12).result["notices"]
    assert notice.startswith("1 of 22 trained tensors are as they were 12 steps ago (unused): no gradient reaches them")
    assert train(llama(), rows(24), LoRA(r=4), max_steps=12).result["notices"] == []


# -- memory -----------------------------------------------------------------------------------------------------------

MIB, LEAST = 1024**2, 48 * 1024**2


def series(grow: Any, number: int = 60, every: int = 10) -> list[tuple[int, int]]:
    return [(i * every, int(1024 * MIB + grow(i))) for i in range(1, number + 1)]


def noise(size: float) -> Any:
    draw = random.Random(0)
    return lambda: draw.uniform(0, size)


some, much = noise(8 * MIB), noise(80 * MIB)
FLAT = {
    "flat": lambda i: 0,
    "noise": lambda i: much(),
    "the-first-steps": lambda i: 500 * MIB * (1 - math.exp(-i / 2)),
    "one-evaluation": lambda i: 300 * MIB * (i > 30) + some(),
    "two-jumps": lambda i: 300 * MIB * ((i > 20) + (i > 45)) + some(),
    "longer-rows": lambda i: 200 * MIB * math.log(i) + some(),  # the longest of i random rows
    "saw": lambda i: 100 * MIB * (i % 7),
    "shrinks": lambda i: -5 * MIB * i,
    "little": lambda i: 0.5 * MIB * i,
}
LEAKS = {
    "plain": (lambda i: 10 * MIB * i, MIB),
    "in-noise": (lambda i: 20 * MIB * i + much(), 2 * MIB),
    "after-a-jump": (lambda i: 300 * MIB * (i > 3) + 10 * MIB * i + some(), MIB),
    "with-evaluations": (lambda i: 10 * MIB * i + 60 * MIB * (i % 5 == 0), MIB),
}


@pytest.mark.parametrize("case", FLAT)
def test_memory_that_is_flat_in_the_long_run_is_no_leak(case):
    points = series(FLAT[case])
    assert not [n for n in range(len(points)) if steady_growth(points[:n], LEAST)]


@pytest.mark.parametrize("case", LEAKS)
def test_a_leak_is_found_and_its_size_is_right(case):
    grow, size = LEAKS[case]
    points = series(grow)
    found = [slope for n in range(len(points) + 1) if (slope := steady_growth(points[:n], LEAST))]
    assert found[0] == pytest.approx(size, rel=0.35)


def test_points_span_the_whole_run_however_long():
    run: Any = SimpleNamespace(device=torch.device("cpu"), notice=lambda text: notices.append(text))
    notices: list[str] = []
    steps = iter(range(10, 10**6, 10))
    watch = MemoryWatch(run, lambda: 1024 * MIB)
    for _ in range(5000):
        watch.look(next(steps))
    assert len(watch.points) < 64
    assert watch.points[0][0] == 10
    assert watch.points[-1][0] > 40_000
    now = 0
    watch = MemoryWatch(run, lambda: 1024 * MIB + 4096 * now)  # 4 KiB a step: invisible in any short stretch
    for now in range(10, 100_000, 10):
        watch.look(now)
    assert len(notices) == 1
    assert "memory grows by about 4,096 bytes a step" in notices[0]


@dataclass
class Leaks(Strategy):
    """Keeps a megabyte and more of every step."""

    stage: ClassVar[Stage] = Stage.OFFLOAD

    size: int = 6 * MIB
    kept: list[torch.Tensor] = field(default_factory=list, init=False)

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        def leaking(model: nn.Module, inputs: Any) -> Any:
            self.kept.append(torch.ones(self.size, dtype=torch.uint8))
            return loss(model, inputs)

        return leaking


@pytest.mark.parametrize("leaks", [True, False])
def test_an_injected_leak_is_told_once(leaks):
    """The process's own memory, with evaluations in between; without the leak there is no notice."""
    trainer = Trainer(
        llama(), rows(24), rows(8, seed=1), strategies=[Leaks(6 * MIB if leaks else 1)],
        training=numbers(max_steps=40, eval_steps=7),
    )  # fmt: skip
    trainer.train()
    told = [n for n in trainer.result["notices"] if n.startswith("memory grows")]
    assert len(told) == leaks
    if leaks:
        slope = int(told[0].split("about ")[1].split(" bytes")[0].replace(",", ""))
        assert slope == pytest.approx(6 * MIB, rel=0.35)


def test_mapped_files_are_no_growth(tmp_path):
    (tmp_path / "data").write_bytes(bytes(64 * MIB))
    before = resident()
    mapped = torch.from_file(str(tmp_path / "data"), size=64 * MIB, dtype=torch.uint8)
    assert int(mapped.sum()) == 0
    assert resident() - before < 16 * MIB


# -- early stopping ---------------------------------------------------------------------------------------------------


def with_losses(folder: Path | None, *series: float, resume: bool = False, steps: int = 9, **changes: Any) -> Trainer:
    """A run whose evaluations, one a step, give these losses."""
    trainer = Trainer(
        llama(), rows(40), rows(2),
        training=numbers(
            **{"max_steps": steps, "eval_steps": 1, "early_stopping_patience": 2, **changes},
            output_dir=str(folder) if folder else None, save_steps=1 if folder else None,
        ),
    )  # fmt: skip
    left = list(series)
    trainer.evaluate = lambda dataset=None: {"eval_loss": left.pop(0), "eval_tokens": 1}  # type: ignore[method-assign]
    trainer.train(resume_from=resume or None)
    return trainer


@pytest.mark.parametrize(
    ("series", "settings", "end"),
    [
        ((3, 2, 2.5, 2.1), {}, 4),
        ((3, 2, 2.5, 1.9, 2, 2), {}, 6),
        ((3, 2.95, 2.9, 2.5), {"early_stopping_threshold": 0.1}, 3),
        ((3, 2.85, 2.7, 2.7, 2.7), {"early_stopping_threshold": 0.1}, 5),
        ((3, NAN, NAN), {}, 3),
        ((NAN, INF), {}, 2),
        ((3, 3), {"early_stopping_patience": 1}, 2),
        ((9, 8, 7, 6, 5, 4, 3, 2, 1), {}, 9),
        ((9, 8, 7, 6, 5, 4, 3, 4, 4), {}, 9),  # the last step would have been the last anyway
    ],
)
def test_a_run_ends_when_the_loss_no_longer_falls(series, settings, end):
    trainer = with_losses(None, *series, **settings)
    assert trainer.run.global_step == end
    assert (trainer.result["stopped"] is not None) == (end < 9)
    if end < 9:
        assert trainer.result["stopped"].startswith("early stopping: eval_loss has not fallen")


def test_the_reason_and_the_best_are_kept(tmp_path):
    trainer = with_losses(
        tmp_path / "run", 3, 1, 2, 4, load_best_model_at_end=True, save_total_limit=1, metric_for_best_model="eval_loss"
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    why = "early stopping: eval_loss has not fallen in 2 evaluations in a row (the lowest is 1 at step 2)"
    assert result["stopped"] == trainer.run.stopped == why
    assert (result["steps"], result["eval_loss"]) == (4, 1)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-000002", "checkpoint-000004"]
    from safetensors.torch import load_file

    best = load_file(tmp_path / "run" / "checkpoint-000002" / "model.safetensors")
    assert all(torch.equal(w, best[n]) for n, w in load_file(tmp_path / "run/model/model.safetensors").items())


def test_the_step_that_ends_a_run_is_saved(tmp_path):
    """Between two saves, too; and it may be the best of the saved ones."""
    trainer = with_losses(tmp_path / "run", 3, 2.95, 2.9, early_stopping_threshold=0.5, load_best_model_at_end=False)
    assert [p.name for p in checkpoints(tmp_path / "run")][-1] == "checkpoint-000003"
    assert trainer.books.best == (2.9, 3)


def test_patience_survives_a_resume(tmp_path):
    first = with_losses(tmp_path / "run", 3, 2, 2.5, steps=3)
    assert first.result["stopped"] is None
    second = with_losses(tmp_path / "run", 2.4, resume=True, steps=9)
    assert second.run.global_step == 4
    assert "lowest is 2 at step 2" in second.result["stopped"]
    third = with_losses(tmp_path / "run", resume=True, steps=9)  # it has ended, and says so again
    assert (third.run.global_step, third.result["stopped"]) == (4, second.result["stopped"])
    more = with_losses(tmp_path / "run", 2.4, 2.4, resume=True, steps=9, early_stopping_patience=4)
    assert more.run.global_step == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"early_stopping_threshold": 0.1}, "has no effect without early_stopping_patience"),
        ({"early_stopping_patience": 2}, "needs eval_steps"),
        ({"early_stopping_patience": 0, "eval_steps": 1}, "early_stopping_patience: must be above 0"),
        ({"early_stopping_patience": 2, "eval_steps": 1, "early_stopping_threshold": -1.0}, "not negative"),
    ],
)
def test_settings_of_early_stopping(settings, words):
    with pytest.raises(UserError, match=words):
        TrainingConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"early_stopping_patience": 2}, {"load_best_model_at_end": True, "save_steps": 1}], ids=str
)
def test_evaluations_need_eval_data(settings):
    with pytest.raises(UserError, match=r"training.eval_steps: there is no eval data"):
        train(llama(), rows(4), eval_steps=1, **settings)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match=r"warmup_steps: 9 are more than the 3 steps"):
        train(llama(), rows(4), warmup_steps=9, max_steps=3)
