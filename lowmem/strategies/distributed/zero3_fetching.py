"""When DeepSpeed's stage 3 puts weights together and lets go of them, on the meta device.

Written after `PartitionedParameterCoordinator` and the hooks of `DeepSpeedZeRoOffload` (deepspeed 0.19.8,
deepspeed/runtime/zero). The first pass is not followed, the second is written down, and from the third on weights are
fetched ahead of the modules that need them, and kept while they are needed again soon.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowmem.ops.without_data import called
from lowmem.strategies.distributed.zero_without_data import META, Settings

TOGETHER = "layers put together"
_NEVER = -(10**10)


@dataclass(eq=False)
class Cut:
    """A weight of which this rank holds a part.

    Attributes:
        parameter: the whole while it is there, else empty.
        number: their order.
        part: this rank's.
        away: whether the part lies in the host's memory, and the weight is computed with on a card.
        stays: whether it is kept whole between two updates.
        status: whether the whole is there.
        users: modules that compute with it now.
    """

    parameter: nn.Parameter
    number: int
    part: Tensor
    away: bool
    stays: bool = False
    status: Literal["absent", "in flight", "there"] = "there"
    users: set[nn.Module] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return int(self.parameter.ds_numel)  # type: ignore[attr-defined]

    def on_device(self) -> Tensor:
        """The part where it is sent from."""
        return torch.empty_like(self.part) if self.away else self.part

    def take(self, flat: Tensor) -> None:
        """The whole is there."""
        shape: Any = self.parameter.ds_shape  # type: ignore[attr-defined]
        self.parameter.data = flat[: self.size].view(shape)

    def let_go(self) -> None:
        """Only the part is left."""
        self.parameter.data = self.parameter.data.new_empty(0)
        self.status = "absent"


class Message:
    """Parts on their way into one buffer, from which weights are copied when the first of them is waited for."""

    def __init__(self, cuts: list[Cut], settings: Settings) -> None:
        self.cuts, self.ranks, self.done = sorted(cuts, key=lambda cut: cut.number), settings.ranks, False
        self.buffers: list[tuple[Tensor, list[Cut]]] = []
        for cut in self.cuts:
            cut.status = "in flight"
        if len(self.cuts) == 1:
            (cut,) = self.cuts
            cut.take(_gathered([cut], settings))
            return
        by_dtype: dict[torch.dtype, list[Cut]] = defaultdict(list)
        for cut in self.cuts:
            by_dtype[cut.part.dtype].append(cut)
        self.buffers = [(_gathered(same, settings), same) for same in by_dtype.values()]

    def wait(self) -> None:
        """All weights of the message are there. The buffer is, too, until nobody has the message any more."""
        if self.done:
            return
        for buffer, cuts in self.buffers:
            parts, offset = buffer.view(self.ranks, -1), 0
            for cut in cuts:
                size = len(cut.part)
                with called(TOGETHER):
                    cut.take(torch.cat([part[offset : offset + size] for part in parts]))
                offset += size
        for cut in self.cuts:
            cut.status = "there"
        self.done = True


def _gathered(cuts: list[Cut], settings: Settings) -> Tensor:
    size = sum(len(cut.part) for cut in cuts)
    with called(TOGETHER):
        buffer = torch.empty(size * settings.ranks, dtype=cuts[0].part.dtype, device=META)
        mine: Tensor = cuts[0].on_device()
        if len(cuts) > 1:
            mine = torch.cat([cut.on_device() for cut in cuts], out=buffer[:size])
        dist.all_gather_into_tensor(buffer, mine, group=settings.group)
    return buffer


def gather_now(cuts: list[Cut], settings: Settings) -> None:
    """Each weight in a buffer of its own."""
    for cut in cuts:
        cut.take(_gathered([cut], settings))
        cut.status = "there"


class Fetching:
    """Puts weights together around the modules that compute with them.

    Args:
        root: the pass.
        cuts: of its weights.
        settings: see there.
    """

    def __init__(self, root: nn.Module, cuts: dict[nn.Parameter, Cut], settings: Settings) -> None:
        self.cuts, self.settings = cuts, settings
        zero = settings.zero
        self._ahead = int(zero["stage3_prefetch_bucket_size"])
        self._most = int(zero.get("stage3_max_live_parameters", 1_000_000_000))
        self._soon = int(zero.get("stage3_max_reuse_distance", 1_000_000_000))
        self._mode: Literal["unknown", "written down", "known"] = "unknown"
        self._order: list[nn.Module] = []
        self._uses: list[tuple[Cut, int]] = []
        self._queue: deque[tuple[Cut, int]] = deque()
        self._fetched_for: dict[Cut, int] = defaultdict(lambda: _NEVER)
        self._coming: dict[Cut, Message] = {}
        self._step = self._live = 0
        self._to_release: dict[tuple[nn.Module, int], set[Cut]] = {}  # what is found first stays
        self._backward: dict[nn.Module, None] = {}  # modules in backward
        self._recomputed: dict[nn.Module, set[Cut]] = defaultdict(set)
        self._inside: list[nn.Module] = []
        self._others: dict[nn.Module, dict[Cut, None]] = defaultdict(dict)  # weights of other modules that one reads
        self._looking = False  # for such weights
        root.register_forward_pre_hook(lambda *_: self._new_pass())
        root.register_forward_hook(lambda *_: setattr(self, "_looking", False))
        for module in root.modules():
            if module._parameters:
                module._parameters = _Looked(module._parameters, self._read)
            _Hooks(module, self)

    # -- the order of modules -----------------------------------------------------------------------------------------

    def _new_pass(self) -> None:
        for cut, message in self._coming.items():
            message.wait()
            self._release(cut)
        self._coming.clear()
        if self._mode == "unknown":
            self._mode = "written down"
        elif self._mode == "written down":
            self._write_down()
            self._mode = "known"
        self._queue = deque(self._uses)
        self._fetched_for.clear()
        self._step = self._live = 0
        self._looking = True

    def _write_down(self) -> None:
        self._uses = []
        for step, module in enumerate(self._order):
            for cut in sorted(self._of(module), key=lambda cut: cut.number):
                self._uses.append((cut, step))

    def _follow(self, module: nn.Module) -> None:
        known = self._mode == "known"
        if known and (self._step >= len(self._order) or self._order[self._step] is not module):
            self._mode = "unknown"
            self._order, self._uses = [], []
            self._fetched_for.clear()
            self._queue.clear()
            for cut, message in self._coming.items():
                message.wait()
                self._release(cut)
            self._coming.clear()
        if self._mode == "written down":
            self._order.append(module)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _of(self, module: nn.Module) -> set[Cut]:
        own = (p for p in dict.values(module._parameters) if p is not None)
        return {self.cuts[p] for p in own} | set(self._others.get(module, ()))

    def _read(self, parameter: nn.Parameter) -> None:
        """A weight is read: another module's, if it is not there."""
        cut = self.cuts.get(parameter)
        if cut is not None and cut.status == "absent" and self._looking:
            self._others[self._inside[-1]][cut] = None
            with torch.no_grad():
                gather_now([cut], self.settings)

    @torch.no_grad()
    def fetch(self, module: nn.Module, forward: bool) -> None:
        """A module begins."""
        self._follow(module)
        if not forward:
            self._backward[module] = None
        needed = self._of(module)
        self._send_for(needed)
        recomputing = forward and torch._C._current_graph_task_id() != -1
        for cut in needed:
            cut.users.add(module)
            if recomputing and self._backward and not cut.parameter.requires_grad:
                last = next(reversed(self._backward))
                self._recomputed[last].add(cut)
                cut.users.add(last)
            if cut in self._coming:
                self._coming.pop(cut).wait()
        if self._mode == "known":
            self._fetch_ahead(needed)
        self._step += 1

    def _send_for(self, cuts: Iterable[Cut]) -> None:
        absent = [cut for cut in cuts if cut.status == "absent"]
        if absent:
            self._live += sum(cut.size for cut in absent)
            message = Message(absent, self.settings)
            self._coming.update(dict.fromkeys(absent, message))

    def _fetch_ahead(self, needed: set[Cut]) -> None:
        new = {cut for cut in needed if self._fetched_for[cut] < self._step}
        seen: set[Cut] = set()
        while self._queue and len(seen) < len(new):
            cut, step = self._queue.popleft()
            self._fetched_for[cut] = step
            seen.add(cut)
        room, total, ahead = min(self._most - self._live, self._ahead), 0, dict[Cut, None]()
        while self._queue and total < room:
            cut, step = self._queue.popleft()
            self._fetched_for[cut] = max(self._fetched_for[cut], step)
            if cut.status == "absent" and cut not in ahead:
                ahead[cut] = None
                total += cut.size
        self._send_for(ahead)

    # -- letting go ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def leave(self, module: nn.Module, forward: bool) -> None:
        """A module ends."""
        released = self._no_longer_needed(module) if self._mode == "known" else self._of(module)
        mine = self._of(module)
        if not forward:
            again = self._recomputed.pop(module, set())
            released = released | {cut for cut in again if not cut.stays}
            mine |= again
            self._backward.pop(module, None)
        for cut in mine:
            cut.users.discard(module)
            if cut in released:
                self._release(cut)

    def _no_longer_needed(self, module: nn.Module) -> set[Cut]:
        key = module, self._step
        if key not in self._to_release:
            found = {cut for cut in self._of(module) if not cut.stays and self._fetched_for[cut] <= self._step}
            passed = 0
            for other in self._order[self._step :]:
                if passed >= self._soon:
                    break
                for cut in self._of(other):
                    found.discard(cut)
                    passed += cut.size
            self._to_release[key] = found
        return self._to_release[key]

    def _release(self, cut: Cut) -> None:
        if cut.status == "there" and not cut.users:
            cut.let_go()
            self._live -= cut.size

    def after_backward(self) -> None:
        """What modules have kept whose backward nobody saw ending."""
        while self._backward:
            module, _ = self._backward.popitem()
            for cut in self._of(module) | self._recomputed.pop(module, set()):
                cut.users.discard(module)
                if not cut.stays:
                    self._release(cut)

    def release_all(self) -> None:
        """Only parts are left."""
        for cut in self.cuts.values():
            if cut in self._coming:
                self._coming.pop(cut).wait()
            cut.users.clear()
            self._release(cut)


