"""`lowmem merge`, `lowmem export` and `lowmem quantize`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lowmem.cli.common import JsonOption, print_json, quiet_bars
from lowmem.errors import UserError


class BaseChoice(StrEnum):
    """Which base weights an adapter is added to."""

    ORIGINAL = "original"
    DEQUANTISED = "dequantised"


class DtypeChoice(StrEnum):
    """Dtypes of written weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class FormatChoice(StrEnum):
    """Formats of `lowmem export`."""

    PEFT = "peft"
    TRANSFORMERS = "transformers"
    GGUF = "gguf"


class QuantizationChoice(StrEnum):
    """How a GGUF file stores matrices."""

    F16 = "f16"
    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"


class QuantizedFormatChoice(StrEnum):
    """Formats of `lowmem quantize`."""

    NF4 = "nf4"
    FP4 = "fp4"
    INT8 = "int8"


RunArgument = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
OutArgument = Annotated[Path, typer.Argument(help="What is written; it must not exist yet.", metavar="OUT")]
BaseOption = Annotated[
    BaseChoice | None,
    typer.Option("--base", help="The base weights: as trained on (dequantised), or as on disk (original)."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Not the result, but a step, best, or a checkpoint's name or folder."),
]


def merge(
    run: RunArgument,
    out: OutArgument,
    base: BaseOption = None,
    dtype: Annotated[DtypeChoice, typer.Option("--dtype", help="Of the written weights.")] = DtypeChoice.AUTO,
    checkpoint: CheckpointOption = None,
    probe: Annotated[bool, typer.Option(help="Compare the logits of before and after.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Add a run's adapter to its base model, and write a plain model in transformers' format."""
    quiet_bars()
    from lowmem.merge import merge as merge_run

    report = merge_run(
        run, out, base=base.value if base else None, dtype=dtype.value, checkpoint=checkpoint, probe=probe
    )
    if as_json:
        print_json(report)
        return
    print(f"{report['out']}: {report['bytes'] / 1e6:,.1f} MB, {report['dtype']}, base: {report['base']}")
    _print_comparison(report["probe"])
    _print_notices(report)


def export(
    run: RunArgument,
    out: OutArgument,
    format: Annotated[FormatChoice, typer.Option("--format", help="What OUT is written as.")],
    dtype: Annotated[
        DtypeChoice | None, typer.Option("--dtype", help="Of the written weights (transformers only).")
    ] = None,
    quantization: Annotated[
        QuantizationChoice | None, typer.Option("--quantization", help="Of the matrices (gguf only; f16).")
    ] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    check: Annotated[bool, typer.Option(help="Read back what was written, and compare.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Write a run's result for another program: peft, transformers, or llama.cpp (gguf)."""
    for option, value, fits in (
        ("--dtype", dtype, format is FormatChoice.TRANSFORMERS),
        ("--quantization", quantization, format is FormatChoice.GGUF),
        ("--base", base, format is not FormatChoice.PEFT),
    ):
        if value is not None and not fits:
            raise UserError(f"export: {option} has no effect with --format {format}; leave it out")
    quiet_bars()
    from lowmem.export import export as export_run

    report = export_run(
        run,
        out,
        format.value,
        dtype=(dtype or DtypeChoice.AUTO).value,
        quantization=(quantization or QuantizationChoice.F16).value,
        base=base.value if base else None,
        checkpoint=checkpoint,
        check=check,
    )
    if as_json:
        print_json(report)
        return
    print(f"{report['out']}: {report['format']}, {report['bytes'] / 1e6:,.1f} MB")
    _print_comparison(report["check"])
    _print_notices(report)


def quantize(
    model: Annotated[str, typer.Argument(help="Hub id, or a folder with safetensors.", metavar="MODEL")],
    out: OutArgument,
    format: Annotated[
        QuantizedFormatChoice, typer.Option("--format", help="Of the linear layers of the decoder.")
    ] = QuantizedFormatChoice.NF4,
    double_quant: Annotated[
        bool | None, typer.Option(help="4-bit: store the scales in 8 bits, too.", show_default="on")
    ] = None,
    dtype: Annotated[
        DtypeChoice, typer.Option("--dtype", help="Of all other weights; auto: the checkpoint's.")
    ] = DtypeChoice.AUTO,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model with its weights quantised; recipes with the same `quantization` then load it as it is."""
    if format is QuantizedFormatChoice.INT8 and double_quant is not None:
        raise UserError("quantize: --double-quant has no effect with --format int8; leave it out")
    quiet_bars()
    from lowmem.config import ModelConfig
    from lowmem.quantize import quantize as quantize_model
    from lowmem.strategies.quantization import Quantization

    strategy = Quantization(format.value, double_quant is not False)
    report = quantize_model(ModelConfig(model, revision, dtype.value), out, strategy)
    if as_json:
        print_json(report)
        return
    double = ", double_quant" if report["double_quant"] else ""
    print(f"{report['out']}: {report['bytes'] / 1e6:,.1f} MB, {report['format']}{double}, the rest {report['dtype']}")


def _print_comparison(numbers: dict[str, Any] | None) -> None:
    if numbers is None:
        return
    print(
        f"largest logit difference {numbers['largest_logit_difference']:.3g} (largest logit "
        f"{numbers['largest_logit']:.3g}), same top token at {numbers['same_top_token']:.0%} of positions"
    )
    if "same_tokens" in numbers:
        print(f"tokenizer: {'the same tokens' if numbers['same_tokens'] else 'other tokens'} for a few texts")


def _print_notices(report: dict[str, Any]) -> None:
    for notice in report["notices"]:
        print(f"note: {notice}")
