"""What DistributedDataParallel holds and sends, on the meta device, on which its reducer (in C++) cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lowmem.ops.without_data import called

_MIB = 2**20


@dataclass
class _Bucket:
    """Gradients that are sent together: one tensor, of which each gradient is a view."""

    flat: Tensor
    to_come: int


class DDPWithoutData:
    """Stands for `DistributedDataParallel(module, bucket_cap_mb=..., gradient_as_bucket_view=True)` of torch 2.13.

    Buckets are there from the first pass on, whatever `zero_grad` does. A gradient that autograd made is copied into
    its bucket in a pass that sends; in one that does not (`no_sync`) it stays beside it.

    Args:
        module: the pass.
        group: process group.
        bucket_cap_mb: MiB of gradients in a bucket.
    """

    def __init__(self, module: nn.Module, group: Any, bucket_cap_mb: float) -> None:
        self._module, self._group, self._cap = module, group, int(bucket_cap_mb * _MIB)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._views: dict[int, tuple[_Bucket, Tensor]] = {}
        self._buckets: list[tuple[_Bucket, int]] = []
        self._sends = True
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        """The pass."""
        if not self._views:
            self._make_buckets()
        for bucket, size in self._buckets:
            bucket.to_come = size
        return self._module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank."""
        self._sends = False
        try:
            yield
        finally:
            self._sends = True

    def _make_buckets(self) -> None:
        assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        for indices in assign(self._parameters, [self._cap])[0]:
            members = [self._parameters[index] for index in indices]
            with called("gradients"):
                flat = members[0].new_empty(sum(p.numel() for p in members))
            bucket = _Bucket(flat, len(members))
            self._buckets.append((bucket, len(members)))
            parts = flat.split([p.numel() for p in members])
            for parameter, part in zip(members, parts, strict=True):
                self._views[id(parameter)] = bucket, part.view(parameter.shape)

    def _arrived(self, parameter: Tensor) -> None:
        if not self._sends:
            return
        bucket, view = self._views[id(parameter)]
        view.copy_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = view
        bucket.to_come -= 1
        if not bucket.to_come:
            dist.all_reduce(bucket.flat, group=self._group)
