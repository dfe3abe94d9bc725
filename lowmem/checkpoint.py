"""Checkpoints: whole or not there, with checksums; state by parameter name; nothing is unpickled."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.durable import MANIFEST, DamagedError, new_folder, remove, verify
from lowmem.errors import UserError
from lowmem.run import Run
from lowmem.sharded import copy_whole, gathered, is_part
from lowmem.strategy import Stage, Strategy
from lowmem.weights import complete_state, load_weights, save_weights
from lowmem.world import World

_NAME = re.compile(r"checkpoint-(\d+)")
_AT_ONCE = 2**26  # bytes of optimizer state that are mapped into memory together


def save(
    folder: Path, run: Run, optimizer: Optimizer, strategies: Sequence[Strategy], record: Mapping[str, Any]
) -> None:
    """Write a checkpoint so that `folder` either is whole or does not exist. All ranks must ask; rank 0 writes.

    Args:
        folder: `.../checkpoint-000120`; one that lies there is replaced.
        run: its model's trainable weights are saved (adapter files for peft), and the optimizer's state under the names
            of its trainable parameters.
        optimizer: `state` holds every parameter that has been stepped.
        strategies: each with what it must remember and its settings.
        record: plain values: step, data cursor, scheduler, versions.

    Raises:
        UserError: the disk is full or refuses; nothing half-made is left, and other checkpoints are untouched.
    """
    assert run.model is not None
    world, trainable = run.world, run.trainable
    weights = complete_state(run.model, world)
    states = gathered({n: dict(optimizer.state[p]) for n, p in trainable.items() if p in optimizer.state}, world)
    remembered = gathered({s.name: s.state_dict() for s in strategies}, world)
    generators = world.from_all(_rng_state())
    if world.is_main:
        needed = sum(t.nbytes for t in [*_tensors(states), *_tensors(remembered), *(weights or trainable).values()])
        with new_folder(folder, needed, sealed=True) as partial:
            _write(partial, run.model, weights, states, remembered, generators, strategies, record)
        verify_checkpoint(folder, contents=False)
    world.wait()


def _write(
    partial: Path,
    model: nn.Module,
    weights: dict[str, Tensor] | None,
    states: Mapping[str, Any],
    remembered: Mapping[str, Any],
    generators: list[dict[str, Any]],
    strategies: Sequence[Strategy],
    record: Mapping[str, Any],
) -> None:
    save_weights(model, partial, weights)
    _save(states, partial / "optimizer.pt")
    _save(remembered, partial / "strategies.pt")
    _save(generators[0] | ({"other_ranks": generators[1:]} if generators[1:] else {}), partial / "rng.pt")
    text = json.dumps({**record, "strategies": _described(strategies)}, indent=1, default=str)
    (partial / "trainer.json").write_text(text, encoding="utf-8")


def load(
    folder: Path, run: Run, optimizer: Optimizer, strategies: Sequence[Strategy]
) -> tuple[dict[str, Any], list[str]]:
    """Restore a checkpoint in place; on every rank, from the same files.

    Returns:
        The record that was saved, and notices: changed exact strategies, random states that do not fit.

    Raises:
        DamagedError: a file is missing or differs from the manifest; nothing was restored.
        UserError: weights of another model, or an approximate strategy has changed.
    """
    verify_checkpoint(folder)
    record: dict[str, Any] = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    notices = compare(record["strategies"], strategies)
    assert run.model is not None
    load_weights(run.model, folder, run.world)
    anywhere = {name for names in run.world.from_all(list(run.trainable)) for name in names}
    for name, state in _optimizer_states(folder / "optimizer.pt"):
        if name not in anywhere:
            raise UserError(f"resume: {folder} has optimizer state for {name}, which is not trainable here")
        if name in run.trainable:  # and not in another stage of a pipeline
            restore_state(optimizer, run.trainable[name], state)
    load_strategies(folder, strategies)
    return record, notices + _restore_rng(_load(folder / "rng.pt"), run.world)


def verify_checkpoint(folder: Path, contents: bool = True) -> None:
    """Compare a checkpoint with its manifest: sizes, and unless told otherwise contents.

    Raises:
        DamagedError: which file is missing or differs.
    """
    try:
        verify(folder, contents)
    except DamagedError as damage:
        raise DamagedError(f"{folder.absolute()} is damaged: {damage}") from None


def load_strategies(folder: Path, strategies: Sequence[Strategy]) -> None:
    """Give every strategy back what it wanted to remember."""
    remembered = _load(folder / "strategies.pt")
    for strategy in strategies:
        if state := remembered.get(strategy.name):
            strategy.load_state_dict(state)


def restore_state(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    """Put one parameter's state back as it was saved: same dtype, on the parameter's device.

    `Optimizer.load_state_dict` is not used: it casts state to the parameter's dtype (pytorch#43706).
    """
    live = optimizer.state[parameter]
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            live[key] = value
        elif isinstance(live.get(key), torch.Tensor) and live[key].shape == value.shape:
            copy_whole(live[key], value)
        elif value.shape == parameter.shape and is_part(parameter):
            live[key] = torch.empty_like(parameter, dtype=value.dtype)
            copy_whole(live[key], value)
        else:
            # torch keeps its step counter on the CPU, unless the whole update is one kernel on the device.
            here = key != "step" or _is_fused(optimizer, parameter)
            live[key] = value.to(parameter.device if here else "cpu", copy=True)


def _is_fused(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    for group in optimizer.param_groups:
        if any(p is parameter or getattr(p, "stands_for", None) is parameter for p in group["params"]):
            return bool(group.get("fused") or group.get("capturable"))
    return False


def compare(before: Mapping[str, Any], strategies: Sequence[Strategy]) -> list[str]:
    """Notices for changed exact strategies.

    Raises:
        UserError: an approximate strategy has come, gone, or has other settings.
    """
    plain = json.loads(json.dumps(_described(strategies), default=str))
    notices = []
    for name in sorted({*before, *plain}):
        old, new = before.get(name), plain.get(name)
        if old == new:
            continue
        what = (
            "was added"
            if old is None
            else "was dropped"
            if new is None
            else _difference(old["settings"], new["settings"])
        )
        if not (old or new)["exact"]:  # type: ignore[index]
            raise UserError(
                f"resume: {name} {what} since the checkpoint, and it changes the result; restore it, or start anew"
            )
        rule = (new or old)["rule"]  # type: ignore[index]
        meaning = "that holds from here on" if rule else "it is exact, so only rounding differs"
        notices.append(f"resume: {name} {what} since the checkpoint; {meaning}")
    return notices


def checkpoints(run_folder: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return [p for p in numbered(run_folder) if (p / MANIFEST).is_file()]


def numbered(run_folder: Path) -> list[Path]:
    """All folders with the name of a checkpoint, oldest first, finished or not."""
    return sorted((p for p in run_folder.glob("checkpoint-*") if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def rotate(run_folder: Path, keep: int, best: Path | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best and never the newest."""
    found = checkpoints(run_folder)
    protected = {found[-1], best} if found else set()
    surplus = [p for p in found if p not in protected][: max(0, len(found) - keep)]
    for folder in surplus:
        remove(folder)


