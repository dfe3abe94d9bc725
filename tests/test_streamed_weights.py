"""StreamedWeights: exact in every company, nothing read after it has left, two layers on the card, exact host bytes."""

from __future__ import annotations

import re
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Trained, make_llama, make_rows, make_trainer, run_training
from registry import ROWS, Row, refusal, together
from small_models import byte_tokenizer
from torch import nn

from lowmem import (
    EMA,
    ChunkedLayers,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    LoRA,
    Packing,
    Quantization,
    RetryOnOOM,
    Strategy,
    StreamedWeights,
    TiledMLP,
    Trainer,
    TrainingConfig,
)
from lowmem.config import ModelConfig
from lowmem.errors import UserError
from lowmem.memory.estimate import estimate
from lowmem.memory.predict import judge, record
from lowmem.memory.subject import Subject, model_config
from lowmem.memory.trace import Trace
from lowmem.ops import streamed
from lowmem.ops.streamed import LABEL, Away

STREAMED = next(row for row in ROWS if row.key == "streamed_weights")
COMPANY = [row for row in ROWS if row is not STREAMED and refusal((STREAMED, row)) is None]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left the card is overwritten (all bits set: NaN, -1), so that whoever still reads it gets nonsense."""
    leave = Away.leave

    def poisoned(self: Away) -> None:
        if self.card is not None:
            self.card.fill_(255)
        leave(self)

    monkeypatch.setattr(Away, "leave", poisoned)


def both(strategies: Any, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Trained, Trained]:
    """A run, and the same one with streamed weights. `strategies` makes new ones."""
    model = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    runs = []
    for added in ([], [StreamedWeights()]):
        torch.manual_seed(1)
        runs.append(run_training([*strategies(), *added], model=make_llama(dtype, **model), **options))
    return runs[0], runs[1]


def require_equal(plain: Trained, other: Trained, tolerance: float = 0.0) -> None:
    for name, weight in plain.weights.items():
        torch.testing.assert_close(other.weights[name], weight, rtol=0, atol=tolerance, msg=name)
    assert other.losses == pytest.approx(plain.losses, rel=tolerance, abs=tolerance)
    assert other.losses[-1] != other.losses[0]


@pytest.mark.parametrize("row", COMPANY, ids=lambda row: row.id)
def test_every_pair_is_bit_for_bit_the_run_without_it(row: Row, poison: None) -> None:
    def company() -> list[Strategy]:
        partners = Row("", row.make, (*row.partners, *STREAMED.partners))
        return together(partners)

    dtype = torch.float32 if row.bound is not None else torch.float64
    require_equal(*both(company, dtype))


MIXES: dict[str, tuple[dict[str, Any], Any]] = {
    "groups-of-2": ({}, lambda: [GradientCheckpointing(layers_per_checkpoint=2)]),
    "groups-of-3": ({"use_dora": True}, lambda: [GradientCheckpointing(layers_per_checkpoint=3, offload="cpu")]),
    "nf4-tiled": ({}, lambda: [Quantization(), GradientCheckpointing(layers_per_checkpoint=2), TiledMLP(tile_size=16)]),
    "nf4-dora": ({"use_dora": True}, lambda: [Quantization(), GradientCheckpointing()]),
    "nf4-few": ({"target_modules": ["q_proj"]}, lambda: [Quantization(), GradientCheckpointing()]),
    "nf4-sliced": ({}, lambda: [Quantization(), GradientCheckpointing(), ChunkedLayers(chunk_size=16)]),
    "int8-few": (
        {"target_modules": ["q_proj"]},
        lambda: [Quantization(format="int8"), GradientCheckpointing(), TiledMLP(tile_size=16)],
    ),
    "int8-dora": (
        {"use_dora": True},
        lambda: [Quantization(format="int8"), GradientCheckpointing(), TiledMLP(tile_size=16)],
    ),
    "nf4-few-sliced": (
        {"target_modules": ["q_proj"]},
        lambda: [Quantization(), GradientCheckpointing(), ChunkedLayers(chunk_size=16)],
    ),
    "packed": ({}, lambda: [GradientCheckpointing(), Packing(), GradientAccumulation(), EMA(decay=0.9)]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_are_bit_for_bit_the_run_without_it(mix: str, poison: None) -> None:
    """With evaluation between the steps."""
    lora, others = MIXES[mix]
    held_out = {"eval_rows": make_rows(3, seed=4), "eval_steps": 1, "max_steps": 2, "batch_size": 2}
    require_equal(*both(lambda: [LoRA(r=4, **lora), *others()], torch.float32, **held_out))


def test_a_pass_that_failed_leaves_nothing_on_the_card(poison: None) -> None:
    failing = [True]

    def runs() -> list[Strategy]:
        failing[0] = True
        return [LoRA(r=4), GradientCheckpointing(), RetryOnOOM()]

    plain, _ = both(runs, max_steps=2)
    trainer = make_trainer(
        [*runs(), StreamedWeights()],
        model=make_llama(torch.float64, hidden_size=64, intermediate_size=128, num_hidden_layers=3),
        max_steps=2,
    )
    seen = []

    def fail_once(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and failing[0]:
            failing[0] = False
            seen.append(sum(layer.card is not None for layer in streamer_of(trainer).layers))
            raise torch.OutOfMemoryError("on purpose")

    trainer.model.get_base_model().model.layers[2].mlp.register_forward_pre_hook(fail_once)
    trainer.train()
    assert seen
    assert seen[0] in (1, 2)
    assert on_card(trainer) == 0
    assert trainer.run.counters["oom_retries"] == 1
    for name, weight in plain.trainer.run.trainable.items():
        torch.testing.assert_close(trainer.run.trainable[name], weight, rtol=0, atol=1e-9, msg=name)


def streamer_of(trainer: Any) -> streamed.Streamer:
    found: streamed.Streamer = next(s for s in trainer.strategies if isinstance(s, StreamedWeights))._streamer  # type: ignore[assignment]
    return found


def on_card(trainer: Any) -> int:
    return sum(layer.card is not None for layer in streamer_of(trainer).layers)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_layer_comes_once_a_visit_and_one_ahead(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second pass on no guess is wrong, and only the first layer of a pass is late."""
    trainer = make_trainer(
        [LoRA(r=4), GradientCheckpointing(layers_per_checkpoint=k), StreamedWeights()],
        model=make_llama(num_hidden_layers=6),
        max_steps=1,
    )
    streamer, begun, entered, late = streamer_of(trainer), [], [], []
    begin, enter = Away.begin, streamed.Streamer.enter

    def beginning(self: Away, *args: Any) -> None:
        begun.append(streamer.layers.index(self))
        begin(self, *args)

    def entering(self: streamed.Streamer, number: int) -> None:
        entered.append(number)
        if number not in self._here:
            late.append(number)
        enter(self, number)
        assert len(self._here) <= 2

    monkeypatch.setattr(Away, "begin", beginning)
    monkeypatch.setattr(streamed.Streamer, "enter", entering)
    rows = [make_rows(2)]
    trainer.model.train()
    trainer.forward_backward(rows, 10.0)
    begun.clear(), entered.clear(), late.clear()
    trainer.forward_backward(rows, 10.0)
    assert late == [0]
    again = sum(a == b for a, b in pairwise(entered))  # the last layer stays for backward
    assert len(begun) == len(entered) - again
    assert entered[:6] == [0, 1, 2, 3, 4, 5]
    assert on_card(trainer) == 0


