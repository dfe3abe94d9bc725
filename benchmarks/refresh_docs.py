"""Puts what commands print, and tables of results, into the pages that show them.

    python benchmarks/refresh_docs.py            # README and docs
    python benchmarks/refresh_docs.py docs/memory.md

A page marks a place by a comment, `<!-- output: lowmem estimate ... -->` before a block of text, or `<!-- table:
benchmarks/results/x.md -->` before a table, which is the first one of that file. Pictures that a command writes
(`--plot docs/images/x.png`) are made anew with it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = re.compile(r"(<!-- output: lowmem (?P<command>[^\n]+?) -->\n```text\n).*?(?=```\n)", re.DOTALL)
TABLE = re.compile(r"(<!-- table: (?P<file>\S+) -->\n)(?:\|[^\n]*\n)*")


def output(command: str) -> str:
    """What a command prints, without blanks at the ends of lines and empty lines at either end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "lowmem", *shlex.split(command)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"


def first_table(file: str) -> str:
    """The first table of a page of results."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "".join(lines[start:end])


def refreshed(text: str) -> str:
    """A page with its marked places filled."""
    text = OUTPUT.sub(lambda found: found[1] + output(found["command"]), text)
    return TABLE.sub(lambda found: found[1] + first_table(found["file"]), text)


def main(pages: Sequence[str]) -> int:
    for page in [Path(name) for name in pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = page.read_text(encoding="utf-8")
        after = refreshed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
