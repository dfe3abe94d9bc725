"""How far off the predictor is: on this CPU, to the byte of torch's allocator, and beside runs that others published.

    python benchmarks/predictor_accuracy.py              # both
    python benchmarks/predictor_accuracy.py --cpu        # `predictor_on_cpu.py`: some 70 small runs, 4 minutes
    python benchmarks/predictor_accuracy.py --published  # `predictor_published.py`: runs on cards, traced here
    python benchmarks/predictor_accuracy.py --quick      # three small runs, no result file

Bars: of the runs on the CPU at least 80 % within 0.05 %, and none off by more than 1 %; those of the published runs are
named in `predictor_published.py`. Writes results/predictor_accuracy.json and .md (the table of the docs); the part that
was not asked for stays as it was. The published comparison writes files of its own beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from environment import HERE, RESULTS, as_table, environment, table
from predictor_cases import CASES
from predictor_on_cpu import EVERY, run, summary

ROWS = HERE / "data" / "peft_memory.json"


def on_cpu() -> dict[str, Any]:
    """The comparison on this machine."""
    warnings.simplefilter("ignore")
    rows = run()
    for row in rows:
        row.pop("trace", None)
    return {"summary": summary(rows), "environment": environment(), "rows": rows}


def published(rows_file: Path, out: Path) -> dict[str, Any]:
    """The comparison with published runs."""
    from predictor_published import compare

    return {"environment": environment(), "rows": compare(rows_file, out)}


def as_markdown(content: dict[str, Any]) -> str:
    """The tables of the docs."""
    cpu = content["cpu"]
    facts = {key: f"{value:.3%}" if isinstance(value, float) else value for key, value in cpu["summary"].items()}
    parts = [as_table(facts), _runs(cpu["rows"]), _rules(cpu["rows"]), as_table(cpu["environment"])]
    return "\n\n".join(parts) + "\n"


def _runs(rows: list[dict[str, Any]]) -> str:
    header = ["configuration", "predicted MiB", "measured MiB", "error", "peak in"]
    lines: list[list[object]] = []
    for row in rows:
        if "failed" in row:
            lines.append([row["name"], "", "", row["failed"], ""])
            continue
        sizes = [f"{row[key] / 2**20:.3f}" for key in ("predicted_bytes", "measured_bytes")]
        lines.append([row["name"], *sizes, f"{row['error']:+.4%}", row["phase"]])
    return table(header, lines)


def _rules(rows: list[dict[str, Any]]) -> str:
    """Which rules of a card a run on a CPU says nothing about."""
    names = sorted({rule for row in rows for rule in row.get("only_on_a_card", ())})
    lines: list[list[object]] = [[EVERY, f"all {len(rows)}"]]
    for name in names:
        having = [str(number) for number, row in enumerate(rows, 1) if name in row.get("only_on_a_card", ())]
        lines.append([name, f"{len(having)}: {_ranges(having)}"])
    return table(["rule of a card that the run on a CPU does not meet", "configurations, by their row above"], lines)


def _ranges(numbers: list[str]) -> str:
    """`1-3, 7` for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="only the runs on this CPU")
    parser.add_argument("--published", action="store_true", help="only the published runs")
    parser.add_argument("--rows", type=Path, default=ROWS, help="published runs (default: data/peft_memory.json)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="three small runs, no result file")
    options = parser.parse_args()
    if options.quick:
        return int(not summary(run(CASES[:3]))["passed"])
    file = options.out / "predictor_accuracy.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if options.cpu or not options.published:
        content["cpu"] = on_cpu()
    if options.published or not options.cpu:
        content["published"] = published(options.rows, options.out)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if "cpu" not in content:
        return 0
    file.with_suffix(".md").write_text(as_markdown(content), encoding="utf-8")
    print(as_table(content["cpu"]["summary"]))
    return int(not content["cpu"]["summary"]["passed"])


if __name__ == "__main__":
    sys.exit(main())
