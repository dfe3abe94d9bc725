"""A step on the meta device allocates what the real one does: byte for byte on a CPU, strategy by strategy."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pkgutil
from itertools import accumulate
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import make_llama
from registry import ROWS, Row, together
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import lowmem
from lowmem import (
    AdamW,
    AdamW8bit,
    GradientCheckpointing,
    GradientClipping,
    LoRA,
    MixedPrecision,
    Packing,
    PureBF16,
    Strategy,
    Trainer,
    TrainingConfig,
)
from lowmem.errors import UserError
from lowmem.loading import model_without_data
from lowmem.memory import kernels
from lowmem.memory.meta import _random_states, on_meta
from lowmem.memory.meta_autocast import AutocastMode, meta_autocast
from lowmem.memory.predict import judge, record
from lowmem.memory.trace import Trace
from lowmem.ops import scores
from lowmem.ops.cross_entropy import default_chunk_size, linear_cross_entropy
from lowmem.ops.rounding import stochastic_round
from lowmem.strategies import STRATEGIES

LENGTHS = (40, 40, 40, 40)
# with the default scale the first steps of a small model overflow and allocate no optimizer state
FLOAT16 = Row("fp16-autocast-small-scale", lambda: MixedPrecision(dtype="float16", initial_scale=64.0))
PREDICTED = [FLOAT16, *(row for row in ROWS if row.id != "fp16-autocast")]


def llama(device: str) -> Any:
    with torch.device(device):
        return make_llama(num_hidden_layers=3, vocab_size=512)


def training() -> TrainingConfig:
    return TrainingConfig(batch_size=4, max_steps=2, max_length=64, max_grad_norm=None, shuffle=False)


def measured(strategies: list[Strategy], model: Any = None) -> Trace:
    """The same two steps with data."""
    rows = [{"input_ids": [1] * length} for length in LENGTHS]
    model = llama("cpu") if model is None else model
    trainer = Trainer(model, rows, training=training(), strategies=strategies)
    with _random_states(), Trace("cpu") as trace:
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


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 128}
GATED = {**SMALL, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {**GATED, "head_dim": 24, "tie_word_embeddings": True},
    "mistral": {**GATED, "sliding_window": 16},
    "gemma2": {**GATED, "head_dim": 16, "sliding_window": 16, "_attn_implementation": "eager"},
    "gemma3_text": {**GATED, "head_dim": 16, "sliding_window": 16},
    "phi3": {**GATED, "num_key_value_heads": 4, "pad_token_id": 0},
    "mixtral": {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": torch.bfloat16},
    "gpt2": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {**SMALL, "intermediate_size": 96, "num_attention_heads": 4},
    "opt": {**SMALL, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_peak_is_that_of_the_real_step_of_any_architecture(architecture: str) -> None:
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    strategies = (LoRA(r=4), GradientCheckpointing()) if architecture in ("mixtral", "opt") else ()
    real = measured(list(strategies), AutoModelForCausalLM.from_config(config)).peak()[0]
    predicted = record(model_without_data(config), training(), strategies, "cpu", LENGTHS).peak()[0]
    assert abs(predicted - real) <= 0.0005 * real


def test_a_mixture_of_strategies_is_predicted() -> None:
    rows = [r for r in ROWS if r.id in ("nf4", "checkpointing", "chunked", "bf16-autocast", "adamw-8bit", "lora")]
    predicted = record(llama("meta"), training(), together(*rows), "cpu", LENGTHS).peak()[0]
    real = measured(together(*rows)).peak()[0]
    assert abs(predicted - real) <= 0.0005 * real


def test_paged_moments_are_none_of_the_allocators() -> None:
    """On a card they lie in managed memory; on a CPU they are ordinary tensors."""
    with torch.device("meta"):
        model = make_llama(num_hidden_layers=2, hidden_size=512, intermediate_size=512)
    kept = {}
    for paged in (False, True):
        trace = record(copy.deepcopy(model), training(), [AdamW8bit(paged=paged)], "cuda", LENGTHS)
        found = judge(trace, expandable=True)
        kept[paged] = (found.ledger["optimizer state"], found.managed_bytes)
    moved = kept[False][0] - kept[True][0]
    assert moved > 0
    assert kept[True][1] - kept[False][1] == moved
    on_cpu = record(copy.deepcopy(model), training(), [AdamW8bit(paged=True)], "cpu", LENGTHS)
    assert {storage.kept_on for storage in on_cpu.storages} <= {"device", "host"}


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_from_a_package_that_is_not_there(kernel: str) -> None:
    config = AutoConfig.for_model("mistral", **ARCHITECTURES["mistral"], _attn_implementation=kernel)
    config.dtype = torch.bfloat16
    model = model_without_data(config)
    assert config._attn_implementation == kernel  # the caller's is left alone
    trace = record(model, training(), [PureBF16(), Packing()], "cuda", (20, 20, 20, 20))
    assert "aten._scaled_dot_product_flash_attention.default" in {storage.op for storage in trace.storages}
    assert not [s for s in trace.storages if len(s.shape) == 4 and s.shape[-1] == s.shape[-2]]  # no mask
    with pytest.raises(UserError, match="16-bit inputs"):
        record(model_without_data(config).float(), training(), [], "cuda", LENGTHS)


def test_flex_attention_is_refused() -> None:
    config = AutoConfig.for_model("llama", **GATED, _attn_implementation="flex_attention")
    with pytest.raises(UserError, match="flex_attention is compiled"):
        record(model_without_data(config), training(), [], "cuda", LENGTHS)


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


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.rand(shape).to(dtype) for shape in shapes]


def flash_inputs(dtype: torch.dtype, length: int) -> list[Any]:
    return [*tensors(*[(2, length, 4, 32)] * 3, dtype=dtype), 0.0, True]


def transposed(arguments: list[Any]) -> list[Any]:
    return [a.transpose(1, 2) if isinstance(a, Tensor) and a.dim() == 4 else a for a in arguments]


def quantised(dtype: torch.dtype) -> list[Any]:
    weight, state = bitsandbytes.functional.quantize_4bit(
        torch.rand(512, 256), quant_type="nf4", compress_statistics=True
    )
    nested = state.state2
    constants = [None, state.absmax, nested.code, state.offset]
    return [torch.rand(8, 256, dtype=dtype), weight, [512, 256], nested.absmax, 64, "nf4", *constants]


def update_32bit(dtype: torch.dtype) -> list[Any]:
    g, p = tensors((256, 256), (256, 256), dtype=dtype)
    states = [torch.zeros(256, 256), torch.zeros(256, 256)]
    return ["adam", g, p, *states, None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.0, 1, 1e-3, 1.0, False]


def update_8bit(dtype: torch.dtype) -> list[Any]:
    g, p = tensors((256, 256), (256, 256), dtype=dtype)
    states = [torch.zeros(256, 256, dtype=torch.uint8), torch.zeros(256, 256, dtype=torch.uint8)]
    maps = [bitsandbytes.functional.create_dynamic_map(sign) for sign in (True, False)]
    scales = [torch.ones(256), torch.ones(256)]
    return ["adam", g, p, *states, 0.9, 0.99, 0.0, 0.0, 1e-8, 1, 1e-3, *maps, *scales, 0.0, 1.0, False]


def mixed(*shape: int) -> list[Any]:
    return [torch.rand(64, 256).bfloat16(), torch.rand(shape)]


def narrow_first() -> list[Any]:
    return mixed(64, 1)


def wide_first() -> list[Any]:
    return mixed(64, 256)[::-1]


POINTWISE = ("add", "sub", "mul", "div")
aten, bnb = torch.ops.aten, torch.ops.bitsandbytes
HIDDEN: dict[str, list[tuple[Any, Any]]] = {
    **{
        f"aten::{name}": [(getattr(aten, name).Tensor, lambda: mixed(64, 256))] for name in ("add", "sub", "mul", "div")
    },
    **{f"aten::{name}_": [(getattr(aten, f"{name}_").Tensor, lambda: mixed(64, 1))] for name in ("add", "sub", "mul")},
    "aten::div_": [(aten.div_.Tensor, lambda: mixed(64, 256)[::-1])],
    "aten::_scaled_dot_product_flash_attention_for_cpu": [
        (aten._scaled_dot_product_flash_attention_for_cpu, lambda d=d, n=n: transposed(flash_inputs(d, n)))
        for d in (torch.float32, torch.bfloat16)
        for n in (40, 300, 800)
    ],
    "aten::_safe_softmax": [(aten._safe_softmax, lambda: [torch.rand(64, 512), -1])],
    "aten::logsumexp": [(aten.logsumexp, lambda: [torch.rand(64, 512), [-1]])],
    "bitsandbytes::gemm_4bit": [(bnb.gemm_4bit, lambda: quantised(torch.float32))],
    "bitsandbytes::optimizer_update_32bit": [
        (bnb.optimizer_update_32bit, lambda d=d: update_32bit(d)) for d in (torch.float32, torch.bfloat16)
    ],
    "bitsandbytes::optimizer_update_8bit_blockwise": [
        (bnb.optimizer_update_8bit_blockwise, lambda d=d: update_8bit(d)) for d in (torch.float32, torch.bfloat16)
    ],
}


def allocated_by(operation: Any, arguments: list[Any]) -> tuple[int, Any]:
    """The most bytes that torch's allocator had handed out while an operation ran, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = operation(*arguments)
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0)), result


