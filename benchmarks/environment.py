"""What a measurement was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def environment() -> dict[str, Any]:
    """Versions, processor, threads, commit, and how busy the machine is."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("lowmem", "torch", "transformers", "peft", "trl", "accelerate")},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def table(header: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_table(facts: dict[str, Any]) -> str:
    """An environment as a Markdown table."""
    return table(["with", ""], [[key, value] for key, value in facts.items()])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "../lowmem", "*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line)
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(flags) or 'no wide vectors'})"
