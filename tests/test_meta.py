"""A step on the meta device allocates what the real one does: byte for byte on a CPU, strategy by strategy."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from conftest import make_llama
from registry import ROWS, Row, together
from torch import Tensor

from lowmem import AdamW, GradientClipping, LoRA, MixedPrecision, Packing, PureBF16, Strategy, Trainer, TrainingConfig
from lowmem.memory.meta import on_meta
from lowmem.memory.meta_autocast import AutocastMode, meta_autocast
from lowmem.memory.predict import judge, record
from lowmem.memory.trace import Trace

LENGTHS = (40, 40, 40, 40)
# compiled code allocates by a plan of its own; int8's kernels differ between devices
NOT_ON_META = ("compile", "int8")
# with the default scale the first steps of a small model overflow and allocate no optimizer state
FLOAT16 = Row("fp16-autocast-small-scale", lambda: MixedPrecision(dtype="float16", initial_scale=64.0))
PREDICTED = [FLOAT16, *(row for row in ROWS if row.id not in (*NOT_ON_META, "fp16-autocast"))]


def llama(device: str) -> Any:
    with torch.device(device):
        return make_llama(num_hidden_layers=3, vocab_size=512)


def training() -> TrainingConfig:
    return TrainingConfig(batch_size=4, max_steps=2, max_length=64, max_grad_norm=None, shuffle=False)


def measured(strategies: list[Strategy]) -> Trace:
    """The same two steps with data."""
    rows = [{"input_ids": [1] * length} for length in LENGTHS]
    trainer = Trainer(llama("cpu"), rows, training=training(), strategies=strategies)
    with Trace("cpu") as trace:
        for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
            trace.see(tensor)
        for state in list(trainer.optimizer.state.values()):
            for value in state.values():
                if isinstance(value, Tensor):
                    trace.see(value)
        for parameter in trainer.model.parameters():
            _see_quant_state(trace, parameter)
        trainer.train()
    return trace


def _see_quant_state(trace: Trace, parameter: Any) -> None:
    from lowmem.memory.meter import _quant_state

    for tensor in _quant_state(parameter):
        trace.see(tensor)


@pytest.mark.parametrize("row", PREDICTED, ids=lambda row: row.id)
def test_the_peak_is_that_of_the_real_step(row: Row) -> None:
    predicted = record(llama("meta"), training(), together(row), "cpu", LENGTHS).peak()[0]
    real = measured(together(row)).peak()[0]
    assert abs(predicted - real) <= 0.0005 * real


def test_a_mixture_of_strategies_is_predicted() -> None:
    rows = [r for r in ROWS if r.id in ("nf4", "checkpointing", "chunked", "bf16-autocast", "adamw-8bit", "lora")]
    predicted = record(llama("meta"), training(), together(*rows), "cpu", LENGTHS).peak()[0]
    real = measured(together(*rows)).peak()[0]
    assert abs(predicted - real) <= 0.0005 * real


def test_a_card_gets_a_ledger_that_adds_up() -> None:
    trace = record(llama("meta"), training(), [], "cuda", LENGTHS)
    found = judge(trace, expandable=True, vocabulary=512)
    assert sum(found.ledger.values()) == trace.peak()[0] == max(moment.bytes for moment in found.phases.values())
    assert set(found.phases) >= {"forward", "backward", "step"}
    parameters = sum(p.numel() for p in llama("meta").parameters())
    assert found.ledger["weights, trainable"] == 4 * parameters
    assert found.ledger["workspaces"] == 2 * 8_519_680
    assert found.peak_allocated_bytes >= trace.peak()[0]
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes


def operations(device: str, *strategies: Strategy, dtype: torch.dtype = torch.bfloat16, **config: Any) -> set[str]:
    with torch.device("meta"):
        model = make_llama(**config).to(dtype)
    return {storage.op for storage in record(model, training(), strategies, device, LENGTHS).storages}


def test_a_card_takes_its_own_kernels() -> None:
    """Flash attention in half precision, memory-efficient in float32 (no grouped heads), all norms at once."""
    half = operations("cuda", PureBF16(), hidden_size=64)
    assert "aten._scaled_dot_product_flash_attention.default" in half
    assert "inside aten._scaled_dot_product_flash_attention_backward.default" in half
    wide = operations("cuda", GradientClipping(), dtype=torch.float32, num_key_value_heads=4)
    assert "aten._scaled_dot_product_efficient_attention.default" in wide
    assert any("_foreach_" in op for op in wide)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in operations("cpu", dtype=torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_update_is_fused_as_on_the_real_device(device: str) -> None:
    assert "aten.sqrt.default" not in operations(device, dtype=torch.float32)
    assert "aten.sqrt.default" in operations(device, AdamW(fused=False), dtype=torch.float32)


def test_dropout_keeps_a_byte_per_value_on_a_card() -> None:
    assert "aten.native_dropout.default" in operations("cuda", LoRA(r=4, lora_dropout=0.1), dtype=torch.float32)


def test_packed_rows_build_their_mask() -> None:
    """Rows that hold one sample need none; packed ones do, and it is as long as it is wide."""

    def shapes(*strategies: Strategy) -> set[tuple[int, ...]]:
        found = record(llama("meta"), training(), strategies, "cpu", (20, 20, 20, 20)).storages
        return {storage.shape[-2:] for storage in found if len(storage.shape) == 4}

    assert (60, 60) in shapes(Packing())
    assert (20, 20) not in shapes()


OPERATIONS = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "log_softmax": lambda x, w: torch.nn.functional.log_softmax(x, -1),
    "sum": lambda x, w: x.sum(),
    "pow": lambda x, w: x.pow(2),
    "rsqrt": lambda x, w: x.abs().rsqrt(),
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, (4,)),
    "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (4,)),
    "silu": lambda x, w: torch.nn.functional.silu(x),
    "cat": lambda x, w: torch.cat([x, w]),
    "add": lambda x, w: x + w,
    "prod": lambda x, w: x.prod(),
    "cumsum": lambda x, w: x.cumsum(-1),
    "cross_entropy": lambda x, w: torch.nn.functional.cross_entropy(
        x, torch.zeros(4, dtype=torch.int64, device=x.device), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_gives_the_dtypes_of_the_real_one(name: str) -> None:
    def dtypes(device: str) -> list[torch.dtype]:
        found = []
        for left, right in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
            x, w = torch.ones(4, 4, dtype=left, device=device), torch.ones(4, 4, dtype=right, device=device)
            with torch.autocast(device, torch.bfloat16):
                found.append(OPERATIONS[name](x, w).dtype)
        return found

    real = dtypes("cpu")
    with meta_autocast("cpu"):
        assert dtypes("meta") == real


def test_patches_are_gone_afterwards() -> None:
    functional = torch.nn.functional
    before = (functional.scaled_dot_product_attention, functional.dropout, torch.autocast, torch.is_autocast_enabled)
    with contextlib.suppress(ZeroDivisionError), on_meta("cuda"):
        assert functional.scaled_dot_product_attention is not before[0]
        raise ZeroDivisionError
    after = (functional.scaled_dot_product_attention, functional.dropout, torch.autocast, torch.is_autocast_enabled)
    assert after == before
    assert not any(isinstance(mode, AutocastMode) for mode in torch.overrides._get_current_function_mode_stack())
