"""The strategy protocol: stages, traits, conflicts. Everything a memory technique may touch is in this file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from lowmem.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowmem.config import LoadConfig
    from lowmem.run import Run

# input_ids, labels (-100: no loss); maybe loss_weights (per token) and position_ids (restarting in a packed row)
Sample: TypeAlias = Mapping[str, Any]
Loss: TypeAlias = "Callable[[nn.Module, dict[str, Tensor]], Tensor]"
MakeOptimizer: TypeAlias = "Callable[[list[nn.Parameter]], Optimizer]"
ForwardBackward: TypeAlias = "Callable[[list[list[Sample]], float | Tensor], Tensor]"
Step: TypeAlias = Callable[[], None]
Inference: TypeAlias = "Callable[[], AbstractContextManager[nn.Module]]"


class Stage(IntEnum):
    """How close a strategy sits to the raw part: lower is inner. One total order serves all seven parts."""

    QUANTIZE = 10  # base weights change type: first, everything else wraps the result
    ADAPT = 20  # adapters go on top of the base weights, so after quantisation
    FUSE = 25  # a few operations become one kernel: inside slices of a layer, whatever the order in a recipe
    KERNEL = 30  # the same function, computed in another way
    OFFLOAD = 40  # weights come and go around a block: inside recompute, or the copies would be saved
    RECOMPUTE = 50  # a block is run again in backward: around offload
    COMPILE = 60  # a block is compiled: around recompute
    UPDATE = 70  # the update rule: the innermost optimizer
    ROUNDING = 80  # how an update is written to bfloat16: around the rule, inside placement
    PLACEMENT = 90  # when and where the rule runs: in backward, on the CPU
    CLIP = 100  # gradients are bounded right before the step
    AVERAGE = 110  # weights are averaged after the step, but not after a skipped one
    PRECISION = 120  # autocast and loss scale: around clip and average, so that a skip skips them, too
    PIPELINE = 125  # layers are on other ranks: a schedule in place of the loop, outside precision
    PARALLEL = 130  # ranks agree: outside precision, inside the split
    RETRY = 135  # a pass that failed runs again: it sees the final list, too
    SPLIT = 140  # a batch becomes micro-batches: the ranks see the final list
    PACK = 150  # samples become rows, before they are split


class Trait(StrEnum):
    """What one strategy may rely on and another may take away; the value is the wording in messages."""

    GRADS_AT_STEP = "all gradients of the step to be there when the optimizer steps"
    STATIC_PARAMS = "the set of trainable parameters never to change"
    DENSE_PARAMS = "parameters to be ordinary tensors on the run's device"
    TRAINABLE = "something to be trainable"
    RECOMPUTE = "every block to be recomputed in backward"
    RUN_ONCE = "no block to be run again in backward"
    FLOAT32 = "what is trained to be float32"
    POSITIONS = "the positions of a row's tokens to reach the model"
    AUTOCAST = "operations to run under autocast"
    PURE_BLOCKS = "a layer's forward to do nothing but compute"
    LAYER_BY_LAYER = "every layer to be called by itself"
    ONE_PROCESS = "a pass to be this process's own affair"
    SHARED = "the work to be shared among processes"
    WHOLE_MODEL = "one process to compute all layers"
    WHOLE_LAYERS = "one process to compute all of a layer"
    PLAIN_WEIGHTS = "weights to be matrices of plain numbers"
    WEIGHTS_AT_HAND = "a weight to be whole wherever it is read"


PLAIN_RUN = frozenset(
    {
        Trait.GRADS_AT_STEP,
        Trait.STATIC_PARAMS,
        Trait.DENSE_PARAMS,
        Trait.TRAINABLE,
        Trait.RUN_ONCE,
        Trait.FLOAT32,
        Trait.POSITIONS,
        Trait.PURE_BLOCKS,
        Trait.LAYER_BY_LAYER,
        Trait.ONE_PROCESS,
        Trait.WHOLE_MODEL,
        Trait.WHOLE_LAYERS,
        Trait.PLAIN_WEIGHTS,
        Trait.WEIGHTS_AT_HAND,
    }
)


class ConflictError(UserError):
    """Strategies that cannot work together, or one that lacks what it needs."""


class Strategy:
    """A memory technique: every method takes one part of the run and returns it, changed or not.

    Concrete strategies are final dataclasses whose fields are their keys in a recipe. The class attributes declare,
    before anything is built, what the strategy relies on, grants and takes away.

    Attributes:
        stage: how close to the raw part it sits.
        slot: at most one strategy fills a slot.
        exact: the weights after a step are those of the plain loop (tested); otherwise it approximates.
        predictable: a run on the meta device allocates what a real one does.
        needs, provides, breaks: traits; a property where they depend on a field.
        saves, costs: one line each for `lowmem strategies`.
        remedy: what to do about a conflict this strategy causes.
    """

    stage: ClassVar[Stage]
    slot: ClassVar[str | None] = None
    exact: ClassVar[bool] = True
    predictable: ClassVar[bool] = True
    saves: ClassVar[str] = ""
    costs: ClassVar[str] = ""
    remedy: ClassVar[str] = ""

    @property
    def needs(self) -> frozenset[Trait]:
        """What must hold for this strategy to work."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Trait]:
        """What holds because of this strategy."""
        return frozenset()

    @property
    def breaks(self) -> frozenset[Trait]:
        """What no longer holds with this strategy."""
        return frozenset()

    @property
    def name(self) -> str:
        """The key in a recipe: snake_case of the class for ours, the dotted path for a user's own."""
        cls = type(self)
        if cls.__module__.startswith("lowmem."):
            return snake_case(cls.__name__)
        return f"{cls.__module__}.{cls.__qualname__}"

    @property
    def period(self) -> int | None:
        """After how many layers what it does to them repeats; a prediction reads a deep model off two shallow ones.

        1: all are treated alike. Null: single layers are meant, or nobody has said, and all layers are traced.
        """
        return None

    def ranks_apart(self, ranks: int, layers: int) -> Iterable[int]:
        """The ranks, of so many, one of which needs most, with a model of so many layers; by default all are alike."""
        return (0,)

    def configure(self, config: LoadConfig, run: Run) -> LoadConfig:
        """Before loading: how the model is loaded. Checks of the machine and of the training numbers live here."""
        return config

    def wrap_model(self, model: nn.Module, run: Run) -> nn.Module:
        """After loading: forwards of submodules, drop-in leaf modules, adapters. Parameter names stay."""
        return model

    def wrap_loss(self, loss: Loss, run: Run) -> Loss:
        """How the weighted sum over target tokens is computed. Never divides."""
        return loss

    def wrap_optimizer(self, make: MakeOptimizer, run: Run) -> MakeOptimizer:
        """Which optimizer, over which parameters. `param_groups` and `state` must stay live."""
        return make

    def wrap_forward_backward(self, forward_backward: ForwardBackward, run: Run) -> ForwardBackward:
        """Splits, merges or repeats micro-batches. The sum over samples stays the same."""
        return forward_backward

    def wrap_step(self, step: Step, run: Run) -> Step:
        """Gradients before the step, weights after it; may skip it."""
        return step

    def wrap_inference(self, inference: Inference, run: Run) -> Inference:
        """Which weights evaluation and export see; on exit nothing is left changed."""
        return inference

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself must remember in a checkpoint (tensors, numbers, strings)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for recipes, checkpoints and messages."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]


