"""Every storage that is born and dies while something runs: bytes, operation, phase, category."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lowmem.memory.operation import Operation, likeness
from lowmem.ops.without_data import known_place, label_now, place_now, times_now
from lowmem.sharded import holds_parts

if TYPE_CHECKING:
    from lowmem.memory.work import Work

# `:4096:2:16:8`, the default of cuBLAS before Hopper (pytorch#95668)
CUBLAS_WORKSPACE = 8_519_680


@dataclass(slots=True)
class Storage:
    """One storage.

    Attributes:
        size: bytes, unrounded.
        op: the operation that returned it first (`aten.mm.default`), and the shape it returned it in.
        phase: when it was born (`load`, `forward`, `backward`, `step`, `evaluate` ...).
        label: its category, where it is known.
        place: the part of the model that was at work (`layer 12`), where it is known.
        kept_on: `device`; `host`; `pinned` (host memory that the card reads directly); `managed` (memory that moves
            between the two, and of which the allocator knows nothing); `nowhere` (shapes without memory).
    """

    size: int
    op: str
    shape: tuple[int, ...]
    phase: str
    label: str | None = None
    place: str | None = None
    kept_on: str = "device"


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the birth and death of every storage that an operation returns.

    Args:
        device: whose kernels' hidden bytes are recorded, too (`cuda`, `cpu`); null: none.
        work: is shown every operation, with its phase, for the time it would take; null: nothing is.

    Attributes:
        storages: number -> storage.
        events: (number of the storage, bytes); negative bytes: it died.
        host_events: the same for `host`, `pinned` and `managed` memory, where the device is a card (on a CPU there is
            no difference).
        times: when each event came, in seconds.
        marks: (number of events before it, phase) for each phase that was entered.
        phase: what is going on; inside a backward pass it is `backward` by itself.
        place: which part of the model is at work, for those who know.
    """

    def __init__(self, device: str | None = None, work: Work | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.work = work
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.host_events: list[tuple[int, int]] = []
        self.times: list[float] = []
        self.marks: list[tuple[int, str]] = []
        self.phase = "load"
        self.place: str | None = None
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._guards: dict[int, Any] = {}
        self._workspaces: set[str] = set()
        self._operations: dict[int, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what it returns."""
        if types and holds_parts(types):
            return NotImplemented  # torch comes back with the operations on this rank's parts, or on what has come
        known = self._operations.get(id(func))
        if known is None:
            known = self._operations[id(func)] = Operation(func, self.device)
        if known.is_promise:
            return func(*args, **(kwargs or {}))
        result = self._recall(func, args, kwargs or {}, known)
        if known.in_cublas:
            self._workspace()
        inside = () if known.hidden is None else [self._hidden(size, known.name) for size in known.hidden(args)]
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self.see(leaf, op=known.name)
            elif isinstance(leaf, tuple | list):
                for inner in leaf:
                    if isinstance(inner, Tensor):
                        self.see(inner, op=known.name)
        for number in inside:
            self._record(number, -self.storages[number].size)
        if self.work is not None:
            if known.copies and (size := self._over_the_bus(*args[:2])):
                self.work.moved(size, self._now(), hidden=True)
            else:
                self.work.see(func, args, kwargs, result, self._now(), times_now())
        return result

    def __enter__(self) -> Trace:
        """From now on, storages that grow or shrink (`fully_shard` empties its layers so) are seen, too."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = real(storage, size)
            self._resized(storage, before)
            return result

        self._patches = ExitStack()
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
        self._patches.enter_context(_questions_unseen())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """What dies later is no part of it."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()
        self._guards.clear()

    def _recall(self, func: Any, args: Any, kwargs: Any, operation: Operation) -> Any:
        """The operation's result; on the meta device one like the first of its kind, which is much faster."""
        key = likeness(args, kwargs) if operation.is_fresh else None
        if key is None:
            return func(*args, **kwargs)
        found = operation.results.get(key)
        if found is not None:
            shape, stride, dtype = found
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if result.untyped_storage()._cdata in given:
            operation.is_fresh = False  # `_unsafe_view`, whose schema does not say so
        elif result.is_meta:
            operation.results[key] = (tuple(result.shape), result.stride(), result.dtype)
        return result

    def _over_the_bus(self, target: Tensor, source: Tensor) -> int:
        """Bytes of a copy between card and host, where both are played by tensors without data; 0: it is none.

        Who keeps tensors in the host's memory copies them on a stream of its own.
        """
        if self.device != "cuda" or not (target.is_meta and source.is_meta):
            return 0
        places = {self.place_of(target), self.place_of(source)}
        return target.nbytes if "device" in places and places & {"host", "pinned"} else 0

    def _workspace(self) -> None:
        """cuBLAS keeps one workspace for the main thread and one for autograd's, once it has been called there."""
        phase = self._now()
        thread = "autograd" if phase == "backward" else "main"
        if thread not in self._workspaces:
            self._workspaces.add(thread)
            self._born(CUBLAS_WORKSPACE, f"cuBLAS workspace ({thread} thread)", (), "workspaces")

    def _hidden(self, size: int, name: str) -> int:
        return self._born(size, f"inside {name}", (), "inside kernels")

    def _born(
        self, size: int, op: str, shape: tuple[int, ...], label: str | None = None, kept_on: str = "device"
    ) -> int:
        number = len(self.storages)
        self.storages.append(Storage(size, op, shape, self._now(), label or label_now(), self.place, kept_on))
        self._record(number, size)
        return number

    def _record(self, number: int, size: int) -> None:
        kept_on = self.storages[number].kept_on
        if kept_on == "nowhere":
            return
        if self.device == "cuda" and kept_on != "device":
            self.host_events.append((number, size))
            return
        self.events.append((number, size))
        self.times.append(time.perf_counter())

    def _now(self) -> str:
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    def see(self, tensor: Tensor, label: str | None = None, op: str = "given") -> int:
        """Take note of a tensor's storage; a label names its category from now on, and in hindsight."""
        if tensor.layout is torch.sparse_coo:
            self.see(tensor._indices(), label, op)
            return self.see(tensor._values(), label, op)
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            size = storage.nbytes()
            number = self._numbers[address] = self._born(size, op, tuple(tensor.shape), kept_on=_place(tensor))
            self._guards[number] = weakref.ref(storage, lambda _, a=address, n=number, s=size: self._died(a, n, s))  # type: ignore[misc]
        if label is not None:
            self.storages[number].label = label
        return number

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """What had one size is another storage with the new one, at the same address."""
        address, size = storage._cdata, storage.nbytes()
        number = self._numbers.get(address)
        if number is None or before == size:
            return
        old = self.storages[number]
        self._guards.pop(number, None)
        self._record(number, -before)
        new = self._numbers[address] = self._born(size, "resize_", old.shape, old.label, old.kept_on)
        self._guards[new] = weakref.ref(storage, lambda _, a=address, n=new, s=size: self._died(a, n, s))  # type: ignore[misc]

    def place_of(self, tensor: Tensor) -> str | None:
        """Where a tensor's storage lies (`Storage.kept_on`); None where it was never seen."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else self.storages[number].kept_on

    def _died(self, address: int, number: int, size: int) -> None:
        self._numbers.pop(address, None)
        self._guards.pop(number, None)
        self._record(number, -size)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, what is born belongs to a phase."""
        before, self.phase = self.phase, phase
        self.marks.append((len(self.events), phase))
        try:
            yield
        finally:
            self.phase = before

    def label_rest(self, label: str) -> None:
        """A category for what lives now and has none."""
        for number in self._guards:
            self.storages[number].label = self.storages[number].label or label

    def mark(self, phase: str) -> None:
        """What lives now is seen as the first moment of a phase, also where nothing is born in it."""
        before, self.phase = self.phase, phase
        self._born(0, f"beginning of {phase}", ())
        self.phase = before

    # -- looking back -------------------------------------------------------------------------------------------------

    def peak(self) -> tuple[int, int]:
        """The most live bytes, and the index of the event that reached it."""
        live, highest, index = 0, -1, 0
        for i, (_, size) in enumerate(self.events):
            live += size
            if live > highest:
                highest, index = live, i
        return highest, index

    def live_at(self, index: int) -> list[Storage]:
        """The storages that lived after an event."""
        live: dict[int, int] = {}
        for number, size in self.events[: index + 1]:
            if size >= 0:
                live[number] = size
            else:
                live.pop(number, None)
        return [self.storages[number] for number in live]

    def holders(self, index: int) -> list[tuple[int, int, str]]:
        """What lived after an event by operation, shape and phase: (bytes, count, words), largest first."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for storage in self.live_at(index):
            words = f"{storage.label or storage.op} {list(storage.shape)} {storage.phase}"
            sizes[words] += storage.size
            counts[words] += 1
        return [(size, counts[words], words) for words, size in sizes.most_common()]


@contextmanager
def _questions_unseen() -> Iterator[None]:
    """Inside, torch finds out the shapes of spread tensors, for which it runs operations without data, unseen."""
    module: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    real = module.ShardingPropagator._propagate_tensor_meta_non_cached

    def asked(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return real(self, schema)

    with patch.object(module.ShardingPropagator, "_propagate_tensor_meta_non_cached", asked):
        yield


def _place(tensor: Tensor) -> str:
    """Where a new tensor lies; inside `with torch.device("meta")` modules are made that get their weights later."""
    if getattr(tensor, "is_paged", False):  # bitsandbytes' mark
        return "managed"
    if tensor.is_meta and getattr(_device.CURRENT_DEVICE, "type", None) == "meta":
        return "nowhere"
    return place_now() or known_place(tensor) or ("device" if tensor.device.type != "cpu" else "host")
