"""A stage of a pipeline on the meta device: torch's own schedules, in which a few micro-batches stand for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lowmem.ops.without_data import called, repeated

BUFFERS = "communication"


@contextmanager
def few_stand_for_all(stage: Any, number: int, *, alternating: bool, train: bool) -> Iterator[int]:
    """Inside, a schedule runs on the meta device, and with fewer micro-batches holds and sends what `number` would.

    Buffers are there for all of them, as torch 2.13 makes them before the first one runs. Where forwards and backwards
    alternate, all that come after the first time round are alike; else all run.

    Args:
        stage: torch's `PipelineStage`.
        number: micro-batches of the pass.
        alternating: the schedule is 1F1B.
        train: a backward pass follows.

    Gives the number of micro-batches to run.
    """
    from torch.distributed.pipelining import schedules

    few = min(number, stage.num_stages + 2) if alternating else number

    def initialize(*_: Any, **__: Any) -> tuple[bool, bool]:
        """What shapes are known the ranks agree upon by a vote, whose outcome nobody could read here."""
        with called(BUFFERS):
            stage._inference_mode = vars(schedules)["InferenceMode"].STATIC
            stage._prepare_forward_infra(number, (), has_backward=train)
            if train:
                stage._prepare_backward_infra(number)
        return True, train

    with ExitStack() as stack:
        base = vars(schedules)["_PipelineSchedule"]
        stack.enter_context(patch.object(base, "_initialize_pp_stages", initialize))
        stack.enter_context(patch.object(schedules, "_batch_p2p", _one_by_one))
        stack.enter_context(repeated(number / few))
        yield few


def _one_by_one(operations: list[Any], desc: str | None = None) -> list[Any]:
    """What goes both ways at once torch hands to the backend of the tensors' device, and this one has none."""
    peers = {"isend": "group_dst", "irecv": "group_src"}
    return [
        one.op(one.tensor, group=one.group, tag=one.tag, **{peers[one.op.__name__]: one.group_peer})
        for one in operations
    ]
