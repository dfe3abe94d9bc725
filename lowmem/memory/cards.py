"""Graphics cards: their memory and speed, from `cards.json`, where every number has its source."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from lowmem.errors import UserError
from lowmem.schema import nearest

GIB = 2**30
CUBLAS_WORKSPACE = 8_519_680  # `:4096:2:16:8`, before Hopper (pytorch#95668)
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20  # from compute capability 9.0 on (pytorch#89027)
_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # bytes/s of a PCIe lane, one way

Dtype = Literal["float16", "bfloat16", "float32", "int8"]


@dataclass(frozen=True)
class Assumptions:
    """What share of its peaks a card reaches; `cards.json` gives the reasons.

    Attributes:
        matmul: of the tensor cores' peak, in large matrix products.
        matmul_float32: of the float32 peak.
        attention: of the tensor cores' peak, in fused attention.
        int8_speedup: int8 products per half-precision product in the same time.
        bandwidth: of the memory's bandwidth.
        pcie: of the link's rate.
        launch_seconds: per kernel.
    """

    matmul: float
    matmul_float32: float
    attention: float
    int8_speedup: float
    bandwidth: float
    pcie: float
    launch_seconds: float


@dataclass(frozen=True)
class Card:
    """A graphics card.

    Attributes:
        name: as its vendor calls it.
        kind: `consumer`, `workstation` or `data centre`.
        memory_bytes: nominal memory.
        total_bytes: what torch reports (`torch.cuda.get_device_properties`).
        context_bytes: what the CUDA context takes of that, outside the allocator.
        half_flops: peak of float16 matrix products per second, dense, accumulated in float32; of bfloat16, too, from
            compute capability 8.0 on.
        float32_flops: peak of float32 operations per second, without tensor cores.
        memory_bandwidth: bytes per second, peak.
        pcie_bandwidth: bytes per second between host and card, one way, peak.
        compute_capability: (major, minor).
        source: the vendor's page.
        assumptions: what share of the peaks is reached.
    """

    name: str
    kind: str
    memory_bytes: int
    total_bytes: int
    context_bytes: int
    half_flops: float
    float32_flops: float
    memory_bandwidth: float
    pcie_bandwidth: float
    compute_capability: tuple[int, int]
    source: str
    assumptions: Assumptions

    @property
    def usable_bytes(self) -> int:
        """What the allocator may reserve."""
        return self.total_bytes - self.context_bytes

    @property
    def cublas_workspace_bytes(self) -> int:
        """Of one workspace; there is one for the main thread and one for autograd's."""
        return CUBLAS_WORKSPACE_HOPPER if self.compute_capability >= (9, 0) else CUBLAS_WORKSPACE

    def matmul_rate(self, dtype: Dtype) -> float:
        """Operations per second in large matrix products. Without bfloat16 in its tensor cores, a card computes it as
        float32."""
        given = self.assumptions
        if dtype == "float32" or (dtype == "bfloat16" and self.compute_capability < (8, 0)):
            return self.float32_flops * given.matmul_float32
        return self.half_flops * given.matmul * (given.int8_speedup if dtype == "int8" else 1)

    def attention_rate(self, dtype: Dtype) -> float:
        """Operations per second in fused attention."""
        if self.matmul_rate(dtype) < self.half_flops * self.assumptions.attention:
            return self.matmul_rate(dtype)
        return self.half_flops * self.assumptions.attention


def cards() -> list[Card]:
    """All that are known."""
    return list(_cards().values())


def card(name: str) -> Card:
    """A card by its name, also as torch reports it, in any case and without the vendor's (`rtx 4090`, `a100-80gb`).

    Raises:
        UserError: no such card is known.
    """
    table = _names()
    found = table.get(_plain(name))
    if found is None:
        near = nearest(_plain(name), table)
        hint = f"did you mean {table[near]}?" if near else f"known: {', '.join(_cards())}"
        raise UserError(f"card: {name} is not known; {hint}")
    return _cards()[found]


def card_for(memory_bytes: int) -> Card:
    """The best-known card of about that much memory (`best_known` in `cards.json`), as if it had just that much.

    The consumer's where there is one: 8 GiB RTX 3070, 11 RTX 2080 Ti, 12 RTX 3060, 16 RTX 4080, 24 RTX 4090, 32 RTX
    5090; above, 40 and 80 A100, 48 RTX 6000 Ada, 141 H200. A size between two of them counts as the nearer one.

    Args:
        memory_bytes: becomes `total_bytes`.
    """
    if memory_bytes < GIB:
        raise UserError(f"card: at least 1 GiB of memory; got {memory_bytes:,} bytes")
    sizes: Mapping[str, str] = _file()["best_known"]
    nearer = min(sizes, key=lambda gib: abs(math.log(memory_bytes / (int(gib) * GIB))))
    return replace(_cards()[sizes[nearer]], memory_bytes=memory_bytes, total_bytes=memory_bytes)


# -- the file ---------------------------------------------------------------------------------------------------------


@cache
def _file() -> dict[str, Any]:
    text = files("lowmem.memory").joinpath("cards.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@cache
def _cards() -> dict[str, Card]:
    values = {name: entry["value"] for name, entry in _file()["assumptions"].items()}
    return {entry["name"]: _card(entry, values) for entry in _file()["cards"]}


def _card(entry: Mapping[str, Any], values: Mapping[str, float]) -> Card:
    generation, lanes = entry["pcie"]
    major, minor = (int(part) for part in entry["compute_capability"].split("."))
    nominal, seen = entry["memory_gib"] * GIB, entry["reported_mib"]
    half_rate = entry["tensor_flops_per_clock"] == 512  # the others accumulate in float32 without a loss of speed
    return Card(
        name=entry["name"],
        kind=entry["kind"],
        memory_bytes=nominal,
        total_bytes=seen * 2**20 if seen else int(nominal * values["reported_share"]),
        context_bytes=int(values["context_gib"] * GIB),
        half_flops=entry["half_tflops"] * 1e12,
        float32_flops=entry["float32_tflops"] * 1e12,
        memory_bandwidth=entry["memory_gb_s"] * 1e9,
        pcie_bandwidth=_LANE[generation] * lanes,
        compute_capability=(major, minor),
        source=entry["source"],
        assumptions=Assumptions(
            matmul=values["matmul_half_rate" if half_rate else "matmul_full_rate"],
            matmul_float32=values["matmul_float32"],
            attention=values["attention"],
            int8_speedup=values["int8_speedup"],
            bandwidth=values["bandwidth"],
            pcie=values["pcie"],
            launch_seconds=values["launch_seconds"],
        ),
    )


@cache
def _names() -> dict[str, str]:
    """Plain name -> name."""
    return {_plain(n): entry["name"] for entry in _file()["cards"] for n in (entry["name"], *entry["also"])}


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
