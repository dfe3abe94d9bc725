"""The comparison with published runs on GPUs: its parts, on models too small to be compared with a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS: list[dict[str, Any]] = json.loads((BENCHMARKS / "data" / "peft_memory.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def row(name: str) -> dict[str, Any]:
    return next(dict(row) for row in ROWS if row["name"].startswith(name))


def test_every_row_has_what_is_needed() -> None:
    import predictor_published

    assert len(ROWS) == 32
    for each in ROWS:
        assert set(predictor_published.NEEDED) <= set(each), each["name"]
        assert each["memory_max_bytes"] > 2**34


@pytest.mark.parametrize("name", ["lora--llama-3.2-3B-rank64", "prefixtuning"])
def test_sizes_at_another_length_are_those_of_a_fresh_record(name: str) -> None:
    """Three layers recorded at one length, derived from two layers for another, equal three layers recorded there."""
    from published_loop import Resizer, peak_reserved, record_loop

    recording = record_loop(row(name), (90, 122), layers=3, evaluated=0)
    fresh = record_loop(row(name), (90, 203), layers=3, evaluated=0)
    sizes = Resizer(row(name), 122, [203]).sizes(recording, 1, 203)
    assert sizes == [size for _, _, size in fresh.storages]
    assert sizes != [size for _, _, size in recording.storages]
    assert peak_reserved(recording, sizes) == peak_reserved(fresh)


def test_a_length_with_another_path_is_not_derived() -> None:
    """At a multiple of 16 the attention mask needs no padding: other operations."""
    from published_loop import NotDerivableError, Resizer, record_loop

    recording = record_loop(row("ln_tuning"), (90, 122), layers=2, evaluated=0)
    with pytest.raises(NotDerivableError, match="differs in its operations"):
        Resizer(row("ln_tuning"), 122, [128]).sizes(recording, 1, 128)


def test_only_what_is_on_the_card_is_recorded() -> None:
    from published_loop import LoopTrace

    with LoopTrace("cuda") as trace:
        host = torch.ones(1000)
        card = host.to("meta")
    assert [(storage.size, trace.storages[number].size) for number, storage in enumerate(trace.storages)] == [
        (4000, 4000)
    ]
    assert card.is_meta


def test_masks_keep_every_entry_and_checks_find_nothing_wrong() -> None:
    from published_loop import LoopTrace
    from published_model import UnbuiltError

    values = torch.empty(3, 5, device="meta", requires_grad=True)
    with LoopTrace("cuda") as trace:
        kept = values[values > 0]
        kept.sum().backward()
        assert kept.shape == (15,)
        assert values.grad is not None
        assert values.grad.shape == (3, 5)
        assert not values.isinf().any()
        assert values.isfinite().all()
        assert (15 * 2 * 8) in [storage.size for storage in trace.storages]  # the places of the entries
        with pytest.raises(UnbuiltError, match="only data can tell"):
            (values > 0).sum().item()


def test_a_row_that_cannot_be_built_is_named_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import predictor_published
    import published_loop

    real = published_loop.record_loop

    def shallow(row: dict[str, Any], lengths: Any, **_: Any) -> published_loop.Recording:
        return real(row, [length // 4 for length in lengths], layers=2, evaluated=0)

    for module in (predictor_published, published_loop):
        monkeypatch.setattr(module, "record_loop", shallow)
    good, unknown, wrong, poor = (row("ln_tuning") for _ in range(4))
    unknown |= {"name": "b", "peft_config": {"peft_type": "NO_SUCH", "r": 1}}
    wrong |= {"name": "c", "peft_config": {"peft_type": "LORA", "no_such_setting": 1}}
    poor |= {"name": "d"}
    del poor["dtype"]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([unknown, wrong, good, poor]), encoding="utf-8")
    found = predictor_published.compare(file, tmp_path, longest=predictor_published.RECORDED)
    reasons = [each["reason"] for each in found]
    assert "no method NO_SUCH" in reasons[0]
    assert "no setting no_such_setting" in reasons[1]
    assert reasons[2] is None
    assert found[2]["predicted"] > 0 > found[2]["error"]
    assert "lacks dtype" in reasons[3]
    assert "trains" in found[2]["notes"][0]  # two layers train fewer parameters than the run's
    report = (tmp_path / "predictor_published.md").read_text(encoding="utf-8")
    assert "1 of 4 rows built" in report
    assert "NO_SUCH" in report
    assert len(json.loads((tmp_path / "predictor_published.json").read_text(encoding="utf-8"))["rows"]) == 4


def test_the_fit_leaves_the_row_out() -> None:
    """A row whose own measure is far off does not move the length it is predicted with."""
    from predictor_published import Result, judge

    lengths = (600, 650, 700)
    right = [Result(str(n), 650 * 10**6, reserved={length: length * 10**6 for length in lengths}) for n in range(3)]
    off = Result("off", 700 * 10**6, reserved={length: length * 10**6 for length in lengths})
    summary = judge([*right, off], lengths)
    assert off.notes == []  # no length near by does better
    assert off.length == 650
    assert off.error == pytest.approx(-100 * 50 / 700)
    assert summary["leave_one_out"]["within_2_percent"] == 0.75
    assert summary["longest_batch_tokens"] == 650


def test_absent_settings_are_null_false_or_zero() -> None:
    """The rows leave out what is false: OFT's block size, whose default is 32, cannot stand beside a rank."""
    from published_model import adapter_config

    assert adapter_config(row("oft"), layers=2).oft_block_size == 0
    assert adapter_config(row("prefixtuning"), layers=2).num_layers == 2


def test_a_step_of_the_allocator_near_the_fit_is_named() -> None:
    from predictor_published import Result, judge

    lengths = (695, 697)
    right = [Result(str(n), 697 * 10**6, reserved={length: length * 10**6 for length in lengths}) for n in range(3)]
    stepping = Result("steps", 695 * 10**6, reserved={695: 695 * 10**6, 697: 720 * 10**6})
    judge([*right, stepping], lengths)
    assert stepping.length == 697
    assert stepping.notes == ["+0.00 % at 695 tokens: a step of +24 MiB up to 697, where requests need larger segments"]
