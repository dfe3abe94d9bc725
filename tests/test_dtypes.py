from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowmem.dtypes import markdown, table

ROWS = {row.name: row for row in table()}


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_floats_agree_with_the_numbers_themselves(name):
    row, dtype = ROWS[name], getattr(torch, name)
    assert row.bytes_per_value == dtype.itemsize
    assert 1 + row.exponent_bits + row.mantissa_bits == 8 * dtype.itemsize

    def survives(value):
        return torch.tensor(value, dtype=torch.float64).to(dtype).to(torch.float64).item() == value

    assert survives(1 + row.step_at_one)
    assert name == "float64" or not survives(1 + row.step_at_one / 2)  # the test itself computes in float64
    assert survives(row.largest)


def test_known_bits():
    bits = {name: (row.exponent_bits, row.mantissa_bits) for name, row in ROWS.items()}
    assert bits == {
        "float64": (11, 52),
        "float32": (8, 23),
        "tf32": (8, 10),
        "bfloat16": (8, 7),
        "float16": (5, 10),
        "float8_e4m3fn": (4, 3),
        "float8_e5m2": (5, 2),
        "int8": (None, None),
        "nf4": (None, None),
        "fp4": (2, 1),
    }


def test_tf32_is_float32_with_a_short_mantissa():
    row = ROWS["tf32"]
    pattern = torch.tensor([row.largest], dtype=torch.float32).view(torch.int32).item()
    assert pattern == 0x7F7FE000  # largest exponent, ten ones, thirteen zeros
    assert row.step_at_one == 2**-10
    assert row.bytes_per_value == 4


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_four_bit_levels_are_those_of_bitsandbytes(name):
    functional = pytest.importorskip("bitsandbytes.functional")
    levels = sorted(functional.get_4bit_type(name, device="cpu").tolist())
    row = ROWS[name]
    assert levels[-1] == row.largest == 1.0
    assert levels[-1] - levels[-2] == pytest.approx(row.step_at_one, abs=1e-7)
    assert row.bytes_per_value == 0.5
    assert "0.5625" in row.note
    assert "0.5159" in row.note


def test_rows_as_dicts():
    assert ROWS["float16"].as_dict()["largest"] == 65504
    assert ROWS["int8"].as_dict()["exponent_bits"] is None


def test_page_shows_the_table():
    page = Path(__file__).parents[1] / "docs" / "dtypes.md"
    assert markdown() in page.read_text(encoding="utf-8")


def test_import_needs_no_torch():
    code = "import sys, lowmem.dtypes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
