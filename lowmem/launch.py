"""Several processes of a command on this machine, started and watched by torchrun's own agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import Any

from lowmem.errors import UserError

# After Ctrl-C the step at hand is finished and saved; torchrun's default of 30 seconds is short for that.
_SECONDS_TO_END = 120


def launch(arguments: list[str], number: int) -> int:
    """Run `python -m lowmem ARGUMENTS` in `number` processes, as torchrun does; the exit code of the one that failed.

    Raises:
        UserError: this process is itself one of several.
    """
    if "WORLD_SIZE" in os.environ:
        raise UserError("--nproc: torchrun (or accelerate) has started this process already; leave --nproc out")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it tells, the ranks tell, too
    patience: dict[str, Any] = (
        {"shutdown_timeout": _SECONDS_TO_END} if "shutdown_timeout" in LaunchConfig.__annotations__ else {}
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="127.0.0.1",
        **patience,  # torch before 2.13 knows no other than its own
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", "lowmem", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        print(f"rank {rank} {how}; the others were stopped", file=sys.stderr)
        return 1 if code < 0 else code
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0
