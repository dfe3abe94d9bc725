"""Out of memory in one batch: it is split and tried again, and the gradient stays the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.strategy import ForwardBackward, Loss, Sample, Stage, Strategy, Trait

MicroBatches = list[list[Sample]]
_WORDS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass
class RetryOnOOM(Strategy):
    """Splits the micro-batches of a step and runs the whole step again where memory has run out.

    The gradients of the failed pass are dropped, those of earlier micro-batches with them: a backward pass that broke
    off has added to some of them already, and copies to go back to would take the memory that is missing. Random
    numbers start again, too, so the step is the one that the finer split would have given from the beginning.

    The size that failed (rows x longest row, in tokens) is remembered: from then on, no micro-batch of that size or
    more is tried as long as it can be split. Evaluation, which keeps no activations, has a size of its own.

    Attributes:
        max_splits: how often one batch is split finer (each time in two); then the run stops.
    """

    stage: ClassVar[Stage] = Stage.RETRY
    slot: ClassVar[str | None] = "retry"
    saves: ClassVar[str] = "the run, where one batch in many does not fit"
    costs: ClassVar[str] = "the time of the passes that failed; nothing where none does"
    period = 1
    remedy: ClassVar[str] = "drop retry_on_oom and lower training.batch_size"

    max_splits: int = 4
    _too_large: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _started: int = field(default=0, init=False, repr=False)  # micro-batches of this pass whose loss was begun

    def __post_init__(self) -> None:
        if self.max_splits < 1:
            raise UserError("retry_on_oom.max_splits: counts from 1; leave the strategy out to switch it off")

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.GRADS_AT_STEP, Trait.ONE_PROCESS})

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        def counted(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
            self._started += 1
            return loss(model, inputs)

        return counted

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        def retried(micro_batches: MicroBatches, divisor: float | Tensor) -> Tensor:
            kind = "training" if torch.is_grad_enabled() else "evaluation"
            replay = _random_state(run.device)
            for splits in range(self.max_splits + 1):
                pieces = self._split(micro_batches, kind)
                self._started = 0
                try:
                    return forward_backward(pieces, divisor)
                except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                    if not is_out_of_memory(error):
                        raise
                    reason = " ".join(str(error).split())[:120] or type(error).__name__
                # Out here the error is gone, and with its traceback the tensors of the pass that failed.
                failed = pieces[max(0, min(self._started, len(pieces)) - 1)]
                self._learn(failed, splits, kind, reason, run)
                _forget(run)
                replay()
            raise AssertionError("_learn ends the last round")

        return retried

    def _split(self, micro_batches: MicroBatches, kind: str) -> MicroBatches:
        """Micro-batches below the size that failed, as equal as can be; the order of rows stays."""
        limit = self._too_large.get(kind)
        pieces: MicroBatches = []
        for batch in micro_batches:
            pieces += [batch] if limit is None else _halved(batch, limit)
        return pieces

    def _learn(self, failed: list[Sample], splits: int, kind: str, reason: str, run: Run) -> None:
        where = f"retry_on_oom: step {run.global_step + (kind == 'training')}, {kind}: out of memory"
        rows, longest = len(failed), max(len(sample["input_ids"]) for sample in failed)
        if rows == 1:
            raise UserError(
                f"{where} in a single row of {longest:,} tokens, which cannot be split; lower training.max_length, or "
                f"add gradient_checkpointing or chunked_cross_entropy ({reason})"
            )
        if splits == self.max_splits:
            raise UserError(
                f"{where} in {rows} rows of up to {longest:,} tokens, after {splits} splits (retry_on_oom.max_splits); "
                f"lower gradient_accumulation.micro_batch_size or training.max_length, or raise max_splits ({reason})"
            )
        self._too_large[kind] = rows * longest
        run.log(oom_retries=splits + 1)
        times = run.count("oom_retries")
        if times <= _MOST_NOTICES:
            more = "; further ones are only counted" if times == _MOST_NOTICES else ""
            run.notice(f"{where} in {rows} rows of up to {longest:,} tokens; split in two and run again{more}")

    def state_dict(self) -> dict[str, Any]:
        return dict(self._too_large)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._too_large = dict(state)


_MOST_NOTICES = 10


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out: torch's own, the CPU allocator's, cuBLAS's, or Python's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _WORDS)


def _halved(batch: list[Sample], limit: int) -> MicroBatches:
    size = len(batch) * max(len(sample["input_ids"]) for sample in batch)
    if len(batch) == 1 or size < limit:
        return [batch]
    half = ceil(len(batch) / 2)
    return _halved(batch[:half], limit) + _halved(batch[half:], limit)


def _forget(run: Run) -> None:
    """Drop what the failed pass has left: its gradients, and blocks that the allocator keeps."""
    for parameter in run.trainable.values():
        parameter.grad = None
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def _random_state(device: torch.device) -> Callable[[], None]:
    """A function that sets the random generators back to where they are now."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def replay() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return replay
