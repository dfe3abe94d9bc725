"""Measured memory beside predicted, by category, when a run has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from lowmem.batches import Cursor, make_cursor
from lowmem.durable import write_text
from lowmem.errors import UserError
from lowmem.memory.meter import Ledger, ledger_of
from lowmem.memory.timeline import COMPARISON
from lowmem.memory.trace import Trace
from lowmem.memory.worst_batch import Lengths
from lowmem.observers import Event
from lowmem.sizes import gib

if TYPE_CHECKING:
    from lowmem.trainer import Trainer

# inside one operation: a prediction knows of it, a look at what operations return does not
_UNSEEN = ("inside kernels", "workspaces")


class MemoryComparison:
    """Observer: at the end, predicts what was measured, shows both, and leaves them in result and run folder.

    It compares the step that `MemoryLedger` has measured (to stand before this one), category by category; on CUDA also
    the allocator's peaks over the whole run with the prediction for its worst batch. `memory.json` holds it all.
    """

    def __call__(self, event: Event) -> None:
        """Compare once the run is trained."""
        if event.kind != "finish":
            return
        trainer, parts = event.trainer, dict[str, Any]()
        try:
            if "memory_ledger" in trainer.result and (lengths := measured_batch(trainer)):
                parts["step"] = _step(trainer, lengths)
            if trainer.device.type == "cuda":
                parts["run"] = _whole_run(trainer)
        except UserError as error:
            trainer.emit("status", text=f"memory: what was measured is not compared with a prediction ({error})")
        if not parts:
            return
        for name, part in parts.items():
            shown = f"{gib(part['measured_bytes'])} measured, {gib(part['predicted_bytes'])} predicted"
            what = "tensors within the measured step" if name == "step" else "reserved over the run"
            trainer.emit("status", text=f"memory: {what}: {shown} ({part['difference_percent']:+.2f} %)")
        if trainer.books.folder:
            write_text(
                trainer.books.folder / COMPARISON, json.dumps({"device": trainer.memory.kind, **parts}, indent=1)
            )


def measured_batch(trainer: Trainer) -> Lengths:
    """Tokens of each row of the second batch of a fresh run; none where it has no second one, or reads a stream."""
    cursor = make_cursor(trainer.train_dataset, trainer.training)  # type: ignore[arg-type]
    if trainer.total_steps < 2 or not isinstance(cursor, Cursor):
        return ()
    batches = cursor.batches()
    next(batches)
    return tuple(len(sample["input_ids"]) for sample in next(batches))


def as_measured(trace: Trace) -> Ledger:
    """The peak of a prediction as `MemoryLedger` would see it: by the same categories, without what nobody sees."""
    seen = Trace()
    seen.storages = trace.storages
    seen.events = [(n, size) for n, size in trace.events if trace.storages[n].label not in _UNSEEN]
    return ledger_of(seen)


def _step(trainer: Trainer, lengths: Lengths) -> dict[str, Any]:
    predicted, measured = as_measured(trainer.memory.trace(lengths)), trainer.result["memory_ledger"]
    trainer.result["predicted_peak_live_bytes"] = predicted.peak_bytes
    trainer.result["predicted_memory_ledger"] = predicted.rows
    found = {"lengths": list(lengths), "measured": measured, "predicted": predicted.rows}
    return found | _difference(sum(measured.values()), predicted.peak_bytes)


def _whole_run(trainer: Trainer) -> dict[str, Any]:
    memory = trainer.memory
    found = memory.prediction or memory.predict(memory.worst.batches[0])
    keys = ("peak_allocated_bytes", "peak_reserved_bytes")
    predicted = {key: getattr(found, key) for key in keys}
    measured = {key: trainer.result[key] for key in keys}
    trainer.result.update({f"predicted_{key}": value for key, value in predicted.items()})
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    facts = {
        "lengths": list(found.lengths),
        "measured": measured,
        "predicted": predicted,
        "predicted_for_expandable_segments": found.expandable_segments,
        "expandable_segments": any(segment.get("is_expandable") for segment in segments),
        "allocator": {
            key: value
            for key, value in torch.cuda.memory_stats().items()
            if key.endswith(".all.peak") or "." not in key
        },
    }
    return facts | _difference(measured["peak_reserved_bytes"], predicted["peak_reserved_bytes"])


def _difference(measured: int, predicted: int) -> dict[str, Any]:
    percent = 100 * (predicted - measured) / measured if measured else 0.0
    return {"measured_bytes": measured, "predicted_bytes": predicted, "difference_percent": round(percent, 3)}
