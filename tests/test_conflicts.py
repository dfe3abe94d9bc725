"""What is refused before anything is built, in which words; and what the registry of the tests must hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path

import pytest
from conftest import make_trainer
from registry import REFUSED, ROWS, Row, refusal, together

from lowmem import (
    EMA,
    AdamW,
    AdamW8bit,
    ChunkedCrossEntropy,
    Compile,
    ConflictError,
    GradientAccumulation,
    GradientCheckpointing,
    GradientClipping,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PureBF16,
    Quantization,
    Stage,
    Strategy,
    Trait,
    UserError,
)
from lowmem.strategies import STRATEGIES
from lowmem.strategy import resolve

ROOT = Path(__file__).parent.parent

# strategies, what both are called, and the words that the message owes its reader: what clashes, and what to do
TABLE = [
    ([AdamW(), AdamW8bit()], ("adamw", "adamw_8bit"), ("slot 'optimizer'", "keep one")),
    ([MixedPrecision(), PureBF16()], ("mixed_precision", "pure_bf16"), ("slot 'precision'", "keep one")),
    ([MixedPrecision(), MixedPrecision(dtype="float16")], ("mixed_precision",), ("slot 'precision'", "keep one")),
    ([LoRA(), LoRA(r=4)], ("lora",), ("slot 'adapter'", "keep one")),
    ([Packing(), Packing()], ("packing",), ("slot 'pack'", "keep one")),
    ([Compile(), Compile()], ("compile",), ("slot 'compile'", "keep one")),
    ([EMA(), EMA(decay=0.5)], ("ema",), ("slot 'average'", "keep one")),
    ([ChunkedCrossEntropy(), ChunkedCrossEntropy()], ("chunked_cross_entropy",), ("slot 'loss'", "keep one")),
    ([Quantization(), Quantization()], ("quantization",), ("slot 'base_weights'", "keep one")),
    ([OptimizerInBackward(), OptimizerInBackward()], ("optimizer_in_backward",), ("slot 'placement'", "keep one")),
    (
        [GradientCheckpointing(), GradientCheckpointing(every_n_layers=2)],
        ("gradient_checkpointing",),
        ("slot 'recompute'", "keep one"),
    ),
    (
        [GradientAccumulation(), GradientAccumulation(steps=2)],
        ("gradient_accumulation",),
        ("slot 'split'", "keep one"),
    ),
    (
        [GradientClipping(), GradientClipping(2.0)],
        ("gradient_clipping",),
        ("slot 'clip'", "keep one", "set max_grad_norm: null"),
    ),
    (
        [OptimizerInBackward(), GradientClipping()],
        ("optimizer_in_backward", "gradient_clipping"),
        ("all gradients of the step", "takes that away", "set max_grad_norm: null"),
    ),
    (
        [OptimizerInBackward(), GradientAccumulation()],
        ("optimizer_in_backward", "gradient_accumulation"),
        ("all gradients of the step", "takes that away", "drop gradient_accumulation and lower training.batch_size"),
    ),
    (
        [OptimizerInBackward(), MixedPrecision(dtype="float16")],
        ("optimizer_in_backward", "mixed_precision"),
        ("all gradients of the step", "takes that away", "use dtype: bfloat16"),
    ),
    ([Quantization()], ("quantization",), ("something to be trainable", "add lora")),
    ([Quantization(format="int8"), EMA()], ("quantization",), ("something to be trainable", "add lora")),
]


@pytest.mark.parametrize(
    ("strategies", "names", "words"), TABLE, ids=["+".join(s.name for s in strategies) for strategies, _, _ in TABLE]
)
def test_refusal(strategies: list[Strategy], names: tuple[str, ...], words: tuple[str, ...]) -> None:
    for order in permutations(strategies):
        with pytest.raises(ConflictError) as caught:
            resolve(order)
        for part in (*names, *words):
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_default_clipping_is_named_as_the_setting_it_comes_from() -> None:
    """Nobody wrote gradient_clipping here: the message leads to `max_grad_norm`, and doing what it says helps."""
    with pytest.raises(ConflictError, match="set max_grad_norm: null") as caught:
        make_trainer([OptimizerInBackward()], max_grad_norm=1.0)
    assert "gradient_clipping" in str(caught.value)
    assert "optimizer_in_backward" in str(caught.value)
    make_trainer([OptimizerInBackward()], max_grad_norm=None).train()
    with pytest.raises(ConflictError, match="set max_grad_norm: null"):
        make_trainer([GradientClipping()], max_grad_norm=1.0)


def said_by(rows: tuple[Row, ...]) -> str | None:
    """The message with which the rows are refused; None where they are not."""
    try:
        resolve(together(*rows))
    except ConflictError as error:
        return str(error)
    return None


def test_what_is_refused_is_what_the_registry_expects() -> None:
    """Both ways round: no refusal that nobody expects, no expectation that nothing fulfils."""
    for pair in combinations(ROWS, 2):
        if pair[0].key == pair[1].key:
            continue
        words = refusal(pair)
        said = said_by(pair)
        if words is None:
            assert said is None, f"{pair[0].id} + {pair[1].id} is refused, and the registry does not say so"
            continue
        assert said is not None, f"{pair[0].id} + {pair[1].id} is not refused"
        for part in (pair[0].key, pair[1].key, *words):
            assert part in said
    there = {frozenset(names) for a, b in combinations(ROWS, 2) for names in ((a.key, b.key), (a.id, b.id))}
    assert set(REFUSED) <= there, "it expects a refusal of a pair that is not there"


def test_bfloat16_autocast_needs_no_loss_scale_and_goes_with_updates_in_backward() -> None:
    resolve([MixedPrecision(), OptimizerInBackward(), AdamW()])


def test_order_has_no_meaning() -> None:
    chosen = [Quantization(), LoRA(), GradientCheckpointing(), GradientAccumulation(), MixedPrecision(), AdamW8bit()]
    expected = resolve(chosen)
    assert [s.name for s in expected] == [
        "quantization",
        "lora",
        "gradient_checkpointing",
        "adamw_8bit",
        "mixed_precision",
        "gradient_accumulation",
    ]
    for order in permutations(chosen):
        assert resolve(order) == expected


def test_every_message_is_the_same_in_every_order() -> None:
    chosen = [OptimizerInBackward(), GradientClipping(), GradientAccumulation()]
    messages = set()
    for order in permutations(chosen):
        with pytest.raises(ConflictError) as caught:
            resolve(order)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_everything_that_goes_together_at_once() -> None:
    resolve(
        [
            Quantization(),
            LoRA(),
            ChunkedCrossEntropy(),
            GradientCheckpointing(),
            Compile(),
            AdamW8bit(),
            GradientClipping(),
            EMA(),
            MixedPrecision(dtype="float16"),
            GradientAccumulation(),
            Packing(),
        ]
    )


@dataclass
class NeedsRecompute(Strategy):
    stage = Stage.OFFLOAD

    @property
    def needs(self) -> frozenset[Trait]:
        return frozenset({Trait.RECOMPUTE})


@dataclass
class BreaksDense(Strategy):
    stage = Stage.OFFLOAD

    @property
    def breaks(self) -> frozenset[Trait]:
        return frozenset({Trait.DENSE_PARAMS})


def test_needs_of_a_users_own_strategy() -> None:
    """A need that nobody meets, one that only the full setting of another meets, and one that is taken away."""
    with pytest.raises(ConflictError, match=r"NeedsRecompute needs every block to be recomputed in backward"):
        resolve([NeedsRecompute()])
    with pytest.raises(ConflictError, match="every block to be recomputed"):
        resolve([NeedsRecompute(), GradientCheckpointing(every_n_layers=2)])
    resolve([NeedsRecompute(), GradientCheckpointing()])
    with pytest.raises(ConflictError, match=r"adamw_8bit needs .*, and .*BreaksDense takes that away; drop"):
        resolve([AdamW8bit(), BreaksDense()])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientAccumulation(steps=5), "gradient_accumulation.steps: 5 is more than training.batch_size 4"),
        (lambda: GradientAccumulation(micro_batch_size=5), "gradient_accumulation.micro_batch_size: 5 is more than"),
        (lambda: GradientAccumulation(steps=2, micro_batch_size=2), "not both"),
        (lambda: GradientAccumulation(steps=0), "count from 1"),
        (lambda: GradientCheckpointing(every_n_layers=0), "leave the strategy out"),
        (lambda: ChunkedCrossEntropy(chunk_size=0), "counts from 1"),
        (lambda: EMA(decay=1.0), "between 0 and 1"),
        (lambda: LoRA(r=0), "counts from 1"),
        (lambda: LoRA(lora_dropout=1.0), "below 1"),
        (lambda: LoRA(target_modules=["q_porj"]), "no module is called q_porj; near it: q_proj"),
        (lambda: LoRA(modules_to_save=["lm_haed"]), "no module is called lm_haed; near it: lm_head"),
        (lambda: LoRA(target_modules=["q_proj", "qproj"]), "no module is called qproj; near it: q_proj"),
        (lambda: MixedPrecision(initial_scale=2.0), "has no effect with bfloat16"),
        (lambda: Compile(backend="inductr"), "there is no inductr; known:"),
    ],
)
def test_settings_that_cannot_be_meant(make: type[Strategy], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_trainer([make()])
    assert words in str(caught.value)


# -- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_strategy_has_a_row(key: str) -> None:
    mine = [row for row in ROWS if row.key == key]
    assert mine, f"tests/registry.py has no row for {key}"
    for row in mine:
        assert type(row.make()) is STRATEGIES[key]
        assert (row.bound is None) is row.make().exact, f"{row.id}: exact means no bound, approximate means a bound"


def test_rows_are_of_strategies_there_are() -> None:
    assert {row.key for row in ROWS} == set(STRATEGIES)
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_strategy_has_a_card(key: str) -> None:
    card = ROOT / "docs" / "strategies" / f"{key}.md"
    assert card.is_file(), f"there is no card {card.relative_to(ROOT)}"
    assert len(card.read_text(encoding="utf-8").strip()) > 200


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_strategy_stands_in_the_table_of_the_readme(key: str) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.lstrip().startswith("|")]
    names = (f"`{key}`", f"[{key}]", f"`{STRATEGIES[key].__name__}`", f"[{STRATEGIES[key].__name__}]")
    assert any(name in line for line in table for name in names), f"README.md has no table row for {key}"


@pytest.mark.parametrize("key", STRATEGIES)
def test_every_strategy_says_what_it_saves_and_costs(key: str) -> None:
    cls = STRATEGIES[key]
    assert cls.saves
    assert cls.costs
    assert isinstance(cls.stage, Stage)
    assert cls.__doc__
    first = next(row for row in ROWS if row.key == key)
    assert isinstance(first, Row)
    assert first.make().name == key
