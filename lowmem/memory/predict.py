"""A training step on the meta device, recorded, and what the record means for a card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowmem.config import TrainingConfig
from lowmem.memory.allocator import CachingAllocator, replay
from lowmem.memory.host import highest, managed_bytes, pinned_bytes
from lowmem.memory.load import from_host, move_rest
from lowmem.memory.meta import Device, on_meta
from lowmem.memory.meter import tensors_by_category
from lowmem.memory.moments import Moment, moments, place_at
from lowmem.memory.phases import Around, follow
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work
from lowmem.model import blocks
from lowmem.sharded import local
from lowmem.strategy import ForwardBackward, Sample, Strategy

if TYPE_CHECKING:
    from lowmem.trainer import Trainer


@dataclass(frozen=True)
class Prediction:
    """Bytes a run will need on a card.

    Attributes:
        peak_allocated_bytes: the most that is handed out at once, in the allocator's rounded sizes.
        peak_reserved_bytes: the most that the allocator takes from the card.
        phase: when the peak comes (`forward`, `backward`, `step`), `place`: in which layer, where it is in one, and
            `operation`: what reaches it.
        ledger: category -> bytes at the peak, unrounded.
        phases: phase -> its own peak, unrounded, and its ledger.
        holders: the largest groups of tensors at the peak: (bytes, count, what).
        host_phase, host_bytes: when tensors take most of the host's ordinary memory, and how much.
        pinned_bytes: what is taken of host memory that the card reads directly, in blocks of powers of two.
        managed_bytes, managed_at_once: memory that moves between card and host, and how much of it an update touches.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phase: str
    place: str | None
    operation: str
    ledger: dict[str, int]
    phases: dict[str, Moment]
    holders: list[tuple[int, int, str]]
    host_phase: str
    host_bytes: int
    pinned_bytes: int
    managed_bytes: int
    managed_at_once: int


def record(
    model: nn.Module | Callable[[], nn.Module],
    training: TrainingConfig,
    strategies: Sequence[Strategy],
    device: Device,
    lengths: Sequence[int],
    look: Callable[[Trainer], None] | None = None,
    work: Work | None = None,
    around: Around | None = None,
    ranks: int = 1,
    rank: int = 0,
) -> Trace:
    """Two optimizer steps of the real trainer, loop and strategies, on rows of these lengths.

    The second, because an optimizer may allocate its state at the end of the first. Of micro-batches of one shape that
    follow each other, the first step runs one and the second two: the others would find what the second finds.

    Args:
        model: without data (on the meta device), in the dtype it would be loaded in; or what loads it, which is then
            recorded, too, as is the building of the trainer (phase `load`).
        training: what a run writes, and when, is left out.
        strategies: new instances.
        device: what the run is to be like.
        lengths: tokens of each row of an optimizer batch; every token is a target.
        look: is shown the trainer, built and not yet run.
        work: is shown every operation, for the time it would take.
        around: what the run does beside its steps; null: nothing.
        ranks, rank: processes that share the run, and which of them is recorded.
    """
    rows = [{"input_ids": torch.ones(length, dtype=torch.int32).numpy()} for length in lengths]
    numbers = replace(
        steps_alone(training), batch_size=len(rows), max_steps=2, max_length=max(training.max_length, *lengths)
    )
    with without_collections(), on_meta(device, ranks, rank), ExitStack() as active:
        trace = Trace(device, work)
        if isinstance(model, nn.Module):
            trainer = _trainer(model, rows, numbers, strategies)
            active.enter_context(trace)
        else:
            active.enter_context(trace)
            with from_host(trace):
                trainer = _trainer(model(), rows, numbers, strategies)
                move_rest(trainer.model)
        trace.phase = "at rest"
        _label(trace, trainer)
        trace.label_rest("held by strategies")
        trace.mark("at rest")
        plain = trainer.forward_backward
        _follow(trace, trainer)
        if look is not None:
            look(trainer)
        trainer.train()
        _label(trace, trainer)
        trace.mark("at rest")  # between two steps; an optimizer may have made its state meanwhile
        if around is not None:
            trainer.forward_backward = plain
            follow(trace, trainer, around)
    return trace


