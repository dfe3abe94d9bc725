"""What a rank sends to the others in a collective operation, as rings do it (NCCL's choice for large messages)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    # torch.distributed's own, then those of DTensor
    *("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "send"),
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"),
)


def sent_bytes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Bytes that each rank of a ring sends.

    Of N ranks, 2 (N - 1) / N of what is added up everywhere (`all_reduce`), (N - 1) / N of the whole that is put
    together (`all_gather`) or added up and cut (`reduce_scatter`): Patarasuk and Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002.

    Args:
        name: of `COLLECTIVES`.
        args, kwargs: of the operation, as a dispatch mode sees it.
    """
    tensors = [t for value in args for t in (value if isinstance(value, list | tuple) else [value])]
    largest = max((t.nbytes for t in tensors if isinstance(t, Tensor)), default=0)
    if name == "send":
        return largest
    number = ranks_of(args)
    whole = largest * number if name == "all_gather_into_tensor" else largest
    return (2 if name in ("allreduce_", "all_reduce") else 1) * whole * (number - 1) / number


def ranks_of(args: Sequence[Any]) -> int:
    """Size of the process group among an operation's arguments: the group itself, or its name."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group: Any = dist.ProcessGroup
            return int(group.unbox(value).size())
    from torch.distributed import distributed_c10d

    name = [value for value in args if isinstance(value, str)][-1]
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return int(resolve(name).size())
