"""The list of cards agrees with itself, and a card is found by the names people and torch use."""

from __future__ import annotations

import pytest

from lowmem import UserError
from lowmem.memory import cards as module
from lowmem.memory.cards import GIB, card, card_for, cards

ENTRIES = module._file()["cards"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_the_numbers_of_a_card_agree(entry: dict) -> None:
    """Peaks are multiprocessors x clock x rate; float32 has 64 or 128 cores each (Hopper runs it at a higher clock)."""
    clocks = entry["multiprocessors"] * entry["boost_ghz"] * 1e-3
    assert entry["half_tflops"] == pytest.approx(clocks * entry["tensor_flops_per_clock"], rel=0.015)
    cores = 64 if entry["compute_capability"] in ("7.0", "7.5", "8.0") else 128
    if entry["compute_capability"] != "9.0":
        assert entry["float32_tflops"] == pytest.approx(clocks * cores * 2, rel=0.01)
    assert entry["source"].startswith(("https://www.nvidia.com/", "https://aws.amazon.com/"))
    assert (
        0.9 * entry["memory_gib"] * 1024
        < (entry["reported_mib"] or entry["memory_gib"] * 1000)
        < entry["memory_gib"] * 1024
    )


def test_memory_that_can_be_used() -> None:
    assert card_for(24 * GIB).usable_bytes == int(23.5 * GIB)
    for found in cards():
        assert found.usable_bytes == found.total_bytes - GIB // 2
        assert found.total_bytes < found.memory_bytes
    assert card("RTX 3060").total_bytes == 11_910 * 2**20


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx-3060-12gb", "RTX 3060 12GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_a_card_is_found_by_the_names_in_use(given: str, name: str) -> None:
    assert card(given).name == name


def test_an_unknown_card_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^card: RTX 4099 is not known; did you mean RTX 4090\?$"):
        card("RTX 4099")
    with pytest.raises(UserError, match="known: RTX 2080 Ti, RTX 3060 12GB") as found:
        card("Voodoo")
    assert "\n" not in str(found.value)


def test_no_two_cards_share_a_name() -> None:
    names = [module._plain(n) for entry in ENTRIES for n in (entry["name"], *entry["also"])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("gib", "name"),
    [(8, "RTX 3070"), (12, "RTX 3060 12GB"), (16, "RTX 4080"), (24, "RTX 4090"), (80, "A100 80GB"), (22.4, "RTX 4090")],
)
def test_a_size_stands_for_its_best_known_card(gib: float, name: str) -> None:
    found = card_for(int(gib * GIB))
    assert found.name == name
    assert found.total_bytes == found.memory_bytes == int(gib * GIB)


def test_a_size_in_gigabytes_that_was_meant_as_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1 GiB"):
        card_for(24)


def test_workspaces_of_an_architecture() -> None:
    assert card("RTX 4090").cublas_workspace_bytes == 8_519_680
    assert card("H100").cublas_workspace_bytes == card("RTX 5090").cublas_workspace_bytes == 33_554_432


def test_a_card_without_bfloat16_computes_it_as_float32() -> None:
    old, new = card("T4"), card("L4")
    assert old.matmul_rate("bfloat16") == old.matmul_rate("float32") == 0.8 * 8.1e12
    assert old.attention_rate("bfloat16") == old.matmul_rate("float32")
    assert old.matmul_rate("float16") == 0.7 * 65e12
    assert new.matmul_rate("bfloat16") == new.matmul_rate("float16") == new.matmul_rate("int8") / 2
    assert card("RTX 4090").matmul_rate("bfloat16") == 0.85 * 165.2e12  # float32 accumulation at half rate


def test_every_assumption_has_its_reason() -> None:
    for entry in module._file()["assumptions"].values():
        assert entry["value"] > 0
        assert len(entry["reason"]) > 10