S = TypeVar("S", bound=Strategy)


def resolve(strategies: Iterable[S]) -> list[S]:
    """Sort by stage, inner to outer, and check every declaration.

    Raises:
        ConflictError: two strategies of one kind or slot, or a need that nobody meets; the message names both.
    """
    ordered = sorted(strategies, key=lambda strategy: strategy.stage)
    check_slots(ordered)
    held, broken_by = traits(ordered)
    for strategy in ordered:
        for trait in sorted(strategy.needs - held):
            raise ConflictError(_unmet(strategy, trait, broken_by.get(trait)))
    return ordered


def check_slots(strategies: Sequence[Strategy]) -> None:
    """Raise ConflictError where two strategies are of one class or fill one slot."""
    filled: dict[str, Strategy] = {}
    for strategy in strategies:
        slot = strategy.slot or strategy.name
        other = filled.setdefault(slot, strategy)
        if other is not strategy:
            what = f"both fill the slot '{slot}'" if strategy.slot else "it is there twice"
            remedy = strategy.remedy if type(strategy) is type(other) else ""
            raise ConflictError(
                f"{other.name} and {strategy.name}: {what}; keep one" + (f" ({remedy})" if remedy else "")
            )


def traits(ordered: Sequence[Strategy]) -> tuple[frozenset[Trait], dict[Trait, Strategy]]:
    """The traits that hold with these strategies, and who broke each of the others."""
    held, broken_by = set(PLAIN_RUN), dict[Trait, Strategy]()
    for strategy in ordered:
        for trait in strategy.breaks:
            held.discard(trait)
            broken_by[trait] = strategy
        for trait in strategy.provides:
            held.add(trait)
            broken_by.pop(trait, None)
    return frozenset(held), broken_by


def _unmet(strategy: Strategy, trait: Trait, culprit: Strategy | None) -> str:
    if culprit is strategy:
        return f"{strategy.name} needs {trait.value}, and takes it away itself; {strategy.remedy or 'add a partner'}"
    if culprit is None:
        return f"{strategy.name} needs {trait.value}; {strategy.remedy or 'no strategy here provides it'}"
    remedy = strategy.remedy or culprit.remedy or f"drop {strategy.name} or {culprit.name}"
    return f"{strategy.name} needs {trait.value}, and {culprit.name} takes that away; {remedy}"


def snake_case(name: str) -> str:
    """`AdamW8bit` -> `adamw_8bit`, `PureBF16` -> `pure_bf16`, `LoRA` -> `lora`."""
    special = {"LoRA": "lora", "AdamW": "adamw", "AdamW8bit": "adamw_8bit", "EMA": "ema", "PureBF16": "pure_bf16"}
    special |= {"DDP": "ddp", "FSDP2": "fsdp_2", "DeepSpeedZeRO": "deepspeed_zero"}
    return special.get(name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
