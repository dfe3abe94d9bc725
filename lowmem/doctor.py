"""`lowmem doctor`: what this machine has, what it can compute, and which strategies run on it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lowmem.environment import version_of
from lowmem.errors import UserError
from lowmem.facts import strategy_facts, variants
from lowmem.strategies import STRATEGIES
from lowmem.strategy import Strategy

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# import name -> what it serves
EXTRAS = {
    "flash_attn": "model.attn_implementation: flash_attention_2",
    "triton": "strategies.compile on a GPU, and strategies.fused_kernels",
    "liger_kernel": "strategies.fused_kernels",
    "kernels": "strategies.fused_kernels: {source: kernels}",
    "tensorboard": "training.report_to: [tensorboard]",
    "wandb": "training.report_to: [wandb]",
    "trackio": "training.report_to: [trackio]",
    "lm_eval": "lm-evaluation-harness on a run folder",
}


def diagnose(say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every fact; dtypes and strategies are tried, not looked up.

    Args:
        say: told what is being tried, one line each.

    Returns:
        `versions` (package -> version, and what pyproject promises), `extras` (name -> version or null, and what for),
        `host` and `devices` (bytes), `dtypes` (device -> dtype -> works, or why not), `strategies` (name -> works,
        notes, and what is missing).
    """
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    say("trying dtypes")
    dtypes = {device: {name: _matrix_product(device, name) for name in DTYPES} for device in devices}
    return {
        "versions": _versions(),
        "extras": {name: {"version": _installed(name), "for": use} for name, use in EXTRAS.items()},
        "host": _host(),
        "devices": [_card(i) for i in range(torch.cuda.device_count())],
        "dtypes": dtypes,
        "strategies": _strategies(say),
    }


def _versions() -> dict[str, dict[str, str]]:
    """Python, lowmem and what it depends on."""
    found = {"python": {"version": platform.python_version()}, "lowmem": {"version": version_of("lowmem")}}
    for requirement in map(Requirement, requires("lowmem") or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name] = {"version": version_of(requirement.name), "wanted": str(requirement.specifier)}
    return found


def _installed(name: str) -> str | None:
    if find_spec(name) is None:
        return None
    return version_of(name)


def _host() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    here = Path.cwd()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "memory_limit_bytes": _container_limit(),
        "locked_memory_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "pinned_memory": _pinned(),
        "disk_free_bytes": shutil.disk_usage(here).free,
        "disk": str(here),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _container_limit() -> int | None:
    """The memory limit of the control group, where there is one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _pinned(size: int = 64 * 2**20) -> str:
    """Whether host memory can be pinned for copies to the card, tried with 64 MiB."""
    if not torch.cuda.is_available():
        return "no GPU, so nothing to pin for"
    try:
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return f"refused: {_first_line(error)}"
    return "works (tried with 64 MiB)"


def _card(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "memory_free_bytes": free,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def _matrix_product(device: str, dtype: str) -> str:
    """Multiply two small matrices and look at the result; `works`, or the reason why not."""
    kind = getattr(torch, dtype)
    try:
        if dtype.startswith("float8"):
            one = torch.eye(16, device=device).to(kind)
            scale = torch.ones((), device=device)
            got = torch._scaled_mm(one, one.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        else:
            one = torch.eye(16, device=device, dtype=kind)
            got = one @ one
        if not torch.equal(got.float(), torch.eye(16, device=device)):
            return "gives wrong results"
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"no: {_first_line(error)}"
    if device.startswith("cuda") and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        return "emulated: slow"
    return "works"


def _strategies(say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Each strategy, and each other choice of its settings, trains a tiny model for two steps."""
    partners = {fact["name"]: [names[0] for names in fact["needs"].values()] for fact in strategy_facts()}
    found = {}
    for name, cls in STRATEGIES.items():
        entry: dict[str, Any] = {"works": True, "notes": [], "seconds": 0.0}
        for setting, example in variants(cls).items():
            say(f"trying {name}" + (f" ({setting})" if setting else ""))
            start = time.perf_counter()
            error, notices = _train([example, *(STRATEGIES[partner]() for partner in partners[name])])
            entry["seconds"] += time.perf_counter() - start
            if error and not setting:
                entry["works"] = False
            if error:
                entry["notes"].append(f"{setting}: {error}" if setting else error)
            entry["notes"] += [notice for notice in notices if notice not in entry["notes"]]
        found[name] = entry
    return found


def _train(strategies: Sequence[Strategy]) -> tuple[str | None, list[str]]:
    """What went wrong in two steps of a tiny model (None: nothing), and the notices of the run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowmem.config import TrainingConfig
    from lowmem.trainer import Trainer

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    rows = [{"input_ids": list(range(start, start + 12))} for start in range(1, 9)]
    training = TrainingConfig(batch_size=4, max_steps=2, learning_rate=1e-2, max_grad_norm=None, max_length=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(LlamaForCausalLM(config), rows, training=training, strategies=strategies)
            trainer.train()
        except (UserError, ImportError, RuntimeError, OSError) as error:
            return _first_line(error), []
    return None, list(trainer.run.all_notices)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts as text for the terminal."""
    host, out = facts["host"], []
    for name, entry in facts["versions"].items():
        wanted = entry.get("wanted", "")
        fault = "" if _satisfies(entry["version"], wanted) else "  (pip install -U lowmem puts this right)"
        out.append(f"{name:<14} {entry['version']:<14} {wanted}{fault}".rstrip())
    missing = [name for name, entry in facts["extras"].items() if entry["version"] is None]
    for name, entry in facts["extras"].items():
        if name not in missing:
            out.append(f"{name:<14} {entry['version']}")
    out += [f"{name:<14} not installed (optional: {facts['extras'][name]['for']})" for name in missing]
    out += ["", f"{host['processor']}, {host['cores_usable']} of {host['cores']} cores usable, {host['system']}"]
    limit = host["memory_limit_bytes"]
    out.append(
        f"host memory     {_gib(host['memory_free_bytes'])} free of {_gib(host['memory_bytes'])}"
        + (f", {_gib(limit)} allowed to this container" if limit else "")
    )
    locked = host["locked_memory_limit_bytes"]
    said = "no limit" if locked is None else f"limit {locked / 2**20:,.1f} MiB (ulimit -l)"
    out.append(f"pinned memory   {host['pinned_memory']}")
    out.append(f"locked memory   {said}")
    out.append(f"disk            {_gib(host['disk_free_bytes'])} free at {host['disk']}")
    for index, card in enumerate(facts["devices"]):
        out.append(
            f"cuda:{index}          {card['name']}, capability {card['capability']}, "
            f"{_gib(card['memory_free_bytes'])} free of {_gib(card['memory_bytes'])}, CUDA {card['cuda']}"
        )
    if not facts["devices"]:
        out.append("no CUDA device: runs use the CPU")
    out.append("")
    for device, dtypes in facts["dtypes"].items():
        out += [f"{device:<8} {name:<14} {verdict}" for name, verdict in dtypes.items()]
    out.append("")
    for name, entry in facts["strategies"].items():
        out.append(f"{name:<24} {'runs here' if entry['works'] else 'does not run here'}")
        out += [f"{'':<24} {note}" for note in entry["notes"]]
    return out


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _satisfies(found: str, wanted: str) -> bool:
    """Whether a version is what a requirement such as `>=2.10` asks for."""
    return not wanted or (found[:1].isdigit() and SpecifierSet(wanted, prereleases=True).contains(found))