class _Looked(OrderedDict[str, Any]):
    """A module's parameters; whoever reads one is seen."""

    def __init__(self, parameters: Any, seen: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._seen = seen

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None and self._seen is not None:
            self._seen(parameter)
        return parameter


class _Calling(torch.autograd.Function):
    """The identity; something is called when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Callable[[], None]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


class _Hooks:
    """Around a module's forward, and in its backward before the first and after the last of its gradients."""

    def __init__(self, module: nn.Module, fetching: Fetching) -> None:
        self.module, self.fetching = module, fetching
        self.outputs = self.inputs = 0  # whose gradients are to come
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)
        module.register_forward_hook(lambda _module, _args, output: _each(self._output, output))
        module.register_forward_pre_hook(self._all_inputs)

    def _begin(self, *_: Any) -> None:
        self.fetching._inside.append(self.module)
        self.fetching.fetch(self.module, forward=True)

    def _end(self, *_: Any) -> None:
        self.fetching._inside.pop()
        self.fetching.leave(self.module, forward=True)

    def _output(self, tensor: Tensor) -> Tensor:
        self.outputs += 1
        found: Tensor = _Calling.apply(tensor, self._before_backward)  # type: ignore[no-untyped-call]
        return found

    def _before_backward(self) -> None:
        if self.outputs > 0:
            self.fetching.fetch(self.module, forward=False)
            self.outputs -= 1

    def _all_inputs(self, _: Any, args: Any) -> Any:
        self.inputs = 0
        return _each(self._input, args)

    def _input(self, tensor: Tensor) -> Tensor:
        self.inputs += tensor.requires_grad
        found: Tensor = _Calling.apply(tensor, self._after_input)  # type: ignore[no-untyped-call]
        return found

    def _after_input(self) -> None:
        self.inputs -= 1
        if self.inputs == 0:
            self.fetching.leave(self.module, forward=False)


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value, with the function applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _each(function, value[key])
        return value
    if isinstance(value, tuple | list):
        found = [_each(function, item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value
