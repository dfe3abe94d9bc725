"""RetryOnOOM: a pass in which memory runs out is run again in smaller pieces, and the weights stay the same.

The failures are real errors of torch's CPU allocator (an allocation of 2**60 bytes), at places chosen by the test.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import Trained, make_llama, make_rows, make_trainer, run_training
from torch import Tensor, nn

from lowmem import (
    EMA,
    AdamW,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    RetryOnOOM,
    Stage,
    Strategy,
    Trainer,
    UserError,
)
from lowmem.strategies.retry_on_oom import is_out_of_memory


def allocator() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def card() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has ...")


def python() -> None:
    raise MemoryError


class _BreaksInBackward(torch.autograd.Function):
    """Passes a tensor on; its backward calls `fail`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return gradient, None


@dataclass
class SmallMemory(Strategy):
    """Memory runs out in every micro-batch of `limit` tokens (padding included) or more, in the middle of the model.

    In backward, it does so when the upper layer has its gradients already.
    """

    stage: ClassVar[Stage] = Stage.OFFLOAD

    limit: int = 10**9
    where: str = "forward"
    evaluation: bool = False
    fail: Callable[[], None] = field(default_factory=lambda: allocator, init=False)
    failures: int = field(default=0, init=False)
    shapes: list[tuple[int, ...]] = field(default_factory=list, init=False)
    kept: list[Any] = field(default_factory=list, init=False)

    def wrap_model(self, model: nn.Module, run: Any) -> nn.Module:
        layer = next(m for n, m in model.named_modules() if n.endswith("layers.1"))

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden = args[0]
            self.kept.append(weakref.ref(hidden))
            if torch.is_grad_enabled() == self.evaluation or hidden.shape[0] * hidden.shape[1] < self.limit:
                return args
            if self.where == "forward":
                self.break_off()
            return (_BreaksInBackward.apply(hidden, self.break_off), *args[1:])

        layer.register_forward_pre_hook(hook)
        return model

    def break_off(self) -> None:
        self.failures += 1
        self.fail()

    def wrap_loss(self, loss: Any, run: Any) -> Any:
        def seen(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            self.shapes.append(tuple(inputs["input_ids"].shape))
            return loss(model, inputs)

        return seen


def failing_with(fail: Callable[[], None], limit: int) -> SmallMemory:
    memory = SmallMemory(limit=limit)
    memory.fail = fail
    return memory


def same_weights(one: Trained, other: Trained, exact: bool = False) -> None:
    for name, weight in one.weights.items():
        if exact:
            assert torch.equal(weight, other.weights[name]), name
        else:
            torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=1e-12, msg=name)


