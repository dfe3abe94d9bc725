"""Imports of third-party libraries that need care."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


def import_bitsandbytes() -> Any:
    """bitsandbytes, without the code it would fetch.

    bitsandbytes 0.50 looks for a kernel on a hub while it is imported, where the package `kernels` is installed
    (`backends/cpu/ops.py`). Code from a hub is run only by an explicit switch, so `kernels` is hidden meanwhile.

    It also hands functions to torch.compile, which loads inductor, for seconds; they are handed over when they are
    called first.
    """
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    absent = object()
    hidden: ModuleType | object | None = sys.modules.get("kernels", absent)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.setLevel(logging.ERROR)  # it would warn that the fetch failed
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        with patch.object(torch, "compile", _compiled_when_called(torch.compile)):
            import bitsandbytes
    finally:
        if hidden is absent:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = hidden  # type: ignore[assignment]
    return bitsandbytes


def _compiled_when_called(compile: Callable[..., Any]) -> Callable[..., Any]:
    def later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = cache(lambda: compile(function, **options))

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return called

    return later
