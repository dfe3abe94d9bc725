"""What happens at a loss or gradient that is NaN or infinite: stop or skip, and keep the batch for inspection."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowmem.checks import NonFiniteError
from lowmem.durable import write_text
from lowmem.errors import UserError
from lowmem.loss import count
from lowmem.run_log import valid
from lowmem.strategy import ForwardBackward, Sample, Step

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

_DEFAULT_LIMIT = 5
_MOST_FILES = 20  # of one run; a run may skip any number of steps that do not follow one another
# A loss scale of 2**16 is down at 2**-34 then: no overflow of float16 lasts that long.
_MOST_SKIPPED_BY_OTHERS = 50


class NonFiniteGuard:
    """Stands around the pass and the step, and acts on a `NonFiniteError` as `training.on_nonfinite` says.

    Under `skip` the step ends there: the error has passed through every strategy around the step before one of them
    has touched weights, averages or schedule. A step that a loss scaler has skipped is no such step; but many in a row
    (or a few whose loss itself is not finite) end the run under either policy.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.run = trainer.run
        self.skips = trainer.training.on_nonfinite == "skip"
        self.limit = trainer.training.max_nonfinite_steps or _DEFAULT_LIMIT
        self.in_a_row = self.by_others = self.lost = 0
        self.batch: list[Sample] = []
        self.forward_backward: ForwardBackward | None = None

    def around_pass(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Remembers the batch; evaluation passes through."""
        self.forward_backward = forward_backward

        def watched(micro_batches: list[list[Sample]], divisor: float | Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self.batch = [sample for samples in micro_batches for sample in samples]
            try:
                return forward_backward(micro_batches, divisor)
            except NonFiniteError as error:
                raise NonFiniteError(f"{error} {self._keep_batch(error)}", error.damaged) from None

        return watched

    def around_step(self, step: Step) -> Step:
        """Stops, or leaves the step out, where it finds something that is not finite."""

        def guarded() -> None:
            try:
                step()
            except NonFiniteError as error:
                self._stop_or_skip(error)
            else:
                self.in_a_row = 0
                self._watch_others()
            self.batch = []

        return guarded

    def _stop_or_skip(self, error: NonFiniteError) -> None:
        where = self._keep_batch(error)
        if not self.skips or error.damaged:
            raise NonFiniteError(f"{error} {where}", error.damaged) from None
        self.in_a_row += 1
        if self.in_a_row > self.limit:
            raise NonFiniteError(
                f"{error} {where} (training.max_nonfinite_steps: {self.limit} steps in a row were left out already)"
            ) from None
        self.run.log(skipped=True, nonfinite=True)
        times = self.run.count("nonfinite_steps")
        reason = str(error).partition(";")[0]
        if times <= _MOST_FILES:
            self.run.notice(f"{reason}: the step was left out {where}")
        elif times == _MOST_FILES + 1:
            self.run.notice(f"{reason}: left out; from here on such steps are only counted")

    def _watch_others(self) -> None:
        """A strategy has skipped the step (the loss scaler): that must come to an end."""
        if not self.run.metrics.get("skipped"):
            self.by_others = self.lost = 0
            return
        self.by_others += 1
        finite = math.isfinite(float(self.run.metrics["loss"]))
        self.lost = 0 if finite else self.lost + 1
        if self.lost > self.limit or self.by_others > _MOST_SKIPPED_BY_OTHERS:
            what = "the loss is NaN or infinite" if self.lost > self.limit else "the gradients overflow at any scale"
            error = NonFiniteError(
                f"step {self.run.global_step + 1}: {max(self.lost, self.by_others)} steps in a row were skipped, and "
                f"{what}; no loss scale can help. Lower the learning rate, use bfloat16, or look at the rows of this "
                "batch"
            )
            raise NonFiniteError(f"{error} {self._keep_batch(error)}")

    # -- the batch on disk --------------------------------------------------------------------------------------------

    def _keep_batch(self, error: NonFiniteError) -> str:
        """Write the rows down, and say where they are."""
        folder = self.trainer.books.folder
        if folder is None:
            return "(training.output_dir is not set, so the batch is not written out)"
        if self.run.counters.get("nonfinite_steps", 0) >= _MOST_FILES:
            return f"({_MOST_FILES} batches are in {folder / 'nonfinite'} already; this one is not written out)"
        path = folder / "nonfinite" / f"step-{self.run.global_step + 1:06d}.jsonl"
        try:
            self._write(path, [None] * len(self.batch) if error.damaged else self._losses(self.batch))
        except (OSError, UserError) as problem:
            return f"(the batch could not be written: {problem})"
        return f"(the batch: {path})"

    def _write(self, path: Path, losses: Sequence[float | None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"row": number, **self._plain(sample), "loss": valid(loss)}
            for number, (sample, loss) in enumerate(zip(self.batch, losses, strict=True))
        ]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def _plain(self, sample: Sample) -> dict[str, Any]:
        keys = [key for key in ("input_ids", "labels", "loss_weights") if key in sample]
        values: dict[str, Any] = {key: [valid(n) for n in map(_number, sample[key])] for key in keys}
        tokenizer = self.trainer.tokenizer
        return {**values, "text": tokenizer.decode(values["input_ids"]) if tokenizer is not None else None}

    def _losses(self, samples: list[Sample]) -> list[float | None]:
        """Mean loss of every row alone, without dropout; null where there is none to be had."""
        assert self.forward_backward is not None
        model = self.trainer.model
        training, found = model.training, list[float | None]()
        model.eval()
        try:
            with torch.no_grad():
                for sample in samples:
                    weight = count([sample])
                    found.append(float(self.forward_backward([[sample]], weight)) if weight else None)
        except (RuntimeError, MemoryError):  # the rows matter more than their losses
            found += [None] * (len(samples) - len(found))
        finally:
            model.train(training)
        return found


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