PARTNERS: dict[str, list[Callable[[], Strategy]]] = {
    "alone": [],
    "accumulation": [lambda: GradientAccumulation(steps=2)],
    "packing": [Packing],
    "checkpointing": [GradientCheckpointing],
    "ema": [lambda: EMA(decay=0.5)],
    "lora": [lambda: LoRA(r=4)],
    "all": [
        lambda: GradientAccumulation(steps=2), Packing, GradientCheckpointing, lambda: EMA(decay=0.5),
        lambda: LoRA(r=4, modules_to_save=["lm_head"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "partners", [pytest.param(p, marks=[] if p in ("alone", "all") else pytest.mark.slow) for p in PARTNERS]
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_gradient_is_that_of_the_plain_loop(where: str, partners: str) -> None:
    """float64, uneven rows with weights, clipping: the weights, losses and norms are those of the run that has room."""

    def run(*strategies: Strategy) -> Trained:
        everyone = [*strategies, *(make() for make in PARTNERS[partners]), AdamW(eps=1e-8)]
        return run_training(
            everyone, model=make_llama(torch.float64), rows=make_rows(weighted=True), max_grad_norm=0.5, max_length=30
        )

    plain = run()
    memory = SmallMemory(limit=40, where=where)
    retried = run(memory, RetryOnOOM())
    assert memory.failures >= 1
    same_weights(plain, retried)
    assert retried.losses == pytest.approx(plain.losses, rel=1e-12)
    assert [s["grad_norm"] for s in retried.steps] == pytest.approx([s["grad_norm"] for s in plain.steps], rel=1e-9)
    assert retried.result["oom_retries"] == memory.failures
    assert sum(step.get("oom_retries", 0) for step in retried.steps) >= 1
    if partners in ("ema", "all"):
        averages = [next(s for s in r.trainer.strategies if s.name == "ema").state_dict() for r in (plain, retried)]
        for name, average in averages[0]["average"].items():
            torch.testing.assert_close(average, averages[1]["average"][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["none", "bfloat16", "float16"])
def test_it_is_the_run_that_was_split_from_the_start(where: str, precision: str) -> None:
    """Bit for bit, dropout included: random numbers start again, and nothing of the failed pass is left.

    The rows are of one length, so that `steps: 4` makes the same micro-batches as two failures do.
    """
    rows = [
        {**row, "input_ids": (row["input_ids"] * 6)[:20], "labels": (row["labels"] * 6)[:20]} for row in make_rows(8)
    ]

    def run(*strategies: Strategy) -> Trained:
        mixed = [] if precision == "none" else [MixedPrecision(dtype=precision)]  # type: ignore[arg-type]
        return run_training([*strategies, *mixed, LoRA(r=4, lora_dropout=0.3)], rows=rows, max_steps=2)

    split = run(GradientAccumulation(steps=4))
    memory = SmallMemory(limit=25, where=where)
    retried = run(memory, RetryOnOOM())
    same_weights(split, retried, exact=True)
    assert retried.losses == split.losses
    assert memory.failures == 2  # four rows, two rows; the second step begins with one
    assert memory.shapes == [(4, 20), (2, 20), *[(1, 20)] * 4, *[(1, 20)] * 4]
    assert [step.get("oom_retries") for step in retried.steps] == [2, None]
    assert retried.result["notices"] == [
        "retry_on_oom: step 1, training: out of memory in 4 rows of up to 20 tokens; split in two and run again",
        "retry_on_oom: step 1, training: out of memory in 2 rows of up to 20 tokens; split in two and run again",
    ]


def test_only_what_is_too_large_is_split() -> None:
    """One long row makes a batch too large; batches of short rows stay whole."""
    lengths = [10] * 4 + [10, 10, 10, 40] + [10] * 4
    rows = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in lengths]
    memory = SmallMemory(limit=60)
    run_training([memory, RetryOnOOM()], rows=rows)
    assert memory.shapes == [(4, 10), (4, 40), (2, 10), (2, 40), (2, 10), (1, 10), (1, 40), (4, 10)]


@pytest.mark.parametrize("fail", [allocator, card, python])
def test_every_word_for_it_is_understood(fail: Callable[[], None]) -> None:
    memory = failing_with(fail, 60)
    run = run_training([memory, RetryOnOOM()])
    assert run.result["oom_retries"] == memory.failures > 0


def test_another_error_is_not_held_up() -> None:
    def broken() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    memory = failing_with(broken, 1)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run_training([memory, RetryOnOOM()])
    assert memory.failures == 1


def test_tensors_of_the_failed_pass_are_gone() -> None:
    """Before the second try, nothing of the first may be alive: else there would be less room, not more."""
    alive: list[int] = []

    @dataclass
    class Look(Strategy):
        stage: ClassVar[Stage] = Stage.OFFLOAD

        def wrap_forward_backward(self, forward_backward: Any, run: Any) -> Any:
            def looked(*args: Any) -> Tensor:
                alive.append(sum(ref() is not None for ref in memory.kept))
                assert all(p.grad is None for p in run.trainable.values())
                return forward_backward(*args)

            return looked

    memory = SmallMemory(limit=40, where="backward")
    gc.disable()
    try:
        run_training([memory, RetryOnOOM(), Look(), GradientAccumulation(steps=2)], max_steps=1)
    finally:
        gc.enable()
    assert memory.failures >= 1
    assert alive == [0] * (memory.failures + 1)


def test_a_single_row_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError) as caught:
        run_training([failing_with(card, 1), RetryOnOOM()], rows=make_rows(4)[:1], batch_size=1)
    text = str(caught.value)
    length = len(make_rows(4)[0]["input_ids"])
    assert text.startswith(f"retry_on_oom: step 1, training: out of memory in a single row of {length} tokens")
    assert "lower training.max_length" in text
    assert "Tried to allocate 20.00 MiB" in text
    assert "\n" not in text


def test_it_ends_after_a_bound() -> None:
    memory = SmallMemory(limit=1)
    with pytest.raises(UserError, match=r"after 1 splits \(retry_on_oom.max_splits\); lower gradient_accumulation"):
        run_training([memory, RetryOnOOM(max_splits=1)])
    assert memory.failures == 2
    with pytest.raises(UserError, match=r"retry_on_oom.max_splits: counts from 1"):
        RetryOnOOM(max_splits=0)


def test_evaluation_is_split_too_and_has_a_size_of_its_own() -> None:
    def run(*strategies: Strategy) -> tuple[Trainer, float]:
        trainer = make_trainer(strategies, eval_rows=make_rows(8, seed=1), eval_batch_size=8)
        return trainer, trainer.evaluate()["eval_loss"]

    memory = SmallMemory(limit=60, evaluation=True)
    trainer, loss = run(memory, RetryOnOOM())
    assert memory.failures >= 1
    assert loss == pytest.approx(run()[1], rel=1e-6)
    memory.shapes.clear()
    trainer.train()
    assert max(rows * length for rows, length in memory.shapes) >= 60  # training does not fail, so it is not split


def test_a_resumed_run_splits_as_before(tmp_path: Path) -> None:
    """Bit for bit: the size is part of the checkpoint."""

    def run(folder: str, limit: int, resume: bool = False, **numbers: Any) -> tuple[Trainer, SmallMemory]:
        memory = SmallMemory(limit=limit)
        trainer = make_trainer(
            [memory, RetryOnOOM()],
            output_dir=str(tmp_path / folder),
            save_steps=2,
            lr_scheduler_type="constant",
            **numbers,
        )
        trainer.train(resume_from=resume or None)
        return trainer, memory

    whole, _ = run("whole", 60, max_steps=4)
    run("parts", 60, max_steps=2)
    second, memory = run("parts", 60, resume=True, max_steps=4)
    assert memory.failures == 0
    assert all(torch.equal(p, whole.run.trainable[n]) for n, p in second.run.trainable.items())
    assert second.result["oom_retries"] == whole.result["oom_retries"] > 0


def test_without_a_failure_nothing_changes() -> None:
    same_weights(run_training(), run_training([RetryOnOOM()]), exact=True)


def test_it_is_refused_where_weights_change_in_backward() -> None:
    with pytest.raises(
        ConflictError, match=r"retry_on_oom needs all gradients .*optimizer_in_backward takes that away"
    ):
        make_trainer([RetryOnOOM(), OptimizerInBackward()])