def _described(strategies: Sequence[Strategy]) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of its strategies; a `rule` is part of the method itself, like a learning rate."""
    rules = (Stage.UPDATE, Stage.CLIP, Stage.AVERAGE)
    return {s.name: {"exact": s.exact, "rule": s.stage in rules, "settings": s.settings()} for s in strategies}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    changed = [f"{k} {old.get(k)!r} -> {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    return "changed (" + ", ".join(changed) + ")"


def _rng_state() -> dict[str, Any]:
    """torch's, python's and numpy's generators: a model's own code may draw from any of them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_rng(state: Mapping[str, Any], world: World) -> list[str]:
    ranks = [state, *state.get("other_ranks", ())]
    if len(ranks) != world.size:
        return [f"resume: {len(ranks)} processes then and {world.size} now: dropout is another one from here on"]
    state = ranks[world.rank]
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    here, then = torch.cuda.device_count() if torch.cuda.is_available() else 0, len(state.get("cuda", ()))
    if here != then:
        return [
            f"resume: {then} CUDA devices then and {here} now: random numbers on them (dropout) are others from here on"
        ]
    if then:
        torch.cuda.set_rng_state_all(state["cuda"])
    return []


def _optimizer_states(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameter name -> state, memory-mapped.

    Pages once read stay in memory as long as any tensor of their file lives. So the file is mapped anew every so many
    bytes: no second copy of the whole state builds up beside the live one.
    """
    names, done = list(_load(path)), 0
    while done < len(names):
        states, mapped = _load(path), 0
        while done < len(names) and mapped < _AT_ONCE:
            name = names[done]
            yield name, states[name]
            mapped += sum(t.nbytes for t in _tensors(states.pop(name)))
            done += 1
        del states


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested plain values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)


def _save(value: Any, path: Path) -> None:
    # Through a Python file: given a path, torch reports a full disk without the reason.
    with path.open("wb") as file:
        torch.save(value, file)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
