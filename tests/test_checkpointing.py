"""Gradient checkpointing in its forms: offloaded inputs, kept operations, a budget. Bytes counted, gradients held."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_llama, make_rows, make_trainer, run_training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem import (
    ChunkedLayers,
    GradientCheckpointing,
    LoRA,
    MixedPrecision,
    Quantization,
    Strategy,
    TiledMLP,
    TrainingConfig,
)
from lowmem.errors import UserError
from lowmem.memory.predict import record
from lowmem.memory.trace import Trace
from lowmem.ops.host_memory import HostPool
from lowmem.ops.offload import DiskShelf, HostShelf, Keeper
from lowmem.run import Run
from lowmem.strategies.checkpointing import Layout

LAYERS, ROWS, TOKENS, WIDTH = 4, 2, 32, 32
INPUT = ROWS * TOKENS * WIDTH * 4  # bytes of a layer's input
META = torch.device("meta")

FORMS: dict[str, Callable[[], GradientCheckpointing]] = {
    "offload": lambda: GradientCheckpointing(offload="cpu"),
    "disk": lambda: GradientCheckpointing(offload="disk"),
    "groups": lambda: GradientCheckpointing(layers_per_checkpoint=2),
    "groups-offload": lambda: GradientCheckpointing(layers_per_checkpoint=3, offload="cpu"),
    "keep": lambda: GradientCheckpointing(keep=["linear"]),
    "keep-groups": lambda: GradientCheckpointing(keep=["linear"], layers_per_checkpoint=2),
    "keep-offload": lambda: GradientCheckpointing(keep=["aten.mm"], offload="cpu"),
    "budget": lambda: GradientCheckpointing(budget="600KiB"),
    "budget-offload": lambda: GradientCheckpointing(budget="40KiB", offload="cpu"),
}
form = pytest.mark.parametrize("form", FORMS)


def llama(**config: Any) -> nn.Module:
    return make_llama(**{"num_hidden_layers": LAYERS, **config})


def full_rows(number: int = ROWS) -> list[dict[str, list[int]]]:
    return [{"input_ids": [(7 * i + n) % 100 for i in range(TOKENS)]} for n in range(number)]


def numbers() -> TrainingConfig:
    return TrainingConfig(batch_size=ROWS, max_steps=2, max_length=TOKENS, max_grad_norm=None, shuffle=False)


def gradients(*strategies: Strategy, dtype: torch.dtype = torch.float64, **config: Any) -> dict[str, Tensor]:
    """Of the first batch of uneven rows."""
    trainer = make_trainer(list(strategies), model=llama(dtype=dtype, **config), max_steps=1, max_length=TOKENS)
    found: dict[str, Tensor] = {}
    step = trainer.step

    def keep() -> None:
        found.update({n: p.grad.clone() for n, p in trainer.run.trainable.items() if p.grad is not None})
        step()

    trainer.step = keep
    trainer.train()
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one
    return max((a - other[name]).abs().max().item() for name, a in one.items())


# -- gradients --------------------------------------------------------------------------------------------------------


@form
@pytest.mark.parametrize("place", ["adapter", "attention"])
def test_c202_dropout_is_the_same_in_both_passes(form: str, place: str) -> None:
    """C-202, for every form: a layer that is recomputed draws the numbers it drew before."""
    model = {"attention_dropout": 0.3 if place == "attention" else 0.0}

    def lora() -> LoRA:
        return LoRA(r=4, lora_dropout=0.3 if place == "adapter" else 0.0)

    plain = gradients(lora(), **model)
    assert difference(plain, gradients(lora(), FORMS[form](), **model)) < 1e-10
    assert difference(plain, gradients(LoRA(r=4))) > 1e-6  # dropout was on


def test_chunked_layers_draw_the_same_numbers_from_the_first_step_on() -> None:
    """The first pass of a chunked layer looks at its parts, which draws nothing that its recompute would miss."""
    state, seen = [], []
    for strategies in ([ChunkedLayers(chunk_size=16)], [ChunkedLayers(chunk_size=16), GradientCheckpointing()]):
        kept = gradients(LoRA(r=4, lora_dropout=0.3), *strategies)
        state.append(torch.get_rng_state())
        seen.append(kept)
    assert difference(*seen) < 1e-10
    assert torch.equal(*state)


@pytest.mark.parametrize(
    "others",
    [
        [TiledMLP(tile_size=16)],
        [ChunkedLayers(chunk_size=16)],
        [Quantization(compute_dtype="float32"), LoRA(r=4)],
        [MixedPrecision()],
        [MixedPrecision(), Quantization(), LoRA(r=4), TiledMLP(tile_size=16)],
    ],
    ids=lambda others: "+".join(s.name for s in others),
)
def test_kept_attention_gives_the_same_gradients_beside_others(others: list[Strategy]) -> None:
    again = {"hidden_size": 64, "intermediate_size": 128, "dtype": torch.float32}
    fresh = [[type(s)(**s.settings()) for s in others] for _ in range(2)]
    plain = gradients(*fresh[0], GradientCheckpointing(), **again)
    assert difference(plain, gradients(*fresh[1], GradientCheckpointing(keep=["attention"]), **again)) == 0


# -- kept operations --------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """How often operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.times[name] = self.times.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count(*strategies: Strategy) -> dict[str, int]:
    trainer = make_trainer(list(strategies), model=llama(), rows=full_rows(4), max_steps=1)
    with Count() as counted:
        trainer.train()
    return counted.times


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(("group", "without"), [(1, 2 * LAYERS), (2, 2 * LAYERS + LAYERS // 2)])
def test_kept_attention_runs_once(group: int, without: int) -> None:
    """In a group of two, the first layer would run three times. Chunked layers take heads in two groups here."""
    assert count(GradientCheckpointing(layers_per_checkpoint=group))[ATTENTION] == without
    assert count(GradientCheckpointing(layers_per_checkpoint=group, keep=["attention"]))[ATTENTION] == LAYERS
    assert count(GradientCheckpointing(keep=["attention"]), ChunkedLayers(chunk_size=32))[ATTENTION] == 2 * LAYERS


def test_kept_products_run_once() -> None:
    plain, again = count()["aten::mm"], count(GradientCheckpointing())["aten::mm"]
    # the last product of a layer is not run again: nothing in it is saved
    assert again == plain + 6 * LAYERS
    assert count(GradientCheckpointing(keep=["linear"]))["aten::mm"] == plain


def held(device: str, *strategies: Strategy, model: nn.Module | None = None, tokens: int = TOKENS) -> Trace:
    with META:
        model = llama() if model is None else model
    return record(model, numbers(), strategies, device, (tokens,) * ROWS)  # type: ignore[arg-type]


def test_kept_attention_costs_its_result_per_layer() -> None:
    """A card keeps what attention returns, and a row sum for each head and token."""

    def at_the_end_of_forward(*strategies: Strategy) -> int:
        with META:
            model = llama(num_key_value_heads=4)  # with fewer, float32 has no such operation on a card
        trace = held("cuda", *strategies, model=model)
        first = next(i for i, (n, _) in enumerate(trace.events) if trace.storages[n].phase == "backward")
        return sum(s.size for s in trace.live_at(first - 1))

    without = at_the_end_of_forward(GradientCheckpointing())
    more = at_the_end_of_forward(GradientCheckpointing(keep=["attention"])) - without
    assert LAYERS * INPUT <= more <= 1.3 * LAYERS * INPUT


@pytest.mark.parametrize(
    ("keep", "options", "words"),
    [
        (["attention"], {"model": {"attn_implementation": "eager"}}, "attention has no effect: no such operation runs"),
        (["linear"], {"others": [ChunkedLayers(chunk_size=16)]}, "linear has no effect: no such operation runs"),
        (["attention", "aten.cos"], {}, "aten.cos has no effect"),
    ],
)
def test_what_is_never_kept_is_refused_at_the_first_pass(keep: list[str], options: dict[str, Any], words: str) -> None:
    model, others = llama(**options.get("model", {})), options.get("others", [])
    trainer = make_trainer([GradientCheckpointing(keep=keep), *others], model=model, rows=full_rows(4))
    with pytest.raises(UserError, match=words):
        trainer.train()
    assert trainer.run.global_step == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keep": []}, "names of operations, each once"),
        ({"keep": ["attention", "attention"]}, "names of operations, each once"),
        ({"keep": ["attn"]}, "there is no operation attn"),
        ({"keep": ["aten.mmm"]}, "there is no operation aten.mmm"),
        ({"budget": "much"}, "budget: a size such as"),
        ({"budget": "1GiB", "every_n_layers": 2}, "budget: decides itself"),
        ({"budget": 2**30, "layers_per_checkpoint": 2}, "budget: decides itself"),
        ({"pinned_memory": "1GiB"}, "pinned_memory: has no effect"),
        ({"offload_dir": ".", "offload": "cpu"}, "offload_dir: has no effect"),
        ({"every_n_layers": 2, "layers_per_checkpoint": 2}, "give one of them"),
    ],
)
def test_refused_settings(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        GradientCheckpointing(**fields)


# -- a budget ---------------------------------------------------------------------------------------------------------


def laid_out(budget: int, **fields: Any) -> tuple[Layout, list[str]]:
    strategy = GradientCheckpointing(budget=budget, **fields)
    trainer = make_trainer([strategy], model=llama(), rows=full_rows(4), batch_size=ROWS, max_length=TOKENS)
    assert strategy._layout is not None
    return strategy._layout, trainer.run.all_notices


def measured_between_passes(strategy: GradientCheckpointing) -> int:
    """Bytes that layers hold when the last of them has run, in a real step; inputs included, the last output not."""
    model = llama()
    trainer = make_trainer([strategy], model=model, rows=full_rows(4), batch_size=ROWS, max_length=TOKENS, max_steps=1)
    found: list[int] = []

    def live() -> int:
        return sum(size for _, size in trace.events)

    with Trace() as trace:
        for tensor in (*model.parameters(), *model.buffers()):
            trace.see(tensor)
        model.model.layers[0].register_forward_pre_hook(lambda *_: found.append(-live() + INPUT))
        model.model.norm.register_forward_pre_hook(lambda *_: found.append(live() - INPUT))
        trainer.train()
    assert len(found) == 2
    return sum(found)


@pytest.mark.parametrize("budget", [4 * INPUT, 4 * INPUT + 250_000, 300_000, 10**7])
def test_a_real_step_holds_no_more_than_the_budget_and_one_more_layer_would(budget: int) -> None:
    layout, _ = laid_out(budget)
    found = measured_between_passes(GradientCheckpointing(budget=budget))
    assert found <= budget
    if layout.whole < LAYERS:
        more = GradientCheckpointing(budget=budget).with_layout(Layout(whole=layout.whole + 1))
        assert measured_between_passes(more) > budget
    assert layout.whole == {4 * INPUT: 0, 10**7: LAYERS}.get(budget, layout.whole)


def test_the_choice_is_told_recorded_and_always_the_same() -> None:
    run = run_training(
        [GradientCheckpointing(budget="300KB")], model=llama(), rows=full_rows(4), batch_size=ROWS, max_length=TOKENS
    )
    (notice,) = (text for text in run.result["notices"] if "budget" in text)
    layout, (again,) = laid_out(300_000)
    assert 0 < layout.whole < LAYERS
    assert notice == again.replace("300000", "300KB")
    assert f"of {LAYERS} layers {layout.whole} keep everything" in notice
    assert f"{LAYERS - layout.whole} recompute" in notice


def test_where_inputs_are_too_many_the_first_ones_leave() -> None:
    layout, _ = laid_out(2 * INPUT, offload="cpu")
    assert layout == Layout(offloaded=2)
    assert laid_out(10**7, offload="cpu")[0] == Layout(whole=LAYERS)  # nothing leaves that fits
    with pytest.raises(UserError, match=rf"not enough .* at least .*\({LAYERS * INPUT:,} bytes\).* offload: cpu"):
        laid_out(2 * INPUT)
    with pytest.raises(UserError, match=rf"at least .*\({INPUT:,} bytes\)"):
        laid_out(INPUT - 1, offload="cpu")


def test_last_layers_are_the_ones_to_keep() -> None:
    """The peak is lower than with the first ones, by what they hold when the last one is recomputed."""
    for device in ("cpu", "cuda"):
        last = held(device, GradientCheckpointing(budget=1).with_layout(Layout(whole=2))).peak()[0]
        first = held(device, _FirstWhole()).peak()[0]
        assert last < first - INPUT


class _FirstWhole(GradientCheckpointing):
    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        from lowmem.ops.recompute import Group

        for layer in model.model.layers[2:]:  # type: ignore[index,union-attr]
            Group([layer]).wrap()
        return model


def test_choosing_draws_no_random_numbers() -> None:
    plain = run_training([LoRA(r=4, lora_dropout=0.3)], model=llama(), max_steps=1)
    run = run_training([LoRA(r=4, lora_dropout=0.3), GradientCheckpointing(budget="1GiB")], model=llama(), max_steps=1)
    assert run.losses == plain.losses


# -- inputs off the card ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
def test_host_bytes_are_the_inputs_exactly(group: int) -> None:
    """No power of two, and half of them for groups of two."""
    tokens = 27
    trace = held("cuda", GradientCheckpointing(offload="cpu", layers_per_checkpoint=group), tokens=tokens)
    pinned = [trace.storages[n] for n, size in trace.host_events if size > 0 and trace.storages[n].shape]
    buffers = [s for s in pinned if s.kept_on == "pinned" and s.size == ROWS * tokens * WIDTH * 4]
    assert len(buffers) == LAYERS // group  # of both steps: they are used again


class Cudart:
    """Stands for CUDA's runtime."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.answer:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_pinned_memory_is_exact_bounded_and_the_bound_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, told = Cudart(), list[str]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = HostPool(torch.device("cuda"), 2500, told.append)
    first, second = pool.take(1000), pool.take(1001)
    assert sorted(runtime.registered.values()) == [1000, 1001]
    assert (pool.pinned_bytes, pool.pageable_bytes, told) == (2001, 0, [])
    third, fourth = pool.take(1000), pool.take(1000)
    assert (pool.pinned_bytes, pool.pageable_bytes) == (2001, 2000)
    assert len(set(told)) == 1
    assert "2,500" in told[0]
    del first, second, third, fourth
    gc.collect()
    assert not runtime.registered
    assert (pool.pinned_bytes, pool.pageable_bytes) == (0, 0)


def test_a_system_that_refuses_to_pin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(answer=2))
    pool = HostPool(torch.device("cuda"), None, told.append)
    buffer = pool.take(1000)
    assert pool.pageable_bytes == buffer.numel() == 1000
    assert "refuses to pin" in told[0]


def test_buffers_of_steps_of_varying_length_do_not_add_up() -> None:
    pool = HostPool(torch.device("cpu"), None, print)
    shelf = HostShelf(pool)
    lengths = [5, 9, 3, 9, 7, 11, 2, 11, 6]
    for length in lengths:
        tickets = [shelf.put(torch.full((length, 100), float(n))) for n in range(4)]
        for number, ticket in enumerate(tickets):
            found = shelf.end(shelf.begin(ticket, torch.empty(length, 100)))
            assert torch.equal(found, torch.full((length, 100), float(number)))
        del tickets, ticket
        assert pool.pageable_bytes <= 4 * 11 * 400
    assert pool.pageable_bytes == 4 * 11 * 400


def test_the_disk_is_used_and_memory_is_not(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = list[tuple[int, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, what: advised.append((size, what)))
    shelf = DiskShelf(tmp_path, torch.device("cpu"))
    tensors = [torch.full((300, 100), float(n)) for n in range(5)]
    places = [shelf.put(tensor) for tensor in tensors]
    found = [shelf.end(shelf.begin(place, torch.empty(300, 100))) for place in places]
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    size = 300 * 100 * 4
    assert os.fstat(shelf._file.fileno()).st_size == shelf.written_bytes == 5 * size
    assert advised == [(size, os.POSIX_FADV_DONTNEED)] * 10  # after each write and each read
    assert not [
        o for o in gc.get_objects() if isinstance(o, Tensor) and o.shape == (300, 100) and _is_new(o, tensors + found)
    ]
    del places
    gc.collect()
    again = [shelf.put(tensor) for tensor in tensors]
    shelf._thread.submit(lambda: None).result()
    assert os.fstat(shelf._file.fileno()).st_size == 5 * size  # the same stretches
    assert len(again) == 5


def _is_new(tensor: Tensor, known: list[Tensor]) -> bool:
    return all(tensor is not other for other in known)


def test_training_from_the_disk_writes_every_input(tmp_path: Any) -> None:
    written = list[int]()

    class Seen(DiskShelf):
        def put(self, tensor: Tensor) -> Any:
            written.append(tensor.nbytes)
            return super().put(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowmem.strategies.checkpointing.DiskShelf", Seen)
        strategy = GradientCheckpointing(offload="disk", offload_dir=str(tmp_path))
        run_training([strategy], model=llama(), rows=full_rows(4), batch_size=ROWS, max_steps=2)
    assert written == [INPUT] * LAYERS * 2
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("form", ["offload", "disk", "keep", "budget-offload"])
def test_nothing_is_left_of_a_forward_without_backward(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation, a pass that breaks off, and one whose loss is dropped."""
    tickets = list[weakref.ref[Any]]()
    for shelf in (HostShelf, DiskShelf):
        put = shelf.put

        def noted(self: Any, tensor: Tensor, put: Any = put) -> Any:
            ticket = put(self, tensor)
            tickets.append(weakref.ref(ticket))
            return ticket

        monkeypatch.setattr(shelf, "put", noted)
    model = llama()
    strategies = [FORMS[form]()]
    trainer = make_trainer(strategies, model=model, rows=full_rows(4), eval_rows=full_rows(), max_length=TOKENS)
    tickets.clear()  # those of the choice under a budget
    trainer.evaluate()
    assert not tickets

    def breaks(*_: Any) -> None:
        raise MemoryError

    model.train()
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
    broken = model.model.norm.register_forward_pre_hook(breaks)
    with pytest.raises(MemoryError):
        model(input_ids=ids, use_cache=False)
    broken.remove()
    loss = model(input_ids=ids, use_cache=False).logits.sum()
    del loss
    gc.collect()
    assert not [ref for ref in tickets if ref() is not None]
    loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_buffer_that_was_given_back_is_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoned with NaN as soon as it is free, it leaves the gradients as they are."""
    plain = gradients()
    give_back, poisoned = HostPool.give_back, list[int]()

    def poison(self: HostPool, buffer: Tensor) -> None:
        buffer.fill_(255)
        poisoned.append(buffer.numel())
        give_back(self, buffer)

    monkeypatch.setattr(HostPool, "give_back", poison)
    assert difference(plain, gradients(GradientCheckpointing(offload="cpu"))) < 1e-12
    assert poisoned


def test_a_stray_keeper_does_not_hold_the_last_input() -> None:
    keeper = Keeper(HostShelf(HostPool(torch.device("cpu"), None, print)))
    tensor = torch.ones(10)
    kept = keeper.keep(tensor, first=True)
    watch = weakref.ref(tensor)
    del tensor
    assert watch() is not None
    keeper.leave_last()
    assert watch() is None
    kept.get()  # the one of forward, which comes too late here, reads the shelf
    assert torch.equal(kept.get(), torch.ones(10))


def test_rows_are_uneven() -> None:
    assert len({len(row["input_ids"]) for row in make_rows()[:4]}) > 1
