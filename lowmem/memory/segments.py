"""Expandable segments of the CUDA allocator: switched on before CUDA starts, where the platform has them.

With them, memory that was freed in pieces serves larger requests later, so what is reserved stays near what is in use.
The allocator reads its settings once, from the environment, when it is first asked for memory.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem.run import Run

# The first is read by every torch that lowmem runs on; the second is its older name, which torch still honours.
_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OPTION = "expandable_segments"


def platform_has_them() -> bool:
    """Linux has; Windows has not, and neither has Linux inside Windows (WSL), whose driver maps no memory later."""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()


def turn_on(environment: MutableMapping[str, str] = os.environ, *, supported: bool | None = None) -> bool:
    """Ask for expandable segments, unless the user has decided otherwise; torch must not have started CUDA yet.

    Other options of the user stay. `expandable_segments:False` is left alone, and so is another allocator
    (`backend:cudaMallocAsync`), which has no segments.

    Args:
        environment: changed in place.
        supported: whether the platform has them; by default, this one is asked.

    Returns:
        Whether they will be used.
    """
    if _decided(environment):
        return will_be_used(environment, supported=supported)
    if not (platform_has_them() if supported is None else supported):
        return False
    for name in [name for name in _NAMES if environment.get(name)] or _NAMES[:1]:
        environment[name] = ",".join(filter(None, (environment.get(name, "").strip().rstrip(","), f"{_OPTION}:True")))
    return True


def will_be_used(environment: MutableMapping[str, str] = os.environ, *, supported: bool | None = None) -> bool:
    """Whether the settings ask for them, and the platform has them; of several values, the last one counts.

    The value of `PYTORCH_ALLOC_CONF` wins over that of the older name.
    """
    values = [_values(environment.get(name, ""), _OPTION) for name in _NAMES]
    asked = next((found[-1] for found in values if found), "false")
    here = platform_has_them() if supported is None else supported
    return asked.lower() in ("true", "1") and here and not _other_backend(environment)


def prepare_allocator(run: Run) -> None:
    """Switch them on for a run on a card; where CUDA has been started already, a notice says that it is too late."""
    if run.device.type != "cuda" or _decided(os.environ) or not platform_has_them():
        return
    import torch  # not before `turn_on` was called

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        run.notice(
            "CUDA was started before the trainer was made, so its allocator keeps its default (no expandable segments) "
            f"and reserves more; set {_NAMES[0]}={_OPTION}:True before, or make the trainer first"
        )
        return
    turn_on()


def _decided(environment: MutableMapping[str, str]) -> bool:
    """The user has said something about it: yes, no, or an allocator without segments."""
    return _other_backend(environment) or any(_values(environment.get(name, ""), _OPTION) for name in _NAMES)


def _other_backend(environment: MutableMapping[str, str]) -> bool:
    chosen = [value for name in _NAMES for value in _values(environment.get(name, ""), "backend")]
    return any(value != "native" for value in chosen)


def _values(settings: str, option: str) -> list[str]:
    """What is set for one option in `a:1,b:[x:1,y:2]`; a value in brackets is none of ours."""
    pairs = (part.partition(":") for part in settings.split(","))
    return [value.strip() for name, _, value in pairs if name.strip() == option]
