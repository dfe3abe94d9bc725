"""What a recipe will need on a card, before a weight is loaded: `lowmem estimate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowmem.errors import UserError
from lowmem.memory.allocator import CachingAllocator, replay
from lowmem.memory.depth import StepWork
from lowmem.memory.host import host_ledgers
from lowmem.memory.merging import merge_trace
from lowmem.memory.meta import Device
from lowmem.memory.moments import Moment
from lowmem.memory.predict import judge, without_collections
from lowmem.memory.rule_of_thumb import MemoryEstimate, estimate_memory_usage
from lowmem.memory.subject import Subject
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

if TYPE_CHECKING:
    from lowmem.recipe import Recipe
    from lowmem.trainer import Trainer

GIB = 1024**3
# what CUDA itself takes of a consumer card beside the allocator; 1 to 2 GiB under launchers that talk between cards
CONTEXT_BYTES = GIB // 2
_NEIGHBOUR = 0.01  # lengths within this share are tried, too: blocks happen to fit, or not


@dataclass(frozen=True)
class Estimate:
    """What a run will need.

    Attributes:
        model: its name.
        device: `cuda` or `cpu`, whose paths and kernels were followed.
        expandable_segments: how the allocator was set.
        lengths: tokens of each row of the optimizer batch that was run.
        peak_allocated_bytes: the most that is handed out at once (allocator's rounding included).
        peak_reserved_bytes: the most that the allocator takes from the card: the highest over lengths within 1 %.
        reserved_band: the lowest and the highest over those lengths.
        context_bytes: what CUDA takes beside.
        phase, place, operation: when the peak comes.
        ledger: category -> bytes at the peak; with `allocator slack` they add up to `peak_reserved_bytes`.
        phases: phase -> its peak, by category.
        holders: the largest groups of tensors at the peak: (bytes, count, what).
        host_bytes, host_phase: what the process needs of the host's memory at its most, and when; pinned memory is part
            of it.
        host_phases: the same by phase and category (`merge` is a command, and process, of its own).
        pinned_bytes: host memory that the card reads directly, in the blocks of torch's allocator for it.
        managed_bytes: memory of paged optimizer state. The allocator of the card knows nothing of it; it lies on the
            card while there is room, and moves to the host page by page.
        managed_at_once: how much of it one update touches, which must be on the card then.
        gpus: cards that share the run; bytes are those of the one that needs most.
        rank: which of them that is; null: all are alike.
        sent_bytes: what that card sends to the others in an optimizer step.
        left_out: parts of the run that could not be followed, in words.
        rule: the tutorial's rule of thumb for the same run.
    """

    model: str
    device: Device
    expandable_segments: bool
    lengths: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_band: tuple[int, int]
    context_bytes: int
    phase: str
    place: str | None
    operation: str
    ledger: dict[str, int]
    phases: dict[str, Moment]
    holders: list[tuple[int, int, str]]
    host_bytes: int
    host_phase: str
    host_phases: dict[str, dict[str, int]]
    pinned_bytes: int
    managed_bytes: int
    managed_at_once: int
    gpus: int
    rank: int | None
    sent_bytes: int
    left_out: list[str]
    rule: MemoryEstimate

    @property
    def needed_bytes(self) -> int:
        """What must be free on the card: reserved, the paged state of one update, and CUDA's own share."""
        return self.peak_reserved_bytes + self.managed_at_once + self.context_bytes

    @property
    def error_band(self) -> str:
        """How far off it may be, in words."""
        if self.device == "cpu":
            return "within 1 %"
        reserved = 2 if self.expandable_segments else 4
        return f"allocated within 1 %, reserved within {reserved} %, CUDA's own share within 0.5 GiB"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json` and the run folder."""
        plain = {name: value for name, value in vars(self).items() if name not in ("phases", "rule", "holders")}
        return {
            **plain,
            "lengths": list(self.lengths),
            "reserved_band": list(self.reserved_band),
            "needed_bytes": self.needed_bytes,
            "error_band": self.error_band,
            "phases": {name: {"peak_bytes": m.bytes, "ledger": m.ledger} for name, m in self.phases.items()},
            "holders": [{"bytes": size, "count": count, "what": what} for size, count, what in self.holders],
            "rule_of_thumb": self.rule.as_dict(),
        }


@without_collections()
def estimate(
    run: Recipe | Subject,
    *,
    lengths: Sequence[int] | None = None,
    device: Device = "cuda",
    expandable_segments: bool = True,
    context_bytes: int = CONTEXT_BYTES,
    trace: Trace | None = None,
    data_bytes: int = 0,
    band: bool = True,
) -> Estimate:
    """Predict the memory of a run by running it on the meta device.

    Args:
        run: a recipe (`load_recipe`), or what it comes to.
        lengths: tokens of each row of one optimizer batch; by default `batch_size` rows of `max_length`.
        device: `cuda`: as on a card; `cpu`: as on this machine's CPU.
        expandable_segments: whether the allocator is set to grow its segments (`lowmem train` does so).
        context_bytes: what CUDA takes beside the allocator.
        trace: is filled with what was recorded, where a picture is to be drawn of it.
        data_bytes: tokenised rows in the host's memory, where they are known (`host.rows_bytes`).
        band: whether neighbouring lengths are tried, too.

    Raises:
        UserError: the architecture is not to be had, strategies conflict, or a part cannot run without data.
    """
    subject = run if isinstance(run, Subject) else Subject.of(run)
    rows = tuple(lengths) if lengths else (subject.training.max_length,) * subject.training.batch_size
    if subject.gpus > 1:
        rows = tuple(sorted(rows, reverse=True))  # the first card gets the longest
    merged, most = merge_trace(subject), None
    for rank in subject.ranks:
        one = replace(subject, rank=rank)
        found = _of_rank(one, rows, merged, device, expandable_segments, context_bytes, data_bytes, band)
        if most is None or found[0].needed_bytes > most[0].needed_bytes:
            most = found
    assert most is not None
    if trace is not None:
        vars(trace).update(vars(most[1]))
    return most[0]


def _of_rank(
    subject: Subject,
    rows: tuple[int, ...],
    merged: Trace | None,
    device: Device,
    expandable_segments: bool,
    context_bytes: int,
    data_bytes: int,
    band: bool,
) -> tuple[Estimate, Trace]:
    """What the subject's rank will need, and what was recorded."""
    seen: list[Trainer] = []
    work = Work() if subject.gpus > 1 else None
    step = StepWork(work) if work is not None else None

    def look(trainer: Trainer) -> None:
        seen.append(trainer)
        if step is not None:
            step.watch(trainer)

    full = subject.trace(rows, device, look=look, whole=True, work=work)
    found = judge(full, expandable=expandable_segments, vocabulary=subject.vocabulary)
    on_host = host_ledgers(full, device, data_bytes, merged)
    host_phase = max(on_host, key=lambda phase: sum(on_host[phase].values()))
    reserved = [found.peak_reserved_bytes]
    if device == "cuda" and band:
        reserved += [
            replay(events, CachingAllocator(None, expandable_segments)).peak_reserved
            for events in neighbours(subject, full, rows)
        ]
    slack = max(reserved) - sum(found.ledger.values())
    predicted = Estimate(
        subject.name,
        device,
        expandable_segments,
        rows,
        found.peak_allocated_bytes,
        max(reserved),
        (min(reserved), max(reserved)),
        context_bytes if device == "cuda" else 0,
        found.phase,
        found.place,
        found.operation,
        {**found.ledger, "allocator slack": slack},
        found.phases,
        found.holders,
        sum(on_host[host_phase].values()),
        host_phase,
        on_host,
        found.pinned_bytes,
        found.managed_bytes,
        found.managed_at_once,
        subject.gpus,
        subject.rank if len(subject.ranks) > 1 else None,
        0 if step is None else round(sum(total.sent_bytes for total in step.step().totals().values())),
        subject.left_out,
        _rule(seen[0], max(rows)),
    )
    return predicted, full


def _rule(trainer: Any, length: int) -> MemoryEstimate:
    """The rule of thumb for the model as it was trained, with the rows of one forward pass."""
    return estimate_memory_usage(trainer.model, length, trainer.rows_per_pass, print_table=False)


# -- lengths nearby ---------------------------------------------------------------------------------------------------


def neighbours(subject: Subject, full: Trace, lengths: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The events of `full` as they would be for rows 1 % shorter, 1 % longer, and of a multiple of 16 tokens.

    Sizes are linear in the length: two shallow traces say how each (operation, shape) changes, and the full one keeps
    its events. Nothing is yielded where shallow traces do not match (another number of pieces).
    """
    longest = max(lengths)
    shorter = [max(2, length - max(1, round(length * _NEIGHBOUR))) for length in lengths]
    if longest < 16 or subject.shallow is None:
        return
    here = subject.trace(lengths, layers=subject.shallow)
    there = subject.trace(shorter, layers=subject.shallow)
    if [s.op for s in here.storages] != [s.op for s in there.storages]:
        return
    step = _changes(full, here, there)
    unit = longest - max(shorter)
    for tokens in {unit, -unit, longest % 16, longest % 16 - 16 if longest % 16 else 0} - {0}:
        share = tokens / unit
        sizes = [max(0, round(s.size + change * share)) for s, change in zip(full.storages, step, strict=True)]
        yield [(number, sizes[number] if size > 0 else -sizes[number]) for number, size in full.events]


def _changes(full: Trace, here: Trace, there: Trace) -> list[int]:
    """By how many bytes each storage of `full` grows from `here` to `there`."""
    by_key: dict[Any, list[int]] = defaultdict(list)
    for a, b in zip(here.storages, there.storages, strict=True):
        by_key[a.op, a.shape, a.phase].append(b.size - a.size)
    counts: dict[Any, int] = defaultdict(int)
    for storage in full.storages:
        counts[storage.op, storage.shape, storage.phase] += 1
    seen: dict[Any, int] = defaultdict(int)
    changes = []
    for storage in full.storages:
        key = storage.op, storage.shape, storage.phase
        found = by_key.get(key) or [0]
        index, seen[key] = seen[key], seen[key] + 1
        changes.append(found[index] if counts[key] == len(found) else min(found))
    return changes


def unpredictable(error: Exception) -> UserError:
    """A part that needs data cannot run without; one line instead of torch's."""
    return UserError(f"estimate: this run cannot be followed without data: {' '.join(str(error).split())[:200]}")
