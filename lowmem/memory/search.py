"""What the planner searches: one row per answer, one axis per question. What cannot stand together, strategies declare.

A new strategy is a new row, on an axis that is there or on one of its own. Nothing here says what goes with what:
combinations are built, and `lowmem.strategy.resolve` refuses those whose declarations conflict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from lowmem.config import TrainingConfig
from lowmem.strategies import STRATEGIES, with_defaults
from lowmem.strategy import ConflictError, Strategy, resolve

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")  # by what is given up, least first
Half = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Option:
    """One answer.

    Attributes:
        name: for people, unique on its axis.
        strategies: key in a recipe -> settings.
        training: numbers of the run that go with it.
        dtype: of the weights as loaded (`model.dtype`); null: this row does not say.
        gives_up: what is no longer as in plain training, one phrase each.
        methods: the methods it makes a difference to.
        half: the 16-bit dtypes of cards on which it runs.
        may_be_refused: for some models its strategies are.
    """

    name: str
    strategies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    gives_up: tuple[str, ...] = ()
    methods: tuple[str, ...] = METHODS
    half: tuple[Half, ...] = ("bfloat16", "float16")
    may_be_refused: bool = False


@dataclass(frozen=True)
class Axis:
    """One question, and its answers, of which a choice takes exactly one.

    Attributes:
        name: for people.
        options: the answers; the last one is expected to need the least memory.
        family: its answers change what every other answer costs, so that costs are learned for each apart.
        per_row: the bytes it decides grow with the rows of a pass.
        at_rest: the bytes it decides are there all the time, so that an answer adds as much to every choice.
    """

    name: str
    options: tuple[Option, ...]
    family: bool = False
    per_row: bool = False
    at_rest: bool = False


@dataclass(frozen=True)
class Choice:
    """One answer per axis.

    Attributes:
        picks: name of the axis -> answer.
    """

    picks: Mapping[str, Option]

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal choices."""
        return tuple(option.name for option in self.picks.values())

    @property
    def method(self) -> str:
        """full, lora or qlora."""
        return self.picks["method"].name

    @property
    def micro_batches(self) -> bool:
        """Whether the batch is split."""
        return bool(self.picks["split"].strategies)

    @cached_property
    def gives_up(self) -> tuple[str, ...]:
        """What is no longer as in plain training."""
        return tuple(words for option in self.picks.values() for words in option.gives_up)

    @property
    def dtype(self) -> str:
        """Of the weights as loaded."""
        return next((option.dtype for option in self.picks.values() if option.dtype), "auto")

    def settings(self) -> dict[str, dict[str, Any]]:
        """Key in a recipe -> settings, as given."""
        return {key: dict(value) for o in self.picks.values() for key, value in o.strategies.items()}

    def strategies(self) -> list[Strategy]:
        """New instances."""
        return [STRATEGIES[key](**settings) for key, settings in self.settings().items()]

    def training(self, numbers: TrainingConfig) -> TrainingConfig:
        """The numbers of the run with this choice."""
        changes = {key: value for option in self.picks.values() for key, value in option.training.items()}
        return replace(numbers, **changes)

    def with_(self, **picks: Option) -> Choice:
        """With other answers."""
        return Choice({**self.picks, **picks})

    def allowed(self, numbers: TrainingConfig) -> bool:
        """Whether its strategies can work together, by their declarations."""
        if any(self.method not in option.methods for option in self.picks.values()):
            return False
        try:
            resolve(with_defaults(self.strategies(), self.training(numbers)))
        except ConflictError:
            return False
        return True


def choices(axes: Sequence[Axis], numbers: TrainingConfig) -> Iterator[Choice]:
    """Every allowed combination."""
    for options in product(*(axis.options for axis in axes)):
        choice = Choice(dict(zip((axis.name for axis in axes), options, strict=True)))
        if choice.allowed(numbers):
            yield choice


