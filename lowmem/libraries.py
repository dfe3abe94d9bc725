"""Imports of third-party libraries that need care."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any


def import_bitsandbytes() -> Any:
    """bitsandbytes, without the code it would fetch.

    bitsandbytes 0.50 looks for a kernel on a hub while it is imported, where the package `kernels` is installed
    (`backends/cpu/ops.py`). Code from a hub is run only by an explicit switch, so `kernels` is hidden meanwhile.
    """
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    absent = object()
    hidden: ModuleType | object | None = sys.modules.get("kernels", absent)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.setLevel(logging.ERROR)  # it would warn that the fetch failed
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes
    finally:
        if hidden is absent:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = hidden  # type: ignore[assignment]
    return bitsandbytes
