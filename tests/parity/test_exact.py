"""Exact strategies, alone and together, give the weights of the training loop that is written out below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, Trained, make_llama, make_rows, make_trainer, run_training, snapshot
from registry import EXACT, Row, allowed, ids, together
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem import (
    EMA,
    AdamW,
    ChunkedCrossEntropy,
    Compile,
    GradientAccumulation,
    GradientCheckpointing,
    GradientClipping,
    OptimizerInBackward,
    Packing,
    Stage,
    Strategy,
)

STEPS, BATCH = 3, 4  # ten rows: batches of 4, 4 and 2


@dataclass(frozen=True)
class Numbers:
    """What AdamW is given."""

    peak: float
    betas: tuple[float, float]
    eps: float
    decay: float
    max_norm: float | None


# AdamW divides a gradient by its own size, so with the usual eps an entry that is all rounding noise moves as far as
# any other, and two right loops in float32 differ by whole steps there. With eps = 1 the update is proportional to the
# gradient: an error of the gradient reaches the weights as it is. The rate is so high that the weights move by a good
# part of their size (asserted), and the error is measured against the way they went as well as against the weights,
# else it would drown in them. In float64 the noise is a billion times smaller, and the usual eps is used.
def numbers(dtype: torch.dtype, betas: tuple[float, float], eps: float, max_norm: float | None) -> Numbers:
    if dtype is torch.float64:
        return Numbers(1e-3, betas, eps, 0.1, max_norm)
    return Numbers(2.0 if max_norm is None else 8.0, betas, 1.0, 0.01, max_norm)


def written_out(model: nn.Module, rows: list[dict[str, list[Any]]], given: Numbers) -> list[float]:
    """The whole of fine-tuning in plain torch; trains the model in place and returns the losses."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": given.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.peak, betas=given.betas, eps=given.eps, foreach=False, fused=False)
    losses = []
    model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = given.peak * (STEPS - step) / STEPS
        batch = rows[step * BATCH : (step + 1) * BATCH]
        length = max(len(row["input_ids"]) for row in batch)
        input_ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask, targets = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
        weights = torch.ones(len(batch), length, dtype=torch.float64)
        for i, row in enumerate(batch):
            n = len(row["input_ids"])
            input_ids[i, :n], mask[i, :n] = torch.tensor(row["input_ids"]), 1
            targets[i, :n] = torch.tensor(row["labels"])
            if "loss_weights" in row:
                weights[i, :n] = torch.tensor(row["loss_weights"], dtype=torch.float64)
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        targets, weights = targets[:, 1:], weights[:, 1:] * (targets[:, 1:] != -100)
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
        loss = (each * weights.to(each.dtype)).sum() / weights.sum().to(each.dtype)
        optimizer.zero_grad()
        loss.backward()
        if given.max_norm is not None:
            norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
            for p in model.parameters():
                p.grad.mul_(min(1.0, given.max_norm / (float(norm) + 1e-6)))
        optimizer.step()
        losses.append(loss.item())
    return losses


