"""The training loop of peft's comparison, recorded without a GPU, and what the card's allocator would make of it.

After `method_comparison/MetaMathQA/run.py` of huggingface/peft (Apache-2.0): the model is loaded behind one large
request that warms the allocator up; four rows of 768 tokens are evaluated; then batches are taken longest first out of
buckets of 20 batches, padded, with the cache emptied every 10 steps. `outputs` of a step, its logits and its key-value
cache, live until the next forward pass is over. The longest batch of a bucket thus follows the shortest one of the
bucket before, with an empty cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from published_model import LAYERS, SHAPE, Row, UnbuiltError, base_model, make_optimizer, with_adapter
from torch import Tensor, nn

from lowmem.memory.allocator import CachingAllocator
from lowmem.memory.meta import on_meta
from lowmem.memory.trace import Trace

EVALUATED = 768  # tokens of the rows that are evaluated before training
# Padded lengths of the other steps: assumed, not measured. Others move single predictions by up to 2.7 %, and 4.9 %.
FIRST, SECOND, SHORTEST, AFTER = 500, 420, 90, 420
LONGEST = 3  # its place among the steps; the cache was emptied before it
RECORDED = 698  # length at which the longest batch is recorded; others are derived

aten = torch.ops.aten
Key = tuple[str, tuple[int, ...], int]


class NotDerivableError(Exception):
    """The sizes at another length cannot be derived: it takes another path. Record it anew."""


class LoopTrace(Trace):  # type: ignore[no-untyped-call]
    """Records what is on the card, and answers what the code asks of data that is not there.

    Checks for broken values find none, and masks keep every entry. What would change the course in a way that nobody
    can guess (a count, a list of values) stays an error.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, with boolean indices turned into those of all entries."""
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return self._answer(args[0])
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            args = (args[0], self._all_entries(args[1]), *args[2:])
        elif name == "aten::nonzero" and args[0].is_meta:
            return self._rows_of(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: Tensor, label: str | None = None, op: Any = "given") -> int:
        """Take note of a tensor, if it is on the card."""
        return super().see(tensor, label, op) if tensor.is_meta else -1

    def _answer(self, scalar: Tensor) -> bool | float:
        if scalar.dtype == torch.bool:
            return self.storages[self.see(scalar)].op.startswith("aten.all")
        if scalar.is_floating_point():
            return 0.0
        raise UnbuiltError("its code asks for a number that only data can tell")

    def _all_entries(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool or not index.is_meta:
                found.append(index)
            else:
                found += self._rows_of(index).unbind(1)
        return found

    def _rows_of(self, mask: Tensor) -> Tensor:
        entries = torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device="meta")
        self.see(entries, op="aten.nonzero.default")
        return entries


@dataclass(frozen=True)
class Recording:
    """What came and went during the loop.

    Attributes:
        events: (number of the storage, bytes), negative bytes for a death.
        storages: operation, shape and bytes of each.
        lengths: the padded lengths of the steps.
        starts: the event, and the storage, with which the first step begins, the second one, ..., and the end.
        loaded: bytes of the base model, which is loaded first.
        trainable: parameters that are trained.
        virtual: tokens in the key-value cache that are not in the rows.
    """

    events: list[tuple[int, int]]
    storages: list[Key]
    lengths: tuple[int, ...]
    starts: list[tuple[int, int]]
    loaded: int
    trainable: int
    virtual: int

    def steps(self) -> list[list[Key]]:
        """The storages that were born in each step."""
        firsts = [storage for _, storage in self.starts]
        return [self.storages[a:b] for a, b in pairwise(firsts)]


def steps(longest: int) -> tuple[int, ...]:
    """Padded lengths of the replayed steps."""
    return (FIRST, SECOND, SHORTEST, longest, AFTER)


def record_loop(row: Row, lengths: Sequence[int], layers: int = LAYERS, evaluated: int = EVALUATED) -> Recording:
    """Run the loop of a row on the meta device.

    Raises:
        UnbuiltError: the row asks for what the installed libraries lack, or for data.
    """
    try:
        return _record(row, lengths, layers, evaluated, on_host=True)
    except UnbuiltError as first:
        reason = str(first)
    try:
        return _record(row, lengths, layers, evaluated, on_host=False)
    except UnbuiltError as second:
        raise UnbuiltError(reason if reason == str(second) else f"{reason}; on the meta device: {second}") from None


def _record(row: Row, lengths: Sequence[int], layers: int, evaluated: int, on_host: bool) -> Recording:
    starts: list[tuple[int, int]] = []
    with on_meta("cuda"), _padded():
        trace = LoopTrace("cuda")
        with trace:
            model = base_model(row, layers)
            base = {trace.see(tensor) for tensor in model.parameters()}
            model = with_adapter(model, row, layers, on_host)
            for tensor in (*model.parameters(), *model.buffers()):
                trace.see(tensor)
            try:
                if evaluated:
                    _evaluate(model.eval(), row["batch_size"], evaluated)
                model.train()
                optimizer = make_optimizer(model, row)
                outputs: Any = None
                for number, length in enumerate(lengths):
                    starts.append((len(trace.events), len(trace.storages)))
                    outputs = _step(model, optimizer, row, length, number + 1)
                starts.append((len(trace.events), len(trace.storages)))
            except (RuntimeError, NotImplementedError) as error:
                raise UnbuiltError(f"its code needs data: {str(error).splitlines()[0]}") from None
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        storages = [(found.op, found.shape, found.size) for found in trace.storages]
        loaded = sum(storages[number][2] for number in base)
        cache = getattr(outputs, "past_key_values", None)
        virtual = 0 if cache is None else int(cache.get_seq_length()) - lengths[-1]
        recording = Recording(list(trace.events), storages, tuple(lengths), starts, loaded, trainable, virtual)
        del outputs  # only now: what it holds dies after the record
    return recording


@contextmanager
def _padded() -> Iterator[None]:
    """The rows of a batch differ in length: transformers finds padding in the mask and keeps it."""
    from transformers import masking_utils

    with patch.object(masking_utils, "_ignore_causal_mask_sdpa", lambda *args, **kwargs: False):
        yield


def _evaluate(model: nn.Module, rows: int, length: int) -> None:
    """Their mean loss per token of a few long texts."""
    with torch.inference_mode():
        tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
        outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        for logits, targets in zip(outputs.logits[:, -length:], tokens, strict=True):
            torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, row: Row, length: int, number: int) -> Any:
    """One step of their loop; returns what it keeps."""
    tokens = torch.empty((row["batch_size"], length), dtype=torch.int64, device="meta")
    mask, labels = torch.ones_like(tokens), tokens.clone()
    optimizer.zero_grad()
    with torch.autocast("meta", dtype=torch.float16) if row["use_amp"] else nullcontext():
        outputs = model(input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=tokens.numel())
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if row["peft_config"].get("peft_type") == "ADALORA":  # as their loop asks
        model.base_model.update_and_allocate(number)  # type: ignore[union-attr,operator]
    return outputs


# -- another length ---------------------------------------------------------------------------------------------------


class Resizer:
    """Derives the bytes at other lengths from two layers, in which every tensor of a layer occurs, too.

    Args:
        row: what is recorded.
        old: length of the step whose bytes are wanted at other lengths; never the first step's, in which the optimizer
            makes its state.
        lengths: the other lengths.
    """

    def __init__(self, row: Row, old: int, lengths: Sequence[int]) -> None:
        self._two_layers = record_loop(row, (old, old, *lengths), layers=2, evaluated=0)
        before, *after = self._two_layers.steps()[1:]
        self._changes = {new: _changes(before, step) for new, step in zip(lengths, after, strict=True)}

    def sizes(self, recording: Recording, place: int, new: int) -> list[int]:
        """Bytes of each storage of a recording, had the step at that place had another length.

        Raises:
            NotDerivableError: the code takes another path there.
        """
        changed = self._changes[new]
        if changed is None:
            raise NotDerivableError(f"the step at {new} tokens differs in its operations")
        others = (step for number, step in enumerate(recording.steps()) if number != place)
        elsewhere = {key for step in others for key in step}
        sizes = [size for _, _, size in recording.storages]
        first = recording.starts[place][1]
        for number, key in enumerate(recording.steps()[place], first):
            if key in changed:
                sizes[number] = changed[key]
            elif key not in elsewhere:  # one that is the same at two lengths stays so
                raise NotDerivableError(f"{key} does not occur in two layers")
        return sizes


def _changes(before: Sequence[Key], after: Sequence[Key]) -> dict[Key, int] | None:
    """What each tensor of a step becomes in another; null where the steps cannot be laid side by side."""
    if [op for op, _, _ in before] != [op for op, _, _ in after]:
        return None
    changes: dict[Key, int] = {}
    for key, (_, _, size) in zip(before, after, strict=True):
        if changes.setdefault(key, size) != size:
            return None
    return changes


# -- the allocator ----------------------------------------------------------------------------------------------------


def peak_reserved(recording: Recording, sizes: Sequence[int] | None = None) -> tuple[int, int]:
    """Bytes that the default allocator reserves at most, and hands out at most.

    Their count begins after a first small tensor, whose 2 MiB are left out.

    Args:
        recording: of `record_loop`.
        sizes: other bytes for its storages, of `Resizer.sizes`.
    """
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(4))
    start = allocator.reserved
    allocator.free(allocator.allocate(recording.loaded))
    live: dict[int, Any] = {}
    emptied = recording.starts[min(LONGEST, len(recording.starts) - 1)][0]
    for index, (number, size) in enumerate(recording.events):
        if index == emptied:
            allocator.empty_cache()
        if size > 0:
            live[number] = allocator.allocate(sizes[number] if sizes is not None else size)
        elif number in live:
            allocator.free(live.pop(number))
    return allocator.peak_reserved - start, allocator.peak_allocated


def generation_bound(recording: Recording) -> int:
    """Bytes reserved if every answer of an evaluation took all tokens that it may.

    Their evaluation generates up to 300 tokens for 50 rows at a time. Each token makes every layer's keys and values
    anew, a little larger: what was freed before is too small for them. Training is above this, unless many virtual
    tokens come on top. A bound, and no prediction: how long the answers were is not known.
    """
    allocator = CachingAllocator()
    allocator.allocate(recording.loaded)
    per_token = 50 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 2
    groups = SHAPE["num_attention_heads"] // SHAPE["num_key_value_heads"]
    for prompt in (150, 230, 190):
        cached = [allocator.allocate(per_token * (prompt + recording.virtual)) for _ in range(2 * LAYERS)]
        for length in range(prompt + recording.virtual, prompt + recording.virtual + 300):
            for place, old in enumerate(cached):
                cached[place] = allocator.allocate(per_token * (length + 1))
                allocator.free(old)
                if place % 2:  # keys and values once for each query head, as a mask rules grouped heads out
                    repeated = [allocator.allocate(groups * per_token * (length + 1)) for _ in range(2)]
                    for block in repeated:
                        allocator.free(block)
        for block in cached:
            allocator.free(block)
    return allocator.peak_reserved