@contextmanager
def without_collections() -> Iterator[None]:
    """Python's search for cycles takes a third of the time here. What a cycle would hold counts as held, which on a
    card is the worst case: nobody knows when the search would come."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def steps_alone(training: TrainingConfig) -> TrainingConfig:
    """The numbers of a run that evaluates, saves and writes nothing."""
    return replace(
        training,
        output_dir=None,
        eval_steps=None,
        save_steps=None,
        save_total_limit=None,
        metric_for_best_model=None,
        load_best_model_at_end=False,
        early_stopping_patience=None,
        early_stopping_threshold=0.0,
        report_to=[],
    )


def _trainer(model: nn.Module, rows: Any, numbers: TrainingConfig, strategies: Sequence[Strategy]) -> Trainer:
    from lowmem.trainer import Trainer

    class Brief(Trainer):
        """Leaves out micro-batches that would show nothing new; a loop of a strategy's own sees to that itself."""

        rows_per_pass = micro_batches = 0  # the most there were

        def _wrap(self, method: str, part: Any) -> Any:
            return super()._wrap(method, self._counted(part) if method == "wrap_forward_backward" else part)

        def _counted(self, loop: ForwardBackward) -> ForwardBackward:
            def counted(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
                self.rows_per_pass = max(self.rows_per_pass, *map(len, micro_batches))
                return loop(micro_batches, divisor)

            return counted

        def _forward_backward(self, micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            self.micro_batches = max(self.micro_batches, len(micro_batches))
            kept = telling(micro_batches, most=1 if self.run.global_step == 0 else 2)
            return super()._forward_backward(kept, divisor)

    return Brief(model, rows, training=numbers, strategies=strategies)


def telling(micro_batches: list[list[Sample]], most: int) -> list[list[Sample]]:
    """The micro-batches without those that have as many predecessors of their shape, right before them, as `most`."""
    kept: list[list[Sample]] = []
    before, count = None, 0
    for batch in micro_batches:
        shape = (len(batch), max(len(sample["input_ids"]) for sample in batch))
        count = count + 1 if shape == before else 1
        before = shape
        if count <= most:
            kept.append(batch)
    return kept


def _follow(trace: Trace, trainer: Trainer) -> None:
    """Tell the trace what gradients are, which phase it is, and which layer is at work."""

    def gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            trace.see(local(parameter.grad), "gradients")

    for parameter in trainer.run.trainable.values():
        parameter.register_post_accumulate_grad_hook(gradient)  # type: ignore[no-untyped-call]
    trainer.forward_backward = _during(trace, "forward", trainer.forward_backward)
    trainer.step = _during(trace, "step", trainer.step)
    for number, block in enumerate(blocks(trainer.model), 1):

        def enter(*_: Any, place: str = f"layer {number}") -> None:
            trace.place = place

        for part in block.children():  # a layer that is recomputed is not called itself, its parts are
            part.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda *_: setattr(trace, "place", None))


def _label(trace: Trace, trainer: Trainer) -> None:
    for label, tensors in tensors_by_category(trainer):
        for tensor in tensors:
            trace.see(tensor, label)


def _during(trace: Trace, phase: str, part: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        trace.place = None
        with trace.during(phase):
            trace.mark(phase)  # bitsandbytes' step allocates nothing, and is a phase all the same
            return part(*args)

    return within


def judge(trace: Trace, *, expandable: bool, capacity: int | None = None, vocabulary: int = 0) -> Prediction:
    """What a record means for a card.

    Args:
        trace: of `record`.
        expandable: whether the allocator grows its segments.
        capacity: bytes that may be reserved; null: no bound.
        vocabulary: width of the logits, by which the loss is told from other activations.

    Raises:
        OutOfCapacityError: it does not fit into `capacity`.
    """
    allocator = replay(trace.events, CachingAllocator(capacity, expandable))
    phases = moments(trace, vocabulary)
    phase, peak = max(phases.items(), key=lambda item: item[1].bytes)
    return Prediction(
        allocator.peak_allocated,
        allocator.peak_reserved,
        phase,
        place_at(trace, peak.index),
        trace.storages[trace.events[peak.index][0]].op,
        peak.ledger,
        phases,
        trace.holders(peak.index)[:15],
        *highest(trace, "host"),
        pinned_bytes(trace),
        *managed_bytes(trace),
    )