def hidden_bytes(func: Any, arguments: list[Any]) -> int:
    rule = kernels.hidden_rule(func, "cpu")
    assert rule is not None, func
    return sum(rule(arguments))


def test_what_a_cpu_kernel_allocates_inside_is_what_the_table_says() -> None:
    """Every row of the CPU's table against the allocator; scalars and a number per row aside."""
    backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert {*HIDDEN, backward} == set(kernels._CPU)
    for name, calls in HIDDEN.items():
        for operation, make in calls:
            arguments = make()
            func = getattr(operation, "default", operation)
            expected = hidden_bytes(func, arguments)
            assert expected > 0, name
            most, result = allocated_by(operation, arguments)
            found = result if isinstance(result, tuple) else (result,)
            given = {t.untyped_storage()._cdata for t in arguments if isinstance(t, Tensor)}
            new = [t for t in found if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given]
            assert 0 <= most - expected - sum(t.untyped_storage().nbytes() for t in new) <= 256, name


@pytest.mark.parametrize("length", [40, 300, 800])
def test_attention_backward_on_a_cpu_has_one_tile_per_thread(length: int) -> None:
    query, key, value, *rest = transposed(flash_inputs(torch.float32, length))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, *rest)
    arguments = [torch.ones_like(out), query, key, value, out, sums, *rest]
    operation = aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected = hidden_bytes(operation.default, arguments)
    most, result = allocated_by(operation, arguments)
    assert most - sum(t.untyped_storage().nbytes() for t in result) == expected


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


