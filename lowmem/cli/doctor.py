"""`lowmem doctor`."""

from __future__ import annotations

import sys

from lowmem.cli.common import JsonOption, print_json


def doctor(as_json: JsonOption = False) -> None:
    """Versions, devices, dtypes, memory, and which strategies run here (each is tried; about half a minute)."""
    from lowmem.doctor import diagnose, lines

    live = sys.stderr.isatty()

    def say(text: str) -> None:
        if live:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    facts = diagnose(say)
    say("")
    if as_json:
        print_json(facts)
    else:
        print("\n".join(lines(facts)))