@pytest.mark.parametrize("format", [None, "nf4"])
def test_host_and_card_hold_what_they_should(format: Any) -> None:
    """On a card: every frozen byte of the layers is pinned, once; at most two layers' are on the card, ever."""
    with torch.device("meta"):
        model = make_llama(torch.bfloat16, num_hidden_layers=6, hidden_size=256, intermediate_size=512)
    layer = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512 + 2 * 256)
    training = TrainingConfig(batch_size=2, max_steps=2, max_length=64, max_grad_norm=None)
    strategies = [LoRA(r=4), GradientCheckpointing(), StreamedWeights()]
    strategies += [Quantization()] if format else []
    trace = record(model, training, strategies, "cuda", (64, 64))
    size = {s.size for s in trace.storages if s.label == LABEL and s.kept_on == "device"}
    assert len(size) == 1
    (size,) = size
    if format is None:
        assert size == layer
    else:
        assert 0.25 * layer < size < 0.28 * layer
    assert sum(s.size for s in trace.storages if s.kept_on == "pinned" and s.label == "weights, frozen") == 6 * size
    live = most = 0
    for number, change in trace.events:
        live += change * (trace.storages[number].label == LABEL)
        most = max(most, live)
    assert most == 2 * size
    assert live == 0
    found = judge(trace, expandable=True)
    assert found.pinned_bytes >= 6 * size
    assert found.ledger[LABEL] <= 2 * size