def rows_of(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = torch.rand(20, 8, device=device, dtype=dtype), torch.rand(50, 8, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.rand(50, device=device), torch.arange(20).to(device)


def with_gradient(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, inputs)]


def cross_entropy_of(device: str) -> list[Tensor]:
    hidden, weight, bias, targets = rows_of(device)
    loss = linear_cross_entropy(hidden, weight, bias, targets, None, 8, 30.0)
    return with_gradient(loss, hidden, weight)


def scores_of(device: str) -> list[Tensor]:
    with torch.no_grad():
        return [*scores.linear_scores(*rows_of(device), None, 30.0, 8)]


FORMS: dict[str, Any] = {
    "cross_entropy.linear_cross_entropy": cross_entropy_of,
    "cross_entropy._LinearCrossEntropy": cross_entropy_of,
    "rounding.stochastic_round": lambda device: [stochastic_round(torch.rand(40, device=device))],
    "scores.linear_scores": scores_of,
    "scores.logit_scores": lambda d: [*scores.logit_scores(torch.rand(9, 50, device=d), torch.arange(9).to(d))],
}
NOT_TENSORS = {"cross_entropy.default_chunk_size", "optimizers.PerParameter", "optimizers._State"}
NOT_TENSORS |= {"attention_proof.prove_packed_attention"}  # compares numbers, and without data does nothing
# whole modules that steps of the registry's strategies run on meta, byte for byte as on a CPU (test_predictor below)
IN_STEPS = {"chunked_layer", "dequantised", "fused", "fused_modules", "fused_proof", "host_memory", "offload"}
OPERATIONS_OF_OURS = ("cross_entropy", "dequantised", "fused", "streamed", "tiled")  # modules of autograd functions
IN_STEPS |= {"recompute", "streamed", "tiled", "without_data", "zero"}
NOT_PREDICTED = {"cut"}  # of tensor_parallel, which estimate --gpus refuses


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_operations_of_ours_give_on_meta_what_they_give_on_a_cpu(name: str, autocast: bool) -> None:
    """Shapes, dtypes, and the most bytes on the way."""

    def run(device: str) -> tuple[list[Any], int]:
        with Trace("cpu") as trace, torch.autocast(device, torch.bfloat16, enabled=autocast):
            found = [(t.shape, t.dtype) for t in FORMS[name](device)]
        return found, trace.peak()[0]

    real = run("cpu")
    with on_meta("cpu"):
        assert run("meta") == real


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_are_as_long_as_on_the_real_device(device: Any) -> None:
    hidden, weight = torch.ones(300, 8, device="meta"), torch.ones(65536, 8, device="meta")
    with on_meta(device), Trace(device) as trace:
        linear_cross_entropy(hidden, weight, None, torch.zeros(300, dtype=torch.int64, device="meta"))
    chunks = [storage.shape[0] for storage in trace.storages if storage.shape[1:] == (65536,)]
    assert max(chunks) == default_chunk_size(65536, device)


def test_every_operation_of_ours_has_a_form_on_meta() -> None:
    """All that `lowmem.ops` defines is run above; no other module defines an autograd function."""
    defined, functions = set(), set()
    for module in pkgutil.walk_packages(lowmem.__path__, "lowmem."):
        forms = ("lowmem.memory.meta", "lowmem.strategies.distributed.zero")  # they themselves
        if module.name.endswith("__main__") or module.name.startswith(forms):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if getattr(value, "__module__", None) != module.name or not callable(value):
                continue
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                functions.add(module.name)
                defined.add(f"{module.name.rsplit('.', 1)[-1]}.{name}")
            elif module.name.startswith("lowmem.ops.") and (isinstance(value, type) or not name.startswith("_")):
                defined.add(f"{module.name.rsplit('.', 1)[-1]}.{name}")
    assert {name for name in defined if name.split(".")[0] not in IN_STEPS | NOT_PREDICTED} == {*FORMS, *NOT_TENSORS}
    assert functions == {f"lowmem.ops.{name}" for name in OPERATIONS_OF_OURS}
    assert {row.key for row in PREDICTED} == set(STRATEGIES)


def test_patches_are_gone_afterwards() -> None:
    functional = torch.nn.functional
    before = (functional.scaled_dot_product_attention, functional.dropout, torch.autocast, torch.is_autocast_enabled)
    with contextlib.suppress(ZeroDivisionError), on_meta("cuda"):
        assert functional.scaled_dot_product_attention is not before[0]
        raise ZeroDivisionError
    after = (functional.scaled_dot_product_attention, functional.dropout, torch.autocast, torch.is_autocast_enabled)
    assert after == before
    assert not any(isinstance(mode, AutocastMode) for mode in torch.overrides._get_current_function_mode_stack())
