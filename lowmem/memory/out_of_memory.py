"""An error that says memory has run out, in words: when, what held the memory, and what would help."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from lowmem.errors import ExplainedError, UserError
from lowmem.memory.guard import MemoryGuard, held_words, ledger_words, remedy_lines
from lowmem.memory.remedies import Remedy
from lowmem.memory.worst_batch import Lengths
from lowmem.strategies.retry_on_oom import is_out_of_memory

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

# which function was running -> the phase, the most telling first
_PHASES = {
    "save_checkpoint": "saving a checkpoint",
    "save_model": "saving the model",
    "summed_loss": "evaluation",
    "generate": "generation",
    "backward": "backward",
    "guarded": "the optimizer's step",  # what the loop calls, around every strategy
    "watched": "forward",
    "load_model": "loading the model",
}
_SHOWN = 5
_ALIKE = 0.9


class MemoryExhaustedError(ExplainedError, MemoryError):
    """Memory has run out; the message says what held it, and what would help."""


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """An out-of-memory error from inside becomes an `MemoryExhaustedError`; the tensors it has kept alive are let go.

    Raises:
        MemoryExhaustedError: memory has run out, and nothing inside has put up with it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        phase, said = phase_of(error.__traceback__), _words(error)
        traceback.clear_frames(error.__traceback__)
        raise MemoryExhaustedError(explain(trainer, phase, said)) from error


def explain(trainer: Trainer, phase: str, said: str) -> str:
    """The message for a run that is built.

    Args:
        trainer: whose memory has run out.
        phase: what it was doing.
        said: torch's own words.
    """
    lengths = tuple(len(sample["input_ids"]) for sample in trainer.guard.batch) or trainer.memory.worst.batches[0]
    rows = f"{len(lengths)} rows of up to {max(lengths):,} tokens"
    held, lines = trainer.result.get("memory_ledger"), []
    measured = f"  what held memory at the peak of the measured step: {ledger_words(held or {})}"
    try:
        found = trainer.memory.predict(lengths)
        # the measured step may have had shorter rows
        if held and sum(held.values()) > _ALIKE * found.peak_allocated_bytes:
            lines.append(measured)
        else:
            lines.append(f"  what holds memory at the peak, as predicted for this batch: {held_words(found)}")
        lines += remedy_lines(_most(trainer.memory, lengths), fitting=False)
    except (UserError, MemoryError) as error:
        lines += [measured] if held and not lines else []
        lines.append(f"  what would help cannot be predicted: {' '.join(str(error).split())}")
    return "\n".join([f"out of memory in {phase}, step {trainer.run.global_step + 1} ({rows}): {said}", *lines])


@contextmanager
def explained_loading() -> Iterator[None]:
    """The same for a run that is not built yet.

    Raises:
        MemoryExhaustedError: memory has run out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        where = phase_of(error.__traceback__, "building the run")
        raise MemoryExhaustedError(
            f"out of memory in {where}: {_words(error)}\n  quantization loads a quarter of the bytes or less, "
            "model.dtype: bfloat16 half of float32's; `lowmem estimate` says what a recipe will need"
        ) from error


def phase_of(trace: TracebackType | None, otherwise: str = "training") -> str:
    """What was going on, by the names of the functions that were running."""
    running = {frame.name for frame in traceback.extract_tb(trace)}
    return next((phase for name, phase in _PHASES.items() if name in running), otherwise)


def _most(memory: MemoryGuard, lengths: Lengths) -> list[Remedy]:
    """The remedies, the largest savings first."""
    return sorted(memory.remedies(lengths, None), key=lambda remedy: -remedy.saved)[:_SHOWN]


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    _, name, rest = text.partition("DefaultCPUAllocator: ")  # behind the place in its source
    return (name + rest or text).partition(". ")[0][:200] or type(error).__name__
