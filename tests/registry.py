"""One row per strategy and setting that the composition tests should see. A new strategy needs a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from liger_stand_in import fused_kernels

from lowmem import (
    DDP,
    EMA,
    FSDP2,
    AdamW,
    AdamW8bit,
    Adapter,
    ChunkedCrossEntropy,
    ChunkedLayers,
    Compile,
    DeepSpeedZeRO,
    GradientAccumulation,
    GradientCheckpointing,
    GradientClipping,
    LoRA,
    MixedPrecision,
    OptimizerInBackward,
    Packing,
    PipelineParallel,
    PureBF16,
    Quantization,
    RetryOnOOM,
    Strategy,
    StreamedWeights,
    TensorParallel,
    TiledMLP,
)

Make = Callable[[], Strategy]


@dataclass(frozen=True)
class Row:
    """A strategy in the tests.

    Attributes:
        id: name in test ids.
        make: a new instance (a strategy belongs to one run).
        partners: what it cannot train without; added where the kind is missing.
        bound: None: exact. Else the largest relative difference of any logged loss over 8 steps from the same run
            without it (but with its partners).
        shares: work among processes. In one it changes nothing, so its pairs are those of tests/distributed.
    """

    id: str
    make: Make
    partners: tuple[Make, ...] = ()
    bound: float | None = None
    shares: bool = False

    @property
    def key(self) -> str:
        """The key in a recipe."""
        return self.make().name


def after_a_failure() -> RetryOnOOM:
    """As it is once 32 tokens were too many: it splits what follows. Failures are in test_retry_on_oom.py."""
    strategy = RetryOnOOM()
    strategy.load_state_dict({"training": 32, "evaluation": 32})
    return strategy


ROWS = (
    Row("chunked", lambda: ChunkedCrossEntropy(chunk_size=8)),
    Row("checkpointing", GradientCheckpointing),
    Row("checkpointing-every-2nd", lambda: GradientCheckpointing(every_n_layers=2)),
    Row("checkpointing-2-offload", lambda: GradientCheckpointing(layers_per_checkpoint=2, offload="cpu")),
    Row("checkpointing-disk", lambda: GradientCheckpointing(offload="disk")),
    Row("checkpointing-keep", lambda: GradientCheckpointing(keep=["attention"])),
    Row("checkpointing-budget", lambda: GradientCheckpointing(budget="1MiB")),
    Row("tiled-mlp", lambda: TiledMLP(tile_size=16)),
    Row("chunked-layers", lambda: ChunkedLayers(chunk_size=16)),
    Row("fused", fused_kernels),  # with a stand-in for the kernels, which need a card
    Row("streamed-weights", StreamedWeights, (LoRA, GradientCheckpointing)),  # exactness: test_streamed_weights.py
    Row("compile", lambda: Compile(backend="eager")),  # other backends: test_exact.py, and on the card
    Row("adamw", lambda: AdamW(betas=(0.8, 0.95), eps=1e-6)),
    Row("in-backward", OptimizerInBackward),
    Row("clipping", lambda: GradientClipping(max_norm=0.5)),
    Row("ema", lambda: EMA(decay=0.9)),
    Row("accumulation-micro-1", GradientAccumulation),
    Row("accumulation-steps-3", lambda: GradientAccumulation(steps=3)),
    Row("retry-after-oom", after_a_failure),
    Row("packing", Packing),
    Row("ddp", DDP, shares=True),  # these in one process, where they change nothing; in several: tests/distributed
    Row("pipeline", PipelineParallel, shares=True),
    Row("tensor-parallel", TensorParallel, shares=True),
    Row("fsdp-2", FSDP2, shares=True),
    Row("deepspeed-zero", DeepSpeedZeRO, shares=True),
    Row("adamw-8bit", AdamW8bit, bound=0.0005),
    Row("adamw-8bit-paged", lambda: AdamW8bit(paged=True), bound=0.0005),
    Row("bf16-autocast", MixedPrecision, bound=0.003),
    Row("fp16-autocast", lambda: MixedPrecision(dtype="float16"), bound=0.0003),
    Row("pure-bf16", PureBF16, bound=0.005),
    Row("lora", LoRA, bound=0.3),
    Row("rslora", lambda: LoRA(r=4, use_rslora=True), bound=0.3),
    Row("dora", lambda: LoRA(r=4, use_dora=True), bound=0.3),
    Row("miss", lambda: Adapter("MISS", r=4, target_modules="all-linear"), bound=0.3),
    Row("nf4", Quantization, (LoRA,), bound=0.02),
    Row("fp4", lambda: Quantization(format="fp4", double_quant=False), (LoRA,), bound=0.04),
    Row("int8", lambda: Quantization(format="int8"), (LoRA,), bound=0.004),
)
EXACT = tuple(row for row in ROWS if row.bound is None and not row.partners)
APPROXIMATE = tuple(row for row in ROWS if row.bound is not None)

# Why strategies cannot stand together: the keys, and the words that the message owes its reader.
REFUSED: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"adamw", "adamw_8bit"}): ("slot 'optimizer'", "keep one"),
    frozenset({"lora", "adapter"}): ("slot 'adapter'", "keep one"),
    frozenset({"mixed_precision", "pure_bf16"}): ("slot 'precision'", "keep one"),
    frozenset({"gradient_clipping", "optimizer_in_backward"}): (
        "all gradients of the step",
        "takes that away",
        "set max_grad_norm: null",
    ),
    frozenset({"gradient_accumulation", "optimizer_in_backward"}): (
        "all gradients of the step",
        "takes that away",
        "drop gradient_accumulation and lower training.batch_size",
    ),
    frozenset({"retry_on_oom", "optimizer_in_backward"}): (
        "all gradients of the step",
        "takes that away",
        "drop retry_on_oom and lower training.batch_size",
    ),
    **{
        frozenset({row, "compile"}): ("forward to do nothing but compute", "takes that away", "leave out offload")
        for row in ("checkpointing-2-offload", "checkpointing-disk", "checkpointing-keep", "checkpointing-budget")
    },
    frozenset({"streamed-weights", "compile"}): ("forward to do nothing but compute", "takes that away"),
    **{
        frozenset({"streamed-weights", row}): (
            "every block to be recomputed",
            "gradient_checkpointing of every layer",
        )
        for row in ("checkpointing-every-2nd", "checkpointing-keep", "checkpointing-budget")
    },
    frozenset({"chunked-layers", "compile"}): ("forward to do nothing but compute", "takes that away"),
    frozenset({"fused_kernels", "compile"}): (
        "forward to do nothing but compute",
        "takes that away",
        "drop fused_kernels",
    ),
    frozenset({"chunked_layers", "tiled_mlp"}): ("slot 'token_slices'", "keep one"),
    **{  # several processes
        frozenset(pair): ("slot 'data_parallel'", "keep one")
        for pair in (("ddp", "fsdp_2"), ("ddp", "deepspeed_zero"), ("fsdp_2", "deepspeed_zero"))
    },
    **{
        frozenset({key, "optimizer_in_backward"}): ("all gradients of the step", "takes that away")
        for key in ("ddp", "pipeline_parallel", "fsdp_2", "deepspeed_zero")
    },
    **{
        frozenset({key, "retry_on_oom"}): ("this process's own affair", "takes that away")
        for key in ("ddp", "pipeline_parallel", "tensor_parallel", "fsdp_2", "deepspeed_zero")
    },
    **{
        frozenset({key, other}): ("ordinary tensors", "takes that away")
        for key in ("tensor_parallel", "fsdp_2", "deepspeed_zero")
        for other in ("streamed_weights", "adamw_8bit", "pipeline_parallel")
    },
    frozenset({"deepspeed_zero", "pure_bf16"}): ("what is trained to be float32", "takes that away", "ddp or fsdp_2"),
    frozenset({"tensor_parallel", "pure_bf16"}): ("all of a layer", "takes that away"),
    frozenset({"tensor_parallel", "ddp"}): ("ordinary tensors", "takes that away"),
    frozenset({"tensor_parallel", "deepspeed_zero"}): ("all of a layer", "takes that away", "use ddp or fsdp_2"),
    frozenset({"tensor_parallel", "quantization"}): ("matrices of plain numbers", "takes that away"),
    frozenset({"tensor_parallel", "compile"}): ("forward to do nothing but compute", "takes that away"),
    frozenset({"fsdp-2", "checkpointing-2-offload"}): ("every layer to be called by itself", "takes that away"),
    **{
        frozenset({"pipeline", row}): ("one process to compute all layers", "takes that away")
        for row in ("checkpointing-2-offload", "checkpointing-disk", "checkpointing-budget", "streamed-weights")
    },
    frozenset({"fp16-autocast", "in-backward"}): (  # rows, where the setting decides
        "all gradients of the step",
        "takes that away",
        "use dtype: bfloat16",
    ),
}


def refusal(rows: tuple[Row, ...]) -> tuple[str, ...] | None:
    """The words expected in the refusal of these rows; None where they are to train together."""
    for names, words in REFUSED.items():
        if names <= {row.key for row in rows} or names <= {row.id for row in rows}:
            return words
    return None


def together(*rows: Row) -> list[Strategy]:
    """New instances of the rows, with the partners they lack; who fills a partner's slot stands in for it."""
    strategies = [row.make() for row in rows]
    for partner in (make() for row in rows for make in row.partners):
        if not any(isinstance(s, type(partner)) or (s.slot and s.slot == partner.slot) for s in strategies):
            strategies.append(partner)
    return strategies


def sets(rows: tuple[Row, ...], size: int) -> list[tuple[Row, ...]]:
    """All sets of rows of different strategies."""
    return [chosen for chosen in combinations(rows, size) if len({row.key for row in chosen}) == size]


def allowed(rows: tuple[Row, ...], size: int) -> list[tuple[Row, ...]]:
    """Those of `sets` that no declaration refuses, and that change something in one process."""
    return [s for s in sets(rows, size) if refusal(s) is None and (size == 1 or not any(row.shares for row in s))]


def ids(chosen: tuple[Row, ...]) -> str:
    return "+".join(row.id for row in chosen)
