"""Bytes of all living tensor storages, and their peak, counted at every operation; the same ruler for any library.

What it sees: every storage that an operation of torch takes in or gives out, forward, recomputation and backward alike,
each once, from the operation that first shows it until it is freed. What it does not see: scratch memory inside one
operation (a matrix product's reordered operands), and memory outside torch. Peak RSS, printed beside it, covers both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context; inside it, `now` and `peak` follow the tensors. It slows the run down, so time another one.

    Args:
        known: tensors that live already (weights); operations would show them anyway, but later.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.peak_operation = "none"
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._see(tensor, "known")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._see(leaf, str(func))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._see(leaf, str(func))
        return result

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _see(self, tensor: object, operation: str) -> None:
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        old = self._sizes.get(key)
        if old == size:
            return
        if old is None:
            # The finalizer runs when the last reference, C++'s included, is gone.
            weakref.finalize(storage, self._forget, key).atexit = False
        self._sizes[key] = size
        self.now += size - (old or 0)
        if self.now > self.peak:
            self.peak, self.peak_operation = self.now, operation

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, shared ones once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _self_test() -> None:
    with LiveBytes() as live:
        a = torch.ones(1000)
        assert live.now == 4000, live.now
        b = a * 2
        view = b[10:]
        del b
        assert live.now == 8000, live.now
        del view
        assert (live.now, live.peak) == (4000, 8000), (live.now, live.peak)
        x = torch.ones(1000, requires_grad=True)
        y = (x.exp() * x).sum()  # saved for backward: exp(x)
        before = live.now
        y.backward()
        del y
        assert live.now < before + 4000, (live.now, before)
        live.reset_peak()
        torch.utils.checkpoint.checkpoint(lambda t: t.exp().exp(), x, use_reentrant=False).sum().backward()
        assert live.peak >= live.now + 4000, "the recomputation was not seen"
    print("live_bytes: counts as it should")


if __name__ == "__main__":
    import torch.utils.checkpoint

    _self_test()