def test_a_layer_is_let_go_before_the_next_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files, as a run loads them: beside the buffers lie the layers that have not been packed yet, and no copy."""
    make_llama(torch.bfloat16, num_hidden_layers=5).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    origins: list[list[weakref.ref[Any]]] = []
    alive: list[list[int]] = []
    going, packed = StreamedWeights._going, Away.__init__

    def listed(self: StreamedWeights, model: nn.Module) -> Any:
        layers = going(self, model)
        origins[:] = [[weakref.ref(slot.get().untyped_storage()) for slot in slots] for slots in layers]
        return layers

    def packing(self: Away, *args: Any) -> None:
        packed(self, *args)
        alive.append([sum(ref() is not None for ref in refs) for refs in origins])

    monkeypatch.setattr(StreamedWeights, "_going", listed)
    monkeypatch.setattr(Away, "__init__", packing)
    Trainer(
        str(tmp_path),
        make_rows(),
        training=TrainingConfig(batch_size=2, max_steps=1, max_length=64),
        strategies=[LoRA(r=2), GradientCheckpointing(), StreamedWeights()],
    )
    whole = len(origins[0])
    assert whole == 9
    assert alive == [[0] * (n + 1) + [whole] * (4 - n) for n in range(5)]


def test_the_predicted_host_holds_one_copy(tmp_path: Path) -> None:
    """Not the files' tensors and, beside them, all that they become."""
    model = make_llama(torch.bfloat16, num_hidden_layers=6, hidden_size=256, intermediate_size=512)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    given = ModelConfig(str(tmp_path), dtype="bfloat16")
    numbers = TrainingConfig(batch_size=2, max_steps=2, max_length=64)
    strategies = [LoRA(r=4), GradientCheckpointing(), StreamedWeights()]
    found = estimate(Subject.of_config(model_config(given), given, numbers, strategies), lengths=(64, 64), band=False)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    whole = sum(p.nbytes for p in model.parameters())
    held = {phase: size.get("tensors", 0) + size.get("pinned", 0) for phase, size in found.host_phases.items()}
    assert whole <= held["load"] <= whole + layer
    assert 6 * layer <= held["at rest"] <= 6 * layer + 2**14
    assert found.host_phases["forward"]["pinned"] == found.pinned_bytes


def test_beyond_the_limit_memory_is_pageable() -> None:
    with torch.device("meta"):
        model = make_llama(torch.bfloat16, num_hidden_layers=4, hidden_size=256, intermediate_size=512)
    training = TrainingConfig(batch_size=2, max_steps=2, max_length=64, max_grad_norm=None)
    strategies = [LoRA(r=4), GradientCheckpointing(), StreamedWeights(pinned_memory="3MiB")]
    seen: list[Any] = []
    trace = record(model, training, strategies, "cuda", (64, 64), look=seen.append)
    kinds = [s.kept_on for s in trace.storages if s.label == "weights, frozen" and s.size > 2**20]
    assert sorted(kinds) == ["host", "host", "pinned", "pinned"]
    assert any("streamed_weights: more than 3,145,728 bytes" in text for text in seen[0].run.all_notices)


