"""The work of a step, and the time it is predicted to take: counted by hand, and against speeds that were published."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_llama
from torch import Tensor

from lowmem import (
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    OptimizerInBackward,
    PureBF16,
    Quantization,
    Strategy,
    StreamedWeights,
    Trainer,
    TrainingConfig,
)
from lowmem.loading import model_without_data
from lowmem.memory.cards import Assumptions, Card, card
from lowmem.memory.costs import costs_of
from lowmem.memory.depth import StepWork
from lowmem.memory.meta import on_meta
from lowmem.memory.predict import record
from lowmem.memory.shapes import shape_config
from lowmem.memory.trace import Trace
from lowmem.memory.work import Work

aten = torch.ops.aten
LENGTHS = (64, 64)
TOKENS = 128
WIDTH, INNER, VOCABULARY = 64, 128, 512
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER  # weights of the linear layers of one block
SHAPE = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY}


def llama(layers: int = 2, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Any:
    with torch.device(device):
        return make_llama(num_hidden_layers=layers, **SHAPE).to(dtype)


def training(lengths: Sequence[int] = LENGTHS) -> TrainingConfig:
    return TrainingConfig(
        batch_size=len(lengths), max_steps=2, max_length=max(lengths), max_grad_norm=None, shuffle=False
    )


def work_of(*strategies: Strategy, model: Any = None, lengths: Sequence[int] = LENGTHS, device: Any = "cuda") -> Work:
    """Of one step: half of two."""
    work = Work()
    record(model if model is not None else llama(), training(lengths), strategies, device, lengths, work=work)
    return work * 0.5


def products(work: Work, phase: str | None = None, dtype: str = "bfloat16") -> float:
    return sum(total.flops[dtype] for name, total in work.totals().items() if phase in (None, name))


def attention(forward: int, backward: int, layers: int = 2) -> float:
    """Causal: two products forward, five backward, of (64, 64) scores with 4 heads of width 16 in two rows."""
    return layers * (2 * forward + 5 * backward) * 2 * (2 * 4 * 64 * 64 * 16) / 2


# -- what a step computes ---------------------------------------------------------------------------------------------


def test_a_step_computes_six_operations_per_weight_and_token() -> None:
    weights = 2 * BLOCK + WIDTH * VOCABULARY
    work = work_of(PureBF16())
    assert products(work) == 6 * weights * TOKENS + attention(1, 1)
    assert products(work, "forward") == 2 * weights * TOKENS + attention(1, 0)


def test_checkpointing_computes_the_blocks_once_more() -> None:
    """Four thirds of their products, less the last one of each, whose result no gradient needs."""
    plain, checkpointed = work_of(PureBF16()), work_of(PureBF16(), GradientCheckpointing())
    repeated = BLOCK - INNER * WIDTH
    assert products(checkpointed) - products(plain) == 2 * 2 * repeated * TOKENS + attention(1, 0)
    assert products(checkpointed, "forward") == products(plain, "forward")
    half = work_of(PureBF16(), GradientCheckpointing(every_n_layers=2))
    assert products(half) - products(plain) == pytest.approx((products(checkpointed) - products(plain)) / 2)


def test_adapters_on_frozen_weights_need_two_thirds() -> None:
    """No gradient of the frozen weights; below the first adapter, none of the activations."""
    weights, adapters = 2 * BLOCK + WIDTH * VOCABULARY, 0
    model = llama()
    work = Work()
    record(model, training(), [PureBF16(), LoRA(r=4)], "cuda", LENGTHS, work=work)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    first = 2 * WIDTH * WIDTH  # q, k and v of the first block
    below = 3 * 4 * WIDTH  # their first matrices
    assert products(work * 0.5) == ((4 * weights - 2 * first + 6 * adapters - 2 * below) * TOKENS + attention(1, 1))


def test_quantised_weights_are_unpacked_beside_the_same_products() -> None:
    strategies = [PureBF16(), LoRA(r=4)]
    plain, quantised = work_of(*strategies), work_of(PureBF16(), LoRA(r=4), Quantization())
    assert products(quantised) == products(plain)
    unpacked = [cost for _, cost in quantised.counts if cost.op == "dequantize_4bit"]
    assert unpacked
    assert all(cost.bytes >= 2.5 * cost.flops for cost in unpacked)  # half a byte in, two out
    assert quantised.totals()["forward"].bytes > plain.totals()["forward"].bytes


def test_the_update_reads_and_writes_what_it_must() -> None:
    """AdamW: weight, gradient and two moments in, weight and moments out."""

    def update(*strategies: Strategy) -> float:
        return work_of(*strategies, model=llama(dtype=torch.float32)).totals()["step"].bytes

    count = sum(p.numel() for p in llama().parameters())
    created = 2 * 4 * count / 2  # the moments are made in the first of the two steps
    assert update(AdamW()) == pytest.approx(7 * 4 * count + created, rel=1e-3)
    assert update(AdamW(fused=False)) > 1.5 * update(AdamW())

    work = work_of(AdamW8bit(), model=llama(dtype=torch.float32))
    blockwise = [(c, n) for (p, c), n in work.counts.items() if c.op == "optimizer_update_8bit_blockwise"]
    eighth = sum(cost.bytes * n for cost, n in blockwise)
    sizes = [p.numel() for n, p in llama().named_parameters() if p.numel() >= 4096 and "embed" not in n]
    # weight twice, gradient, two moments of a byte twice, their scales per block of 256 twice; two tables a tensor
    expected = sum(size * (2 * 4 + 4 + 4 + 2 * 2 * 4 / 256) + 2 * 256 * 4 for size in sizes)
    assert eighth == expected


def test_the_work_is_linear_in_depth() -> None:
    strategies = lambda: [PureBF16(), GradientCheckpointing(), LoRA(r=4), AdamW()]  # noqa: E731
    two, three, six = (work_of(*strategies(), model=llama(n)) for n in (2, 3, 6))
    extrapolated = two + (three - two) * 4
    for phase, real in six.totals().items():
        found = extrapolated.totals()[phase]
        assert dict(found.flops) == pytest.approx(dict(real.flops))
        assert (found.bytes, found.host_bytes) == pytest.approx((real.bytes, real.host_bytes), rel=1e-12)
        assert found.launches == pytest.approx(real.launches, rel=1e-9)
    for name in ("RTX 4090", "T4"):
        assert extrapolated.seconds(card(name)) == pytest.approx(six.seconds(card(name)))


def test_micro_batches_do_the_same_products() -> None:
    whole, split = work_of(PureBF16()), work_of(PureBF16(), GradientAccumulation(steps=2))
    assert products(split) == products(whole) * 3 / 4  # of two alike, the first step runs one
    assert split.totals()["backward"].launches > 1.4 * whole.totals()["backward"].launches


def test_a_batch_crosses_the_bus_once() -> None:
    """Token ids, labels and positions: what the batch holds."""
    moved = sum(total.host_bytes for total in work_of(PureBF16()).totals().values())
    assert 2 * 8 * TOKENS <= moved <= 4 * 8 * TOKENS


def crossing(*strategies: Strategy) -> dict[str, float]:
    """Phase of a steady step -> bytes over the bus, of a model of 4 layers with LoRA."""
    work = Work()
    step = StepWork(work)
    lora = LoRA(target_modules="all-linear")
    record(llama(4), training(), [lora, *strategies], "cuda", LENGTHS, step.watch, work)
    return {phase: total.host_bytes for phase, total in step.step().totals().items()}


def test_what_waits_in_the_hosts_memory_crosses_the_bus_twice() -> None:
    plain, hidden = crossing(GradientCheckpointing()), 2 * TOKENS * WIDTH
    away = crossing(GradientCheckpointing(offload="cpu"))
    assert away["forward"] - plain["forward"] == 4 * hidden
    assert away["backward"] - plain["backward"] == 3 * hidden  # that of the last layer is still there


def test_streamed_weights_cross_the_bus_in_forward_and_in_backward() -> None:
    plain, streamed = crossing(GradientCheckpointing()), crossing(GradientCheckpointing(), StreamedWeights())
    layer = (streamed["forward"] - plain["forward"]) / 4
    assert 2 * BLOCK < layer < 1.01 * 2 * BLOCK  # with norms
    assert streamed["backward"] - plain["backward"] == 3 * layer


def second_step(device: str, *strategies: Strategy) -> Work:
    """The work of the second step alone: the first also tries the strategies out."""
    work, seen = Work(device), []

    def observe(event: Any) -> None:
        if event.kind == "step":
            seen.append(work.copy())

    with on_meta("cpu") if device == "meta" else contextlib.nullcontext():
        rows = [{"input_ids": [1] * length} for length in LENGTHS]
        model = llama(dtype=torch.float32, device=device)
        trainer = Trainer(model, rows, training=training(), strategies=strategies, observers=[observe])
        with Trace("cpu", work):
            trainer.train()
    return seen[1] - seen[0]


@pytest.mark.parametrize(
    "strategies",
    [
        list,
        lambda: [LoRA(r=4), GradientCheckpointing(), ChunkedCrossEntropy(chunk_size=16)],
        lambda: [Quantization(), LoRA(r=4), AdamW8bit()],
        lambda: [OptimizerInBackward()],
    ],
    ids=["plain", "lora-checkpointing-chunked", "nf4-8bit", "in-backward"],
)
def test_the_work_on_meta_is_that_of_the_real_step(strategies: Any) -> None:
    found, real = second_step("meta", *strategies()), second_step("cpu", *strategies())
    for dtype in ("float32", "bfloat16"):
        assert products(found, dtype=dtype) == products(real, dtype=dtype)
    sizes = [sum(total.bytes for total in work.totals().values()) for work in (found, real)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.03)  # only the real run looks whether its numbers are finite


# -- single operations ------------------------------------------------------------------------------------------------


def cost(function: Any, *tensors: Tensor) -> list[Any]:
    """What the operations inside a function cost."""
    work = Work()
    with Trace(None, work):
        function(*tensors)
    return [c for (_, c), n in work.counts.items() for _ in range(int(n))]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_views_and_empty_memory_cost_nothing() -> None:
    assert cost(lambda x: x.view(8, 2).transpose(0, 1).unsqueeze(0).expand(3, -1, -1)[0].detach(), meta(4, 4)) == []
    assert cost(lambda x: torch.empty_like(x), meta(4, 4)) == []


@pytest.mark.parametrize(
    ("function", "shapes", "size"),
    [
        (lambda x, y: x + y, ((4, 8), (4, 8)), 3 * 64),
        (lambda x, y: x + y, ((4, 8), (1, 8)), 2 * 64 + 16),
        (lambda x: x.mul_(2), ((4, 8),), 2 * 64),
        (lambda x: x.zero_(), ((4, 8),), 64),
        (lambda x, y: x.copy_(y), ((4, 8), (4, 8)), 2 * 64),
        (lambda x: torch.zeros_like(x), ((4, 8),), 64),
        (lambda x: x.float(), ((4, 8),), 64 + 128),
        (lambda x: x.expand(4, 8).contiguous(), ((1, 8),), 16 + 64),
        (lambda x, y: torch.mm(x, y), ((4, 8), (8, 2)), 64 + 32 + 16),
    ],
    ids=["add", "broadcast", "in-place", "fill", "copy", "like", "cast", "expanded", "mm"],
)
def test_bytes_of_an_operation(function: Any, shapes: tuple[tuple[int, ...], ...], size: int) -> None:
    (found,) = cost(function, *(meta(*shape) for shape in shapes))
    assert (found.bytes, found.launches, found.host_bytes) == (size, 1, 0)


def test_of_a_table_only_the_rows_asked_for_are_read() -> None:
    ids = torch.empty(6, dtype=torch.int64, device="meta")
    (found,) = cost(lambda w, i: torch.nn.functional.embedding(i, w), meta(100_000, 8), ids)
    assert found.bytes == 6 * 8 + 2 * (6 * 8 * 2)
    (found,) = cost(lambda x, i: x.gather(1, i[:, None]), meta(6, 100_000), ids)
    assert found.bytes == 6 * 8 + 2 * (6 * 2)


def test_lists_go_by_few_launches() -> None:
    weights = [meta(1024, 1024, dtype=torch.float32) for _ in range(60)]
    (found,) = cost(lambda *w: torch._foreach_mul_(list(w), 2.0), *weights)
    assert found.bytes == 60 * 2 * 4 * 2**20
    assert found.launches == 1 + 60 * 2**20 / (65_536 * 320)


def test_a_causal_mask_halves_attention_and_is_told_apart() -> None:
    query = meta(2, 4, 64, 16)

    def both(q: Tensor) -> None:
        for causal in (False, True, True):
            aten._scaled_dot_product_flash_attention(q, q, q, 0.0, causal, False, scale=1.0)

    full, half, again = sorted((c.flops for c in cost(both, query)), reverse=True)
    assert full == 2 * half == 2 * again == 2 * 2 * (2 * 4 * 64 * 64) * 16


def test_grouped_heads_are_expanded() -> None:
    flash = aten._scaled_dot_product_flash_attention
    grouped = cost(lambda q, k: flash(q, k, k, 0.0, True, False), meta(2, 4, 64, 16), meta(2, 2, 64, 16))
    assert grouped[0].flops == 2 * (2 * 4 * 64 * 64) * 16
    assert grouped[0].kind == "attention"


def test_rows_of_several_lengths_in_one_call() -> None:
    """Attention over packed samples, whose lengths are not to be seen on meta, counts each as the longest."""
    query, starts = meta(100, 4, 16), torch.empty(3, dtype=torch.int32, device="meta")
    work = Work()
    with Trace(None, work):
        aten._flash_attention_forward(query, query, query, starts, starts, 60, 60, 0.0, True, False)
    (found,) = (c for _, c in work.counts)
    assert (found.kind, found.flops) == ("attention", 2 * (2 * 4 * 60 * 60) * 16)


def test_integers_and_experts() -> None:
    import lowmem.libraries

    lowmem.libraries.import_bitsandbytes()
    left, right = meta(8, 32, dtype=torch.int8), meta(16, 32, dtype=torch.int8)
    (found,) = cost(lambda a, b: torch.ops.bitsandbytes.int8_linear_matmul(a, b), left, right)
    assert (found.flops, found.dtype, found.bytes) == (2 * 8 * 32 * 16, "int8", 8 * 32 + 16 * 32 + 8 * 16 * 4)
    rows, experts = meta(40, 32), meta(4, 32, 16)
    result = meta(40, 16)
    (found,) = costs_of(aten._grouped_mm.default, (rows, experts), {}, result, "meta")
    assert found.flops == 2 * 40 * 32 * 16  # each row meets one expert


def test_what_runs_on_the_host_is_not_the_cards() -> None:
    assert cost(lambda: torch.ones(4, 4) @ torch.ones(4, 4)) == []
    (found,) = cost(lambda x: x.to("meta"), torch.ones(4, 4))
    assert (found.kind, found.host_bytes, found.bytes) == ("transfer", 64, 0)
    (found,) = cost(lambda x, y: x.copy_(y), meta(4, 4, dtype=torch.float32), torch.ones(4, 4))
    assert (found.kind, found.host_bytes) == ("transfer", 64)


# -- time -------------------------------------------------------------------------------------------------------------

ROUND = Card(
    name="round numbers",
    kind="consumer",
    memory_bytes=2**30,
    total_bytes=2**30,
    context_bytes=0,
    half_flops=1e9,
    float32_flops=1e8,
    memory_bandwidth=1e6,
    pcie_bandwidth=1e5,
    compute_capability=(8, 0),
    source="",
    assumptions=Assumptions(1.0, 1.0, 0.5, 2.0, 1.0, 1.0, 1e-3),
)


def test_an_operation_takes_the_longer_of_products_and_bytes() -> None:
    (large,) = cost(lambda x: x @ x, meta(1000, 1000))
    assert large.seconds(replace(ROUND, memory_bandwidth=1e12)) == pytest.approx(2e9 / 1e9 + 1e-3)
    assert large.seconds(ROUND) == pytest.approx(6e6 / 1e6 + 1e-3)
    (wide,) = cost(lambda x: x @ x, meta(1000, 1000, dtype=torch.float32))
    assert wide.seconds(ROUND) == pytest.approx(2e9 / 1e8 + 1e-3)
    (added,) = cost(lambda x: x + x, meta(1000, 1000))
    assert added.seconds(ROUND) == pytest.approx(6e6 / 1e6 + 1e-3)


def test_copies_on_a_stream_of_their_own_take_time_only_where_they_outlast_the_rest() -> None:
    work = Work()
    with Trace(None, work) as trace, trace.during("forward"):
        meta(1000, 1000) + 1  # 4 s of bytes
    busy = work.seconds(ROUND)["forward"]
    work.moved(200_000, "forward", hidden=True)  # 2 s
    assert work.seconds(ROUND)["forward"] == busy
    work.moved(400_000, "forward", hidden=True)
    assert work.seconds(ROUND)["forward"] == pytest.approx(6 + 2e-3)
    work.moved(100_000, "forward")
    assert work.seconds(ROUND)["forward"] == pytest.approx(6 + 2e-3)
    work.moved(100_000, "step")
    assert work.seconds(ROUND)["step"] == pytest.approx(1 + 1e-3)
    assert work.slowest(ROUND)[0][2] == "forward copy"


def test_works_add_subtract_and_scale() -> None:
    first, second = work_of(PureBF16()), work_of(PureBF16(), GradientCheckpointing())
    assert ((first + second) - second).counts == first.counts
    assert (first - first).counts == {}
    assert (first * 3 - first - first).counts == first.counts
    kept = first.copy()
    first.moved(1, "forward")
    assert kept.counts != first.counts
    twice = kept.scaled({"forward": 2, "backward": 2})
    assert twice.seconds(ROUND)["forward"] == pytest.approx(2 * kept.seconds(ROUND)["forward"])
    assert twice.seconds(ROUND)["step"] == kept.seconds(ROUND)["step"]


# foundation-model-stack/fms-acceleration, `scripts/benchmarks/refs/a100_80gb.csv` (04702cc5): Mistral-7B-v0.1 on one
# A100 80GB, 4 rows of 4,096 tokens, gradient checkpointing, LoRA of rank 16 on q, k, v and o: tokens per second.
PUBLISHED = {"full": 2775.237, "lora": 3597.611, "qlora": 3428.645}


@pytest.mark.parametrize("method", PUBLISHED)
def test_published_speeds_are_met_within_a_quarter(method: str) -> None:
    """Nothing was fitted; the loop and the versions differ from ours."""

    def work(layers: int) -> Work:
        config = shape_config("Mistral-7B-v0.1")
        config.num_hidden_layers = layers
        strategies: list[Strategy] = [PureBF16(), GradientCheckpointing()]
        if method != "full":
            strategies.append(LoRA(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        if method == "qlora":
            strategies.append(Quantization())
        return work_of(*strategies, model=model_without_data(config), lengths=(4096,) * 4)

    first, second = work(1), work(2)
    seconds = sum((first + (second - first) * 31).seconds(card("A100 80GB")).values())
    assert 4 * 4096 / seconds == pytest.approx(PUBLISHED[method], rel=0.25)
