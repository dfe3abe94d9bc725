"""Predicted against measured reserved memory: fine-tuning runs of others on a real GPU, predicted without one.

The rows are runs of peft's own comparison (huggingface/peft, method_comparison/MetaMathQA): Llama-3.2-3B on an L40S
with many adapter methods. Each row's model, adapter, optimizer and loop are built from its fields, recorded on the meta
device, and put through the model of CUDA's caching allocator. The padded length of the longest batch is unknown, the
same for all rows, and fitted: for each row on all the others, so that no row is compared with a number that it took
part in. The lengths of the batches around it are unknown, too; they are assumed (`published_loop.FIRST` and the next).

    python benchmarks/predictor_published.py [--rows FILE] [--out FOLDER] [--longest TOKENS] [--processes 2]

takes the installed libraries and names them in the table. Those of the measured runs, where they differ:

    python -m venv published && . published/bin/activate
    pip install torch==2.13.0 transformers==5.13.1 peft==0.20.0 scikit-learn -e .

peft 0.20.0 is the last release before the runs' commit of peft (5d602fd). It ends with status 0 where the bars are met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from environment import HERE, RESULTS, as_table, environment, table
from published_loop import (
    AFTER,
    FIRST,
    LONGEST,
    RECORDED,
    SECOND,
    SHORTEST,
    NotDerivableError,
    Recording,
    Resizer,
    generation_bound,
    peak_reserved,
    record_loop,
    steps,
)
from published_model import Row, UnbuiltError

ROWS = HERE / "data" / "peft_memory.json"
MEASURED_WITH = {"torch": "2.13.0", "transformers": "5.13.1"}
# of the longest batch, tried in the fit; odd, as masks are padded to 16 entries; finer where the fit is
LENGTHS = tuple(sorted({*range(611, 768, 12), *range(685, 712, 2)}))
NEAR = 8  # tokens between lengths that the fit hardly tells apart
FEWEST = 8  # rows for a fit
FITTED = 697  # what the fit on the 32 rows of `ROWS` gives; for files with fewer rows than `FEWEST`
NEEDED = ("peft_config", "optimizer", "optimizer_kwargs", "batch_size", "dtype", "autocast_adapter_dtype", "use_amp")
ASSUMED = (
    f"Assumed, not fitted: batches of {FIRST}, {SECOND} and {SHORTEST} tokens before it and one of {AFTER} after it.",
    "They matter: with other lengths (60 to 200 for the shortest, 400 and 600 for the first) the predictions for full",
    "fine-tuning and IA3 moved by 0.0 to 2.7 points of a per cent, with 550 after the longest IA3's by 4.9.",
)
MEDIAN_BAR, WITHIN, SHARE_BAR, BUILT_BAR = 0.5, 2.0, 0.85, 28 / 32


@dataclass
class Result:
    """What a row came to.

    Attributes:
        name: of the row.
        measured: bytes reserved at most in the run.
        reason: why it could not be built; null where it was.
        reserved: length of the longest batch -> predicted bytes.
        trainable: parameters that are trained here; another number than the run's shows another version of a method.
        virtual: tokens in the key-value cache that are not in the rows.
        generation_bound: bytes that generation during the run's evaluation, which is not replayed, may reserve then.
        notes: what should be known about it.
        predicted, error: bytes, and per cent of the measured ones, at the length fitted on all other rows.
        length: that length.
        error_together: per cent at the length fitted on all rows.
    """

    name: str
    measured: int
    reason: str | None = None
    reserved: dict[int, int] = field(default_factory=dict)
    trainable: int | None = None
    virtual: int = 0
    generation_bound: int | None = None
    notes: list[str] = field(default_factory=list)
    predicted: int | None = None
    error: float | None = None
    length: int | None = None
    error_together: float | None = None

    def error_at(self, length: int) -> float:
        """Per cent of the measured bytes by which the prediction is off."""
        return 100 * (self.reserved[length] / self.measured - 1)


def predict_row(row: Row, lengths: Sequence[int]) -> Result:
    """What the allocator would reserve at most for a row, for each length of the longest batch."""
    result = Result(str(row.get("name", "?")), int(row["memory_max_bytes"]))
    try:
        if missing := [name for name in NEEDED if name not in row]:
            raise UnbuiltError(f"the row lacks {', '.join(missing)}")
        recording = record_loop(row, steps(RECORDED))
        result.trainable = recording.trainable
        resizer = _resizer(row, lengths)
        for length in lengths:
            result.reserved[length] = _reserved(row, recording, resizer, length)
        if recording.virtual:
            result.generation_bound = generation_bound(recording)
            result.virtual = recording.virtual
    except UnbuiltError as error:
        result.reason = str(error)
    except Exception as error:  # one row of many: its failure is told, and the others go on
        result.reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if result.reason is None and "trainable" in row and result.trainable != row["trainable"]:
        result.notes.append(f"trains {result.trainable:,} parameters here, {row['trainable']:,} in the run")
    return result


def _resizer(row: Row, lengths: Sequence[int]) -> Resizer | None:
    try:
        return Resizer(row, RECORDED, lengths)
    except UnbuiltError:  # a method that needs more than two layers
        return None


def _reserved(row: Row, recording: Recording, resizer: Resizer | None, length: int) -> int:
    if resizer is None:
        return peak_reserved(record_loop(row, steps(length)))[0]
    try:
        return peak_reserved(recording, resizer.sizes(recording, LONGEST, length))[0]
    except NotDerivableError:
        return peak_reserved(record_loop(row, steps(length)))[0]


def fit(results: Sequence[Result], lengths: Sequence[int]) -> int:
    """The length of the longest batch at which the predictions are best: least sum of errors, each counted to 5 %."""
    return min(lengths, key=lambda length: sum(min(5.0, abs(result.error_at(length))) for result in results))


def judge(results: Sequence[Result], lengths: Sequence[int]) -> dict[str, Any]:
    """Fill in the predictions, each at the length fitted on the other rows; returns the summary."""
    built = [result for result in results if result.reason is None]
    together = fit(built, lengths) if built else None
    for result in built:
        others = [other for other in built if other is not result]
        result.length = fit(others or built, lengths)
        result.predicted = result.reserved[result.length]
        result.error = result.error_at(result.length)
        result.error_together = result.error_at(together) if together is not None else None
        if abs(result.error) > WITHIN:
            result.notes += _step_nearby(result, result.length)
            if result.error < 0 and (bound := result.generation_bound or 0) >= result.measured:
                result.notes.append(
                    "the peak may be in what is not replayed, generation during their evaluation: with "
                    f"{result.virtual} virtual tokens in its cache it may reserve up to {bound / 2**30:.1f} GiB"
                )
    left_out = [abs(result.error) for result in built if result.error is not None]
    with_all = [abs(result.error_together) for result in built if result.error_together is not None]
    return {
        "rows": len(results),
        "built": len(built),
        "longest_batch_tokens": together,
        "longest_batch_tokens_left_out": sorted({result.length for result in built if result.length is not None}),
        "leave_one_out": _summary(left_out),
        "fitted_on_all": _summary(with_all),
    }


def _step_nearby(result: Result, length: int) -> list[str]:
    """Sizes jump where a request needs a larger segment; a fit between lengths may be on the wrong side of it."""
    near = [other for other in result.reserved if abs(other - length) <= NEAR and abs(result.error_at(other)) <= WITHIN]
    if not near:
        return []
    other = min(near, key=lambda candidate: abs(candidate - length))
    step = (result.reserved[length] - result.reserved[other]) / 2**20
    at_other = f"{result.error_at(other):+.2f} % at {other} tokens"
    return [f"{at_other}: a step of {step:+.0f} MiB up to {length}, where requests need larger segments"]


def _summary(errors: Sequence[float]) -> dict[str, float | None]:
    if not errors:
        return {"median_percent": None, "within_2_percent": None, "largest_percent": None}
    within = sum(error <= WITHIN for error in errors) / len(errors)
    return {"median_percent": median(errors), "within_2_percent": within, "largest_percent": max(errors)}


def compare(
    rows_file: Path | str = ROWS, out: Path | str | None = None, processes: int = 1, longest: int | None = None
) -> list[dict[str, Any]]:
    """Predict every row of a file and hold it against what was measured.

    Args:
        rows_file: a JSON list of rows in the form of `ROWS`; nothing depends on their names.
        out: folder for `predictor_published.json` and `.md`; null: nothing is written.
        processes: how many rows are predicted at a time.
        longest: tokens of the longest batch; null: fitted, each time without the row it is for.

    Returns:
        One dict a row: `Result`'s fields.
    """
    results, _ = _compare(Path(rows_file), None if out is None else Path(out), processes, longest)
    return results


def _compare(
    rows_file: Path, out: Path | None, processes: int, longest: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows: list[Row] = json.loads(rows_file.read_text(encoding="utf-8"))
    if longest is None and len(rows) < FEWEST:
        longest = FITTED
    lengths = LENGTHS if longest is None else (longest,)
    results: list[Result] = []
    for result in _in_turn(predict_row, [(row, lengths) for row in rows], processes):
        shown = result.reason or f"{len(result.reserved)} lengths"
        print(f"{len(results) + 1}/{len(rows)} {result.name}: {shown}", flush=True)
        results.append(result)
    summary = {**judge(results, lengths), "rows_file": rows_file.name, "with": environment()}
    found = [asdict(result) for result in results]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"summary": summary, "rows": found}, indent=1)
        (out / "predictor_published.json").write_text(text + "\n", encoding="utf-8")
        (out / "predictor_published.md").write_text(markdown(results, summary), encoding="utf-8")
    return found, summary


def _in_turn(work: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int) -> Any:
    if processes == 1:
        yield from (work(*each) for each in arguments)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, *zip(*arguments, strict=True))


def markdown(results: Sequence[Result], summary: dict[str, Any]) -> str:
    """The table of the docs."""
    gib = 2**30
    lines: list[list[object]] = []
    for result in results:
        if result.reason is not None or result.predicted is None or result.error is None:
            lines.append([result.name, f"{result.measured / gib:.2f}", "not built", "", result.reason])
        else:
            predicted, error = f"{result.predicted / gib:.2f}", f"{result.error:+.2f}"
            lines.append([result.name, f"{result.measured / gib:.2f}", predicted, error, "; ".join(result.notes)])
    one_out, with_all = summary["leave_one_out"], summary["fitted_on_all"]
    versions = ", ".join(f"{name} {version}" for name, version in MEASURED_WITH.items())
    text = [
        "# Predicted against published reserved memory",
        "",
        "Written by `benchmarks/predictor_published.py`. Llama-3.2-3B on an L40S, measured by peft's own comparison",
        f"(huggingface/peft, method_comparison/MetaMathQA, Apache-2.0) with {versions}.",
        "",
        f"{summary['built']} of {summary['rows']} rows built. The length of the longest batch is fitted on all rows",
        f"but the one it is used for ({', '.join(map(str, summary['longest_batch_tokens_left_out']))} tokens).",
        *ASSUMED,
        "",
        table(
            ["", "median error, %", "within 2 %", "largest, %"],
            [
                [name, *(_cell(found[key]) for key in ("median_percent", "within_2_percent", "largest_percent"))]
                for name, found in (("fitted on the other rows", one_out), ("fitted on all rows", with_all))
            ],
        ),
        "",
        table(["row", "measured, GiB", "predicted, GiB", "error, %", "note"], lines),
        "",
        as_table(summary["with"]),
        "",
    ]
    return "\n".join(text)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 0 where the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="JSON list of measured rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    parser.add_argument("--longest", type=int, help="tokens of the longest batch, where they are known")
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args(argv)
    _, summary = _compare(chosen.rows, chosen.out, chosen.processes, chosen.longest)
    print((chosen.out / "predictor_published.md").read_text(encoding="utf-8"))
    found = summary["leave_one_out"]
    if not summary["built"]:
        return 1
    met = found["median_percent"] < MEDIAN_BAR and found["within_2_percent"] >= SHARE_BAR
    return 0 if met and summary["built"] >= BUILT_BAR * summary["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