def axes_for(
    numbers: TrainingConfig,
    half: Half = "bfloat16",
    methods: Sequence[str] = METHODS,
    rank: int = 16,
    gpus: int = 1,
    further: bool = False,
) -> tuple[Axis, ...]:
    """The search space.

    Args:
        numbers: of the run; the batch is split into equal parts.
        half: the 16-bit dtype that the card computes in.
        methods: those to be searched.
        rank: of adapters.
        gpus: cards that share the run.
        further: of what makes room, the techniques that are dear: slices of layers, and the host's memory.
    """
    return (
        *((_SHARED,) if gpus > 1 else ()),
        Axis("method", tuple(row for row in _methods(half, rank) if row.name in methods), family=True),
        Axis("precision", tuple(row for row in _precisions(half) if half in row.half), family=True),
        _OPTIMIZER,
        _PLACEMENT,
        *(_FURTHER if further else (_CHECKPOINTING, _LOSS)),
        Axis("split", split_options(-(-numbers.batch_size // gpus)), per_row=True),
    )


def _methods(half: Half, rank: int) -> tuple[Option, ...]:
    adapters = (f"adapters of rank {rank} instead of all weights", f"frozen weights in {half}")
    lora = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    nf4 = {"format": "nf4", "double_quant": True, "compute_dtype": half}
    return (
        Option("full"),
        Option("lora", {"lora": lora}, dtype=half, gives_up=adapters),
        Option(
            "qlora",
            {"quantization": nf4, "lora": lora},
            dtype=half,
            gives_up=(*adapters, "frozen weights rounded to 4 bits"),
        ),
    )


def _precisions(half: Half) -> tuple[Option, ...]:
    return (
        # With adapters the frozen weights are 16-bit anyway: without autocast nothing would be more exact.
        Option("float32", methods=("full",)),
        Option("autocast", {"mixed_precision": {"dtype": half}}, gives_up=(f"products in {half}",)),
        Option(
            "pure bfloat16",
            {"pure_bf16": {}},
            gives_up=("products in bfloat16", "trained weights in bfloat16, updates rounded at random"),
            half=("bfloat16",),
        ),
    )


_SHARED = Axis("cards", (Option("ddp", {"ddp": {}}), Option("fsdp_2", {"fsdp_2": {}})), family=True)
# Paged moments are not here: while they fit they are the same, and a plan is only made of what fits.
_OPTIMIZER = Axis(
    "optimizer",
    (Option("AdamW"), Option("8-bit AdamW", {"adamw_8bit": {}}, gives_up=("moments of 8 bits",))),
    at_rest=True,
)
_PLACEMENT = Axis(
    "placement",
    (
        Option(
            "in backward",
            {"optimizer_in_backward": {}},
            {"max_grad_norm": None},
            gives_up=("clipping of the gradient's norm",),
        ),
        Option("step"),
    ),
)
_CHECKPOINTING = Axis(
    "checkpointing",
    (
        Option("none"),
        Option("every 2nd layer", {"gradient_checkpointing": {"every_n_layers": 2}}),
        Option("every layer", {"gradient_checkpointing": {"every_n_layers": 1}}),
    ),
    per_row=True,
)
_LOSS = Axis("loss", (Option("whole"), Option("in chunks", {"chunked_cross_entropy": {}})), per_row=True)
# What a card cannot hold with every layer recomputed: of the cheaper means all are taken.
_FURTHER = (
    Axis(
        "checkpointing",
        (
            Option("every layer", {"gradient_checkpointing": {}}),
            Option(
                "every layer, inputs on the host", {"gradient_checkpointing": {"offload": "cpu"}}, may_be_refused=True
            ),
        ),
        per_row=True,
    ),
    Axis("loss", (Option("in chunks", {"chunked_cross_entropy": {}}),), per_row=True),
    Axis(
        "layers",
        (
            Option("whole"),
            Option("MLP in slices", {"tiled_mlp": {}}, may_be_refused=True),
            Option("layers in slices", {"chunked_layers": {}}, may_be_refused=True),
        ),
        per_row=True,
    ),
    Axis(
        "frozen weights",
        (
            Option("weights on the card"),
            Option("weights on the host", {"streamed_weights": {}}, methods=("lora", "qlora"), may_be_refused=True),
        ),
        at_rest=True,
    ),
)


def split_options(batch_size: int) -> tuple[Option, ...]:
    """All rows at once, then equal parts of fewer and fewer rows."""
    sizes = [rows for rows in range(batch_size - 1, 0, -1) if batch_size % rows == 0]
    parts = tuple(Option(f"{rows} at a time", {"gradient_accumulation": {"micro_batch_size": rows}}) for rows in sizes)
    return (Option("all rows at once"), *parts)


def rows_per_pass(choice: Choice, batch_size: int) -> int:
    """Rows of one forward pass on a card that gets `batch_size` of an optimizer batch."""
    given = choice.picks["split"].strategies.get("gradient_accumulation", {})
    return int(given.get("micro_batch_size", batch_size))
