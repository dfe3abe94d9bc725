"""`lowmem plan`: what fits a card, and of that the fastest; and how far a card goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from lowmem.config import ModelConfig, TrainingConfig
from lowmem.errors import UserError
from lowmem.memory.cards import Card, card, card_for
from lowmem.memory.choose import Miss, Plan, Search, needed
from lowmem.memory.estimate import CONTEXT_BYTES, GIB
from lowmem.memory.furthest import LARGEST, Furthest
from lowmem.memory.guess import Problem
from lowmem.memory.search import METHODS, Axis, axes_for
from lowmem.memory.shapes import shape_config
from lowmem.memory.side_by_side import can_fork, side_by_side
from lowmem.memory.subject import model_config
from lowmem.memory.usable import usable
from lowmem.schema import nearest
from lowmem.sizes import parse_size

HOST_BYTES = 64 * GIB  # of the host's memory, where nobody says how much there is and a technique asks for it

__all__ = ["Miss", "NothingFitsError", "Plan", "furthest", "plan", "problem"]


class NothingFitsError(UserError):
    """No combination fits; the message says what would."""


def plan(
    model: str | ModelConfig,
    gpu_memory: int | str | None = None,
    *,
    gpu: str | None = None,
    host_memory: int | str | None = None,
    training: TrainingConfig | None = None,
    method: str | None = None,
    gpus: int = 1,
    few: int = 3,
    axes: Sequence[Axis] | None = None,
    fork: bool = False,
) -> list[Plan]:
    """Of all allowed combinations of strategies that fit, the fastest.

    Args:
        model: hub id, name of a known shape, folder, `config.json` or GGUF file; no weights are read.
        gpu_memory: of the card, bytes or such as `24GiB`; null: what `gpu` has.
        gpu: the card whose speed is reckoned with; null: the best-known one of that memory.
        host_memory: what the process may take of the host's memory; null: no bound, but `HOST_BYTES` for techniques
            that keep there what the card cannot hold.
        training: the numbers of the run; every row is taken to have `max_length` tokens.
        method: `full`, `lora` or `qlora`; null: all three.
        gpus: cards of that memory, each with a process of its own, which share the run.
        few: how many plans of a method that was given.
        axes: what is searched, in place of `axes_for(...)`.
        fork: several methods are searched side by side, in copies of this process, where the system can.

    What makes room at little cost is searched first; where that does not fit, slices of layers and the host's memory.

    Returns:
        With a method: its fastest plan, then slower ones that give up less. Without: the fastest of each method that
        fits, the first in the order full, lora, qlora (what is given up, least first) being the one to take.

    Raises:
        NothingFitsError: nothing fits.
        UserError: an unknown card, model or size.
    """
    asked: dict[str, Any] = {"gpu": gpu, "host_memory": host_memory, "training": training, "method": method}
    given = problem(model, gpu_memory, **asked, axes=axes, gpus=gpus)
    methods = _methods(method)
    found = _plans(given, methods, few if method else 1, fork)
    if not found and axes is None:
        given = problem(model, gpu_memory, **asked, gpus=gpus, further=True)
        found = _plans(given, methods, few if method else 1, fork)
    if not found:
        raise _nothing_fits(Search(given), methods)
    return found


def _plans(given: Problem, methods: Sequence[str], few: int, fork: bool) -> list[Plan]:
    """The fastest plans of each method, where there are any."""
    if fork and len(methods) > 1 and can_fork():
        tasks = [partial(_plans_apart, given, name) for name in methods]
        return [replace(one, problem=given) for plans in side_by_side(tasks) for one in plans]
    search = Search(given)
    return [one for name in methods for one in islice(search.plans(name), few)]


def _plans_apart(given: Problem, method: str) -> list[Plan]:
    """The fastest plan of a method, without the problem, which cannot travel between processes."""
    return [replace(one, problem=None) for one in islice(Search(given).plans(method), 1)]  # type: ignore[arg-type]


def furthest(
    model: str | ModelConfig,
    gpu_memory: int | str | None = None,
    *,
    value: str,
    gpu: str | None = None,
    host_memory: int | str | None = None,
    training: TrainingConfig | None = None,
    method: str | None = None,
    gpus: int = 1,
) -> tuple[int, Plan]:
    """The largest sequence length, batch or rank for which something fits.

    Args:
        model, gpu_memory, gpu, host_memory, training, method, gpus: as for `plan`.
        value: `seq_length`; `batch_size`: rows that pass at once (on each card), as any number fits in turn; `rank` of
            adapters.

    Returns:
        The value (of lengths the tolerance is 1 %), and what fits it.

    Raises:
        NothingFitsError: not even the smallest fits.
        UserError: as `plan`; or a value that is not known, or that the method does not have.
    """
    if value not in LARGEST:
        raise UserError(f"--max: {', '.join(LARGEST)}; got {value}")
    if value == "rank" and method == "full":
        raise UserError("--max rank: full fine-tuning has no adapters; use --method lora or qlora")
    methods = [name for name in _methods(method) if value != "rank" or name != "full"]
    asked: dict[str, Any] = {"gpu": gpu, "host_memory": host_memory, "training": training, "method": method}
    given = problem(model, gpu_memory, **asked, gpus=gpus, further=True)
    found = Furthest(given, value, methods).find()
    if found is None:
        raise _nothing_fits(Search(given), methods)
    return found


def problem(
    model: str | ModelConfig,
    gpu_memory: int | str | None,
    *,
    gpu: str | None = None,
    host_memory: int | str | None = None,
    training: TrainingConfig | None = None,
    method: str | None = None,
    axes: Sequence[Axis] | None = None,
    gpus: int = 1,
    further: bool = False,
) -> Problem:
    """What is to be planned; see `plan`.

    Args:
        further: with the techniques that are dear; for those that use it, the host's memory has a bound.
    """
    named = model if isinstance(model, ModelConfig) else ModelConfig(str(model))
    numbers = training or TrainingConfig()
    numbers = numbers if numbers.output_dir else replace(numbers, output_dir="out")  # the result is saved, too
    speed, capacity = _card(gpu_memory, gpu)
    half = "bfloat16" if speed.compute_capability >= (8, 0) else "float16"
    configs = cache(lambda dtype: model_config(replace(named, dtype=dtype)))
    found = Problem(
        configs,
        replace(named, name_or_path=_trainable_name(named.name_or_path, configs("auto"))),
        numbers,
        speed,
        capacity,
        parse_size(host_memory, "--host-memory") if host_memory is not None else HOST_BYTES if further else None,
        axes if axes is not None else axes_for(numbers, half, _methods(method), gpus=gpus, further=further),  # type: ignore[arg-type]
        gpus,
    )
    return usable(found) if further and axes is None else found


def _card(gpu_memory: int | str | None, gpu: str | None) -> tuple[Card, int]:
    """The card, and what its allocator may reserve."""
    if gpu_memory is None:
        if gpu is None:
            raise UserError("plan: give --gpu-memory (24GiB), or --gpu (rtx 4090)")
        found = card(gpu)
        return found, found.usable_bytes
    size = parse_size(gpu_memory, "--gpu-memory")
    if size <= CONTEXT_BYTES:
        raise UserError(f"--gpu-memory: CUDA itself takes {CONTEXT_BYTES / GIB} GiB; got {gpu_memory}")
    return card(gpu) if gpu else card_for(max(size, GIB)), size - CONTEXT_BYTES


def _methods(method: str | None) -> tuple[str, ...]:
    if method is None:
        return METHODS
    if method not in METHODS:
        near = nearest(method, METHODS)
        raise UserError(f"--method: {', '.join(METHODS)}; got {method}" + (f" (did you mean {near}?)" if near else ""))
    return (method,)


def _trainable_name(name: str, config: Any) -> str:
    """What a recipe calls the model: paths absolute, the folder of a `config.json`, a hub id for a short name."""
    path = Path(name)
    if path.exists():
        return str(path.parent.absolute() if path.name == "config.json" else path.absolute())
    shape = shape_config(name)
    return name if shape is None else str(shape._name_or_path)


def _nothing_fits(search: Search, methods: Iterable[str]) -> NothingFitsError:
    """What would: a larger card, or shorter rows."""
    given, names = search.problem, list(methods)
    leanest = search.leanest(names)
    found = search.estimate(leanest)
    asks, has = needed(found) + CONTEXT_BYTES, given.capacity + CONTEXT_BYTES
    words = ", ".join(leanest.settings()) or "no strategies"
    if asks <= has:
        return NothingFitsError(
            f"plan: --host-memory: nothing fits; {words} fits the card and needs {found.host_bytes / GIB:.2f} GiB of "
            f"the host's memory in {found.host_phase}"
        )
    message = (
        f"plan: nothing fits {has / GIB:.2f} GiB: with {' or '.join(names)} and {given.training.max_length:,} tokens a "
        f"row, the leanest combination tried needs {asks / GIB:.2f} GiB ({words})"
    )
    shorter = Furthest(given, "seq_length", names, below=given.training.max_length).find()
    hint = (
        f"; {shorter[0]:,} tokens a row would fit"
        if shorter
        else "; no length fits" + ("" if "qlora" in names else ", --method qlora needs less")
    )
    return NothingFitsError(f"{message}; a card with {math.ceil(asks / GIB)} GiB would do{hint}")
