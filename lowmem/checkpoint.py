"""Checkpoints: written beside, synced, then renamed; state by parameter name; nothing is unpickled."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowmem.errors import UserError
from lowmem.strategy import Stage, Strategy
from lowmem.weights import load_weights, save_weights

_NAME = re.compile(r"checkpoint-(\d+)$")


def save(
    folder: Path,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    strategies: Sequence[Strategy],
    record: Mapping[str, Any],
) -> None:
    """Write a checkpoint so that `folder` either is whole or does not exist.

    Args:
        folder: `.../checkpoint-000120`.
        model: its trainable weights are saved (adapter files for peft).
        trainable: name -> parameter; the optimizer's state is stored under these names.
        optimizer: `state` holds every parameter that has been stepped.
        strategies: each with what it must remember and its settings.
        record: plain values: step, data cursor, scheduler, versions.
    """
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_weights(model, partial)
    states = {name: dict(optimizer.state[p]) for name, p in trainable.items() if p in optimizer.state}
    torch.save(states, partial / "optimizer.pt")
    torch.save({s.name: s.state_dict() for s in strategies}, partial / "strategies.pt")
    torch.save(_rng_state(), partial / "rng.pt")
    text = json.dumps({**record, "strategies": _described(strategies)}, indent=1, default=str)
    (partial / "trainer.json").write_text(text, encoding="utf-8")
    for file in partial.rglob("*"):
        _sync(file)
    _sync(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)


def load(
    folder: Path,
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    strategies: Sequence[Strategy],
) -> tuple[dict[str, Any], list[str]]:
    """Restore a checkpoint in place.

    Returns:
        The record that was saved, and one notice for each exact strategy that has changed since.

    Raises:
        UserError: no checkpoint there, other weights, or an approximate strategy has changed.
    """
    if not (folder / "trainer.json").is_file():
        raise UserError(f"resume: {folder.absolute()} is no checkpoint (it has no trainer.json)")
    record: dict[str, Any] = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    notices = compare(record["strategies"], strategies)
    load_weights(model, folder)
    states = _load(folder / "optimizer.pt")
    for name, state in states.items():
        if name not in trainable:
            raise UserError(f"resume: {folder} has optimizer state for {name}, which is not trainable here")
        restore_state(optimizer, trainable[name], state)
    load_strategies(folder, strategies)
    _restore_rng(_load(folder / "rng.pt"))
    return record, notices


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
            live[key].copy_(value)
        else:
            # A step counter of torch's plain loop lives on the CPU, whatever the parameter's device.
            live[key] = value.clone() if key == "step" else value.to(parameter.device)


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
    """The whole checkpoints of a run, oldest first."""
    found = [p for p in run_folder.glob("checkpoint-*") if _NAME.search(p.name) and (p / "trainer.json").is_file()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    match = _NAME.search(folder.name)
    assert match is not None
    return int(match.group(1))


def rotate(run_folder: Path, keep: int, best: Path | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best and never the newest."""
    found = checkpoints(run_folder)
    protected = {found[-1], best} if found else set()
    surplus = [p for p in found if p not in protected][: max(0, len(found) - keep)]
    for folder in surplus:
        shutil.rmtree(folder)


def fresh_folder(wanted: Path) -> Path:
    """`wanted`, or with a number behind it where a run already lies there: nothing is overwritten."""
    folder, number = wanted, 1
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def newest(wanted: Path) -> Path:
    """The newest checkpoint of the newest run that was to be written to `wanted`.

    Raises:
        UserError: there is none.
    """
    runs = [
        p for p in wanted.parent.glob(f"{wanted.name}*") if re.fullmatch(rf"{re.escape(wanted.name)}(-\d+)?", p.name)
    ]
    for run in sorted(runs, key=lambda p: int(p.name[len(wanted.name) + 1 :] or 1), reverse=True):
        if found := checkpoints(run):
            return found[-1]
    raise UserError(f"resume: there is no checkpoint in {wanted.absolute()} (set training.save_steps to write some)")


def _described(strategies: Sequence[Strategy]) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of its strategies; a `rule` is part of the method itself, like a learning rate."""
    rules = (Stage.UPDATE, Stage.CLIP, Stage.AVERAGE)
    return {s.name: {"exact": s.exact, "rule": s.stage in rules, "settings": s.settings()} for s in strategies}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    changed = [f"{k} {old.get(k)!r} -> {new.get(k)!r}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    return "changed (" + ", ".join(changed) + ")"


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