def test_live_bytes_are_flat_over_many_steps() -> None:
    after: list[int] = []
    trace = Trace("cpu")

    def look(event: Any) -> None:
        if event.kind == "step":
            after.append(sum(size for _, size in trace.events))

    trainer = make_trainer(
        [LoRA(r=2, target_modules=["q_proj"]), GradientCheckpointing(), StreamedWeights()],
        rows=[{"input_ids": [1, 2, 3, 4, 5]}] * 4,
        observers=[look],
        max_steps=100,
        batch_size=1,
        model=make_llama(hidden_size=16, intermediate_size=16, num_hidden_layers=2),
    )
    trainer.observers = [look]
    with trace:
        trainer.train()
    assert len(set(after[2:])) == 1, sorted(set(after[2:]))


def test_generate_and_save_and_resume(tmp_path: Path, poison: None) -> None:
    """Between steps and afterwards, everyone sees the right weights; nothing stays on the card."""
    strategies = lambda: [LoRA(r=4), GradientCheckpointing(layers_per_checkpoint=2)]  # noqa: E731
    options = {"max_steps": 4, "save_steps": 2, "max_length": 64}
    plain = run_training(strategies(), output_dir=str(tmp_path / "plain"), **options)
    run = run_training([*strategies(), StreamedWeights()], output_dir=str(tmp_path / "streamed"), **options)
    require_equal(plain, run)
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    answers = []
    for trained in (plain, run):
        with trained.trainer.inference() as model:
            answers.append(model.generate(torch.tensor([rows[1]]), max_new_tokens=5))
    assert torch.equal(*answers)
    assert on_card(run.trainer) <= 1
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        one, other = (next((tmp_path / folder).rglob(name)).read_bytes() for folder in ("plain", "streamed"))
        assert one == other, name
    again = make_trainer([*strategies(), StreamedWeights()], output_dir=str(tmp_path / "streamed"), **options)
    again.train(resume_from=tmp_path / "streamed" / "checkpoint-000002")
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, run.weights[name]), name
    merged, expected = (t.trainer.model.merge_and_unload() for t in (run, plain))
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_shared_weights_and_buffers_stay() -> None:
    model = make_llama(num_hidden_layers=3)
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    layers[1].register_buffer("running", torch.zeros(4))
    trainer = make_trainer([LoRA(r=2), GradientCheckpointing(), StreamedWeights()], model=model)
    shared = trainer.model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    homes = {layer.host.untyped_storage()._cdata for layer in streamer_of(trainer).layers}
    assert shared.untyped_storage()._cdata not in homes
    assert trainer.model.get_base_model().model.layers[1].running.untyped_storage()._cdata not in homes
    own = trainer.model.get_base_model().model.layers[0].mlp.down_proj.base_layer.weight
    assert own.untyped_storage()._cdata in homes
    trainer.train()
    assert shared is trainer.model.get_base_model().model.layers[2].mlp.up_proj.base_layer.weight


def test_refusals() -> None:
    with pytest.raises(
        ConflictError, match=re.escape("streamed_weights needs every block to be recomputed in backward")
    ):
        make_trainer([LoRA(), StreamedWeights()])
    with pytest.raises(UserError, match="every weight of the layers is trained"):
        make_trainer([GradientCheckpointing(), StreamedWeights()])
    with pytest.raises(UserError, match=re.escape("streamed_weights.pinned_memory")):
        StreamedWeights(pinned_memory="much")


def test_on_a_cpu_it_says_so() -> None:
    trainer = make_trainer([LoRA(), GradientCheckpointing(), StreamedWeights()])
    assert [text for text in trainer.run.all_notices if "nowhere to go" in text]


def test_only_frozen_weights_go() -> None:
    class HalfFrozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.a.requires_grad_(False)

    assert {slot.name for slot in streamed.slots_of(HalfFrozen())} == {"weight", "bias"}
    assert all(slot.holder.in_features == 2 for slot in streamed.slots_of(HalfFrozen()))
    assert len(streamed.slots_of(HalfFrozen())) == 2