@lru_cache(maxsize=64)
def reference(
    dtype: torch.dtype, tied: bool, weighted: bool, given: Numbers
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after the written-out loop, and its losses."""
    model = make_llama(dtype, tied=tied)
    before = snapshot(model)
    losses = written_out(model, make_rows(weighted=weighted), given)
    return before, snapshot(model), losses


def compare(
    strategies: list[Strategy],
    dtype: torch.dtype = torch.float64,
    *,
    tied: bool = False,
    weighted: bool = False,
    max_grad_norm: float | None = None,
) -> Trained:
    """Train with the strategies and by the loop above; the weights and the losses must be the same."""
    if not any(isinstance(s, AdamW) for s in strategies):
        strategies = [*strategies, AdamW()]
    (adamw,) = (s for s in strategies if isinstance(s, AdamW))
    clip = [s.max_norm for s in strategies if isinstance(s, GradientClipping)]
    given = numbers(dtype, adamw.betas, adamw.eps, clip[0] if clip else max_grad_norm)
    adamw.eps = given.eps
    before, expected, losses = reference(dtype, tied, weighted, given)
    run = run_training(
        strategies,
        model=make_llama(dtype, tied=tied),
        rows=make_rows(weighted=weighted),
        learning_rate=given.peak,
        weight_decay=given.decay,
        max_grad_norm=max_grad_norm,
    )
    got = run.weights
    assert got.keys() == expected.keys()
    error = {n: got[n] - w for n, w in expected.items()}
    if dtype is torch.float64:
        worst = {n: e.abs().max().item() for n, e in error.items()}
        assert max(worst.values()) <= 1e-9, worst
        assert run.losses == pytest.approx(losses, rel=1e-9)
    else:
        way = total_norm({n: w - before[n] for n, w in expected.items()})
        assert way > 0.2 * total_norm(before), f"the weights moved by {way / total_norm(before)} of their size only"
        worst = {n: (e.norm() / expected[n].norm()).item() for n, e in error.items()}
        assert max(worst.values()) <= 2e-6, worst
        assert total_norm(error) <= 2e-6 * way, total_norm(error) / way
        assert run.losses == pytest.approx(losses, rel=2e-6)
    return run


def total_norm(tensors: dict[str, Tensor]) -> float:
    return torch.stack([t.norm() for t in tensors.values()]).norm().item()


@pytest.fixture(autouse=True)
def no_silent_fallback() -> Iterator[None]:
    """dynamo gives up on a function after eight variants of it and runs it uncompiled; here that is an error."""
    with torch._dynamo.config.patch(recompile_limit=128, fail_on_recompile_limit_hit=True):
        yield


alone = pytest.mark.parametrize("row", EXACT, ids=lambda row: row.id)
in_pairs = pytest.mark.parametrize("pair", allowed(EXACT, 2), ids=ids)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@DTYPES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_no_strategy(dtype: torch.dtype, tied: bool, weighted: bool, max_grad_norm: float | None) -> None:
    run = compare([], dtype, tied=tied, weighted=weighted, max_grad_norm=max_grad_norm)
    if max_grad_norm:
        assert all(step["grad_norm"] > max_grad_norm for step in run.steps), "nothing was clipped: the test is void"


@DTYPES
@alone
def test_alone(row: Row, dtype: torch.dtype) -> None:
    compare(together(row), dtype)


@alone
def test_alone_with_max_grad_norm(row: Row) -> None:
    if row.key in ("optimizer_in_backward", "gradient_clipping"):
        pytest.skip("refused: tests/test_conflicts.py")
    compare(together(row), max_grad_norm=0.5)


@alone
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_alone_with_loss_weights(row: Row, tied: bool) -> None:
    compare(together(row), weighted=True, tied=tied)


@alone
def test_alone_with_tied_embeddings(row: Row) -> None:
    compare(together(row), tied=True)


@in_pairs
def test_pair(pair: tuple[Row, ...]) -> None:
    """float64, with weights and tied embeddings, the two that strategies most easily get wrong together."""
    compare(together(*pair), weighted=True, tied=True)


@in_pairs
def test_pair_in_float32(pair: tuple[Row, ...]) -> None:
    compare(together(*pair), torch.float32)


@pytest.mark.triples
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("triple", allowed(EXACT, 3), ids=ids)
def test_triple(triple: tuple[Row, ...], weighted: bool) -> None:
    compare(together(*triple), weighted=weighted, tied=weighted)


def test_all_that_go_together() -> None:
    strategies = [
        ChunkedCrossEntropy(chunk_size=5),
        GradientCheckpointing(),
        EMA(decay=0.9),
        GradientAccumulation(steps=2),
        Packing(),
    ]
    compare(strategies, weighted=True, tied=True, max_grad_norm=0.5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_losses_do_not_depend_on_the_split(steps: int) -> None:
    compare([GradientAccumulation(steps=steps)])


# -- that a strategy does something at all ----------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The largest tensor that any operation returned, and the bytes that autograd saved apart from parameters."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.largest = 0
        self.saved: dict[int, int] = {}  # storage -> bytes; the storages are kept alive, so no address comes twice
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.data_ptr() not in self.parameters:
                self.largest = max(self.largest, tensor.numel())
        return out

    def pack(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self.parameters:
            self.largest = max(self.largest, tensor.numel())
            self.saved[pointer] = tensor.untyped_storage().nbytes()
            self.kept.append(tensor.detach())
        return tensor


def watched(strategies: list[Strategy], **options: Any) -> Watch:
    """What one step does."""
    trainer = make_trainer(strategies, max_steps=1, **options)
    watch = Watch({p.data_ptr() for p in trainer.model.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda t: t), watch:
        trainer.train()
    return watch


def saved_bytes(strategies: list[Strategy], **options: Any) -> int:
    """Bytes saved for backward in one step."""
    return sum(watched(strategies, model=make_llama(num_hidden_layers=4), **options).saved.values())


def passes(run_strategies: list[Strategy], **options: Any) -> list[tuple[int, int]]:
    """Shape of `input_ids` at every forward pass that is for training."""
    model, shapes = make_llama(), []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    run_training(run_strategies, model=model, **options)
    return shapes


def test_checkpointing_saves_less() -> None:
    plain, every_2nd, full = (
        saved_bytes(strategies)
        for strategies in ([], [GradientCheckpointing(every_n_layers=2)], [GradientCheckpointing()])
    )
    assert full < every_2nd < plain
    layers = 4
    each = (plain - full) / layers  # the outside of the layers is the same in all three
    assert every_2nd == pytest.approx(plain - 2 * each, rel=0.02)
    assert full < 0.4 * plain


def test_checkpointing_runs_every_layer_twice() -> None:
    for strategy, expected in (
        (GradientCheckpointing(), [2, 2, 2]),
        (GradientCheckpointing(every_n_layers=2), [2, 1, 2]),
    ):
        model = make_llama(num_hidden_layers=3)
        calls = [0, 0, 0]
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, i=i, calls=calls: calls.__setitem__(i, calls[i] + 1))
        run_training([strategy], model=model, max_steps=1)
        assert calls == expected


def test_accumulation_runs_micro_batches_of_like_length() -> None:
    rows = make_rows()
    assert [rows_in for rows_in, _ in passes([])] == [4, 4, 2]
    assert [rows_in for rows_in, _ in passes([GradientAccumulation()])] == [1] * 10
    assert [rows_in for rows_in, _ in passes([GradientAccumulation(steps=2)])] == [2, 2, 2, 2, 1, 1]
    lengths = sorted((len(row["input_ids"]) for row in rows[:4]), reverse=True)
    assert [length for _, length in passes([GradientAccumulation()], max_steps=1)] == lengths


def test_packing_makes_fewer_rows_and_no_padding() -> None:
    rows = make_rows()
    packed = passes([Packing()], max_length=128)
    assert [shape[0] for shape in packed] == [1, 1, 1]
    for step, shape in enumerate(packed):
        assert shape[1] == sum(len(row["input_ids"]) for row in rows[step * BATCH : (step + 1) * BATCH])


def test_packed_rows_are_split_by_accumulation() -> None:
    """`micro_batch_size` counts packed rows; what fits in one row is one forward pass."""
    assert len(passes([Packing(), GradientAccumulation()], max_length=128)) == 3
    assert len(passes([Packing(), GradientAccumulation()], max_length=29)) > 3


@pytest.mark.parametrize("partners", [[], [GradientCheckpointing], [Packing], [GradientAccumulation]])
def test_chunked_loss_never_holds_all_logits(partners: list[type[Strategy]]) -> None:
    """No tensor, forward, saved or backward, has as many elements as the logits of the supervised tokens."""
    rows = make_rows(4)
    vocabulary = 1000
    supervised = sum(label != -100 for row in rows for label in row["labels"][1:])
    largest = {}
    for name, strategies in (("plain", []), ("chunked", [ChunkedCrossEntropy(chunk_size=8)])):
        strategies = [*strategies, *(partner() for partner in partners), FrozenHead()]
        model = make_llama(vocab_size=vocabulary)
        largest[name] = watched(strategies, model=model, rows=rows, batch_size=4, max_length=128).largest
    longest = max(len(row["input_ids"]) for row in rows)
    assert largest["plain"] >= (longest - 1) * vocabulary
    assert supervised > 8
    assert largest["chunked"] <= 8 * vocabulary


@dataclass
class FrozenHead(Strategy):
    """Freezes head and embedding, whose own gradients (vocabulary x width) are not what is measured."""

    stage = Stage.ADAPT

    def wrap_model(self, model: nn.Module, run: Any) -> nn.Module:
        for module in (model.lm_head, model.model.embed_tokens):
            module.weight.requires_grad = False
        return model


def test_chunked_loss_leaves_out_tokens_without_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem.strategies import chunked_loss

    met = []
    original = chunked_loss.linear_cross_entropy

    def noted(hidden: Tensor, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled():
            met.append(len(hidden))
        return original(hidden, *arguments)

    monkeypatch.setattr(chunked_loss, "linear_cross_entropy", noted)
    run = run_training([ChunkedCrossEntropy()])
    assert sum(met) == run.result["supervised_tokens"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "partners",
    [[], [ChunkedCrossEntropy(chunk_size=8)], [GradientCheckpointing()], [Packing()], [EMA()]],
    ids=lambda partners: "+".join(s.name for s in partners) or "alone",
)
def test_optimizer_in_backward_leaves_no_gradient(partners: list[Strategy], tied: bool) -> None:
    """When the step comes, no gradient is left; every parameter was updated once per backward."""
    trainer = make_trainer([OptimizerInBackward(), *partners], model=make_llama(tied=tied))
    calls, alive, left = dict.fromkeys(trainer.run.trainable, 0), [], []
    for name, parameter in trainer.run.trainable.items():

        def counted(p: nn.Parameter, name: str = name) -> None:
            calls[name] += 1
            alive.append(sum(q.grad is not None for q in trainer.run.trainable.values()))

        parameter.register_post_accumulate_grad_hook(counted)
    step = trainer.step

    def watched_step() -> None:
        left.append(sum(p.grad is not None for p in trainer.run.trainable.values()))
        step()

    trainer.step = watched_step
    trainer.train()
    assert left == [0, 0, 0]
    assert set(calls.values()) == {3}, calls
    # autograd may hold a gradient that it has not handed over yet, but those of a few parameters at most
    assert max(alive) <= 2


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row.id)
def test_one_hook_call_per_parameter_and_backward(row: Row) -> None:
    trainer = make_trainer(together(row), model=make_llama(tied=True))
    calls, backwards = dict.fromkeys(trainer.run.trainable, 0), [0]
    for name, parameter in trainer.run.trainable.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.__setitem__(name, calls[name] + 1))
    original = Tensor.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        backwards[0] += 1
        original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", counted)
        trainer.train()
    assert backwards[0] >= 3
    assert set(calls.values()) == {backwards[0]}, calls


def test_ema_is_the_average_and_evaluation_sees_it() -> None:
    decay, seen = 0.9, []

    def record(event: Any) -> None:
        if event.kind == "step":
            seen.append(snapshot(event.trainer.model))

    run = run_training([EMA(decay=decay)], observers=[record], eval_rows=make_rows(6, seed=1))
    expected = run.before
    for weights in seen:
        expected = {n: decay * expected[n] + (1 - decay) * w for n, w in weights.items()}
    raw = run.weights
    with run.trainer.inference() as model:
        shown = snapshot(model)
    for name, value in expected.items():
        torch.testing.assert_close(shown[name], value, rtol=1e-6, atol=1e-7)
        assert not torch.equal(shown[name], raw[name])
        assert torch.equal(run.trainer.model.get_parameter(name), raw[name]), "the training weights did not come back"
    averaged = make_llama()
    with torch.no_grad():
        for name, parameter in averaged.named_parameters():
            parameter.copy_(expected[name])
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(plain_loss(averaged, make_rows(6, seed=1)), rel=1e-5)


def plain_loss(model: nn.Module, rows: list[dict[str, list[Any]]]) -> float:
    total, targets = 0.0, 0
    with torch.no_grad():
        for row in rows:
            labels = torch.tensor(row["labels"][1:])
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
            targets += int((labels != -100).sum())
    return total / targets


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row.id)
def test_evaluation_is_the_plain_loss(row: Row) -> None:
    """Evaluation goes through the wrapped loss, counts tokens, not batches, and leaves the weights alone."""
    held_out = make_rows(7, seed=3)
    trainer = make_trainer(together(row), eval_rows=held_out, eval_batch_size=3)
    before = snapshot(trainer.model)
    expected = plain_loss(make_llama(), held_out)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_clipping_logs_the_norm_before_clipping() -> None:
    plain = run_training([GradientClipping(max_norm=1e9)], max_steps=1)
    clipped = run_training([GradientClipping(max_norm=0.1)], max_steps=1)
    assert plain.steps[0]["grad_norm"] == clipped.steps[0]["grad_norm"] > 0.1


def test_compile_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs through a compiled graph, at every pass."""
    calls = [0]

    def counting(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls[0] += 1
            return graph(*args)

        return run

    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags=(): ["counting"])
    torch._dynamo.reset()
    torch._dynamo.register_backend(counting, name="counting")
    run_training([Compile(backend="counting")])
    assert calls[0] >= 2 * STEPS


def test_compile_through_autograd() -> None:
    """The backend "aot_eager" traces backward, too. One step: compiling for a second length takes long on a CPU."""
    plain = run_training(model=make_llama(torch.float64), max_steps=1)
    strategies = [Compile(backend="aot_eager"), GradientCheckpointing()]
    compiled = run_training(strategies, model=make_llama(torch.float64), max_steps=1)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, rtol=0, atol=1e-9)


def test_rows_are_what_the_tests_say() -> None:
    rows = make_rows()
    lengths = [len(row["input_ids"]) for row in rows]
    assert len(set(lengths)) > 5
    assert all(row["labels"][0] == -100 for row in rows)
    assert max(max(row["input_ids"]) for row in rows) < VOCABULARY
    weights = np.concatenate([row["loss_weights"] for row in make_rows(weighted=True)])
    assert len(set(weights.tolist())) > 3
