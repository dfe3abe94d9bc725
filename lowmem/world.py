"""The processes that share a run: who they are, how they are arranged, and what they tell one another."""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowmem.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

V = TypeVar("V")

DIMENSIONS = ("data", "pipeline", "tensor")  # neighbours, which talk most, are the ranks of one tensor group
TIMEOUT = "LOWMEM_TIMEOUT"  # seconds that a rank waits for the others
_TIMEOUT = 600.0


_foreseen = [(1, 0)]  # ranks of a run on the meta device, and which of them it is; the last one counts


@contextmanager
def ranks_foreseen(number: int, rank: int = 0) -> Iterator[None]:
    """Inside, a run on the meta device is that of one rank of so many."""
    _foreseen.append((number, rank))
    try:
        yield
    finally:
        _foreseen.pop()


@dataclass
class World:
    """The processes of a run. One process is a world of its own, in which nothing needs to be told.

    Attributes:
        rank: number of this process.
        size: processes in all.
        local_rank: number of this process on its machine, which is the number of its card.
        device_type: `cuda` or `cpu`: what the processes compute with; `meta`: this is a rank of a prediction.
        sizes: ranks along each dimension, as strategies have claimed them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device_type: str = "cpu"
    sizes: dict[str, int] = field(default_factory=dict)
    _beat: int = field(default=0, init=False, repr=False)

    @classmethod
    def start(cls, device: torch.device) -> World:
        """Join the processes that torchrun (or accelerate, or Slurm with the same variables) has started.

        Raises:
            UserError: the others cannot be reached, or there are fewer cards than processes.
        """
        if device.type == "meta":
            size, rank = _foreseen[-1]
            return cls(rank, size, device_type=device.type)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device_type=device.type)
        rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        world = cls(rank, size, local, device.type)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=timedelta(seconds=_timeout()))
                world.wait()  # a rank that goes on, and is refused, would cut off those that are still joining
            except (RuntimeError, ValueError) as error:
                text = " ".join(str(error).split())[:200]
                raise UserError(f"rank {rank} of {size} could not join the others: {text}") from error
            atexit.register(leave)  # gloo's threads may hold tensors, and would end an interpreter that goes by SIGABRT
        return world

    # -- arrangement --------------------------------------------------------------------------------------------------

    def claim(self, dimension: str, size: int, owner: str) -> None:
        """A strategy arranges ranks along `dimension` (of `DIMENSIONS`), `size` in a group.

        Raises:
            UserError: the processes cannot be divided so.
        """
        taken = math.prod(self.sizes.values()) * size
        if self.size % taken:
            others = "".join(f" x {number} ({name})" for name, number in self.sizes.items())
            raise UserError(
                f"{owner}: {size} processes in a group{others} do not divide the {self.size} that were started; start "
                f"a multiple of {taken}"
            )
        self.sizes[dimension] = size

    def claim_rest(self, dimension: str, owner: str) -> int:
        """Arrange what no other strategy has claimed along `dimension`; how many that are in a group.

        Raises:
            UserError: there is nobody left to share with.
        """
        rest = self.size // math.prod(self.sizes.values())
        if rest == 1 and self.size > 1:
            taken = " x ".join(f"{number} ({name})" for name, number in self.sizes.items())
            raise UserError(
                f"{owner}: all {self.size} processes are taken ({taken}); start more, or set a smaller size there, or "
                f"drop {owner}"
            )
        self.sizes[dimension] = rest
        return rest

    def require_use(self, owners: list[str]) -> str | None:
        """That every process has work of its own; a remark where strategies have nobody to share it with.

        Args:
            owners: names of the strategies that share work among processes.

        Raises:
            UserError: processes would all do the same.
        """
        if owners and self.size == 1 and self.device_type != "meta":
            return f"{owners[0]}: one process, so nothing is shared; start more with --nproc N, or with torchrun"
        used = math.prod(self.sizes.values())
        if used != self.size:
            what = f"{used} of them share the work" if owners else "no strategy shares the work among them"
            raise UserError(
                f"{self.size} processes were started, and {what}; add ddp or fsdp_2 (strategies), or start {used}"
            )
        return None

    def group_size(self, dimension: str) -> int:
        """Ranks in a group along this dimension; 1 where nobody has claimed it."""
        return self.sizes.get(dimension, 1)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, arranged; `mesh["data"]` and the like are its parts."""
        shape = tuple(self.group_size(name) for name in DIMENSIONS)
        if self.device_type == "meta":
            return _foreseen_mesh(shape, self.rank)
        with self.explained():
            mesh = _mesh(self.device_type, shape)
            self.wait()  # its groups are connected one by one: as in `start`
        return mesh

    def group(self, dimension: str) -> Any:
        """The process group of this rank along a dimension."""
        return self.mesh.get_group(dimension)

    def place(self, dimension: str) -> int:
        """This rank's number in its group along a dimension."""
        return 0 if self.group_size(dimension) == 1 else self.mesh.get_local_rank(dimension)

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def is_silent(self) -> bool:
        """Whether nothing is ever sent: one process, or a prediction on the meta device."""
        return self.size == 1 or self.device_type == "meta"

    # -- messages -----------------------------------------------------------------------------------------------------

    def sum(self, value: Tensor, dimension: str | None = None) -> Tensor:
        """The sum of a tensor over all ranks, or over those of this rank's group along a dimension; on all of them."""
        if self.is_silent or (dimension and self.group_size(dimension) == 1):
            return value
        total = value.detach().clone()
        dist.all_reduce(total, group=self.group(dimension) if dimension else None)
        return total

    def highest(self, value: float) -> float:
        """The highest of a number over all ranks. It goes through the hosts, so no card waits."""
        if self.is_silent:
            return value
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.highest(float(here)))

    def from_main(self, value: V) -> V:
        """What rank 0 has, on all ranks."""
        if self.is_silent:
            return value
        carried = [value]
        dist.broadcast_object_list(carried, src=0, device=torch.device("cpu"))
        return carried[0]

    def from_all(self, value: V) -> list[V]:
        """What every rank has, in their order."""
        if self.is_silent:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        """Go on only when all ranks have come here."""
        self.highest(0.0)

    # -- the end ------------------------------------------------------------------------------------------------------

    def beat(self, step: int) -> None:
        """Tell that this rank is alive, after each step."""
        self._beat = step
        if not self.is_silent:
            _store().set(f"lowmem/alive/{self.rank}", f"{step} {time.time()}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A collective operation that failed becomes one line that names the rank which has gone.

        Raises:
            UserError: another rank has failed, or does not answer.
        """
        try:
            yield
        except RuntimeError as error:
            if self.is_silent or not _is_of_a_collective(error):
                raise
            raise UserError(self._who_has_gone(error)) from error
        except BaseException as error:
            if not self.is_silent:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        try:
            text = " ".join(str(error).split())[:300] or type(error).__name__
            _store().set(f"lowmem/failed/{self.rank}", text)
        except RuntimeError:
            pass  # nobody is left to be told

    def _who_has_gone(self, error: RuntimeError) -> str:
        here = f"rank {self.rank} (step {self._beat})"
        first_line = str(error).strip().splitlines()[0][:200]
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which comes as soon as one rank has gone
        try:
            store = _store()
            time.sleep(1.0)  # who has failed may be about to say so
            for rank in range(self.size):
                if rank != self.rank and store.check([f"lowmem/failed/{rank}"]):
                    return f"rank {rank} failed ({store.get(f'lowmem/failed/{rank}').decode()}), so {here} ends, too"
            last = {r: _last_sign(store, r) for r in range(self.size) if r != self.rank}
        except (RuntimeError, OSError):
            return f"{here}: the other ranks cannot be reached any more ({first_line})"
        rank = min(last, key=lambda r: last[r])
        step, seconds = last[rank]
        when = f"last sign of life: step {step}, {time.time() - seconds:.0f} s ago" if seconds else "it never began"
        return f"rank {rank} does not answer ({when}), so {here} ends, too; --resume goes on ({first_line})"


def _mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)


@cache
def _foreseen_mesh(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """Of a run on the meta device, for which torch has no groups of its own, as this rank sees it."""
    return _mesh("cpu", shape)


def _last_sign(store: Any, rank: int) -> tuple[int, float]:
    if not store.check([f"lowmem/alive/{rank}"]):
        return 0, 0.0
    step, seconds = store.get(f"lowmem/alive/{rank}").decode().split()
    return int(step), float(seconds)


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _is_of_a_collective(error: RuntimeError) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "tcpstore")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else _TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{TIMEOUT}: a number of seconds above 0; got {text}")
    return seconds


def leave() -> None:
    """Part from the other processes, at the end of a command or of the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()
