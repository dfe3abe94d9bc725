"""Writes the predicted ledger of every shipped recipe into its comments, or checks that it still holds.

    python benchmarks/recipe_ledgers.py            # write
    python benchmarks/recipe_ledgers.py --check    # compare; exit code 1 where a figure is off

The block stands between two marks. Figures may differ from a new prediction by 1 % of the total: versions of PyTorch
and transformers differ in small temporaries.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lowmem.memory.beside import ordered
from lowmem.memory.estimate import Estimate, estimate
from lowmem.recipe import load_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
BEGIN, END = "# -- predicted: lowmem estimate ", "# -- end of what is predicted "
FIGURE = re.compile(r"^# +([\d,.]+)  (.+)$", re.MULTILINE)
TOLERANCE = 0.01
WIDTH = 100


def block(found: Estimate) -> str:
    """The comment lines, marks included."""
    unit, name = (2**30, "GiB") if found.peak_reserved_bytes >= 2**30 else (2**20, "MiB")
    longest, count = max(found.lengths), len(found.lengths)
    place = f", {found.place}" if found.place else ""
    lines = [
        BEGIN.ljust(WIDTH, "-"),
        f"# On a GPU, with {count} row{'s' * (count > 1)} of {longest:,} tokens per step, all of them targets.",
        f"# {name} at the peak, which comes in {found.phase}{place}:",
    ]
    shown = {c: s for c, s in found.ledger.items() if s >= 0.001 * found.peak_reserved_bytes}
    lines += [figure(shown[category] / unit, category) for category in ordered(shown)]
    lines += [figure(found.peak_reserved_bytes / unit, "reserved in all; CUDA itself takes about half a GiB beside")]
    return "\n".join([*lines, END.ljust(WIDTH, "-")]) + "\n"


def figure(size: float, words: str) -> str:
    """Three significant digits or more."""
    return f"# {size:>9,.0f}  {words}" if size >= 100 else f"# {size:>9.2f}  {words}"


def with_block(text: str, new: str) -> str:
    """The recipe with its block replaced; one that has none gets it after its opening comment."""
    before, after = split(text)
    return before + new + after


def split(text: str) -> tuple[str, str]:
    """What stands before the block, and after it."""
    if BEGIN in text:
        before, rest = text.split(BEGIN, 1)
        return before, rest.split(END, 1)[1].split("\n", 1)[1]
    lines = text.splitlines(keepends=True)
    opening = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return "".join([*lines[:opening], "#\n"]), "".join(lines[opening:])


def complaints(text: str, found: Estimate) -> list[str]:
    """What no longer holds in a recipe's block."""
    if BEGIN not in text:
        return ["it has no block of predicted figures"]
    written = figures(text[text.index(BEGIN) : text.index(END)])
    new = figures(block(found))
    total = max(new.values())
    return [
        f"{words}: {written.get(words, 0):,.2f} is written, {new.get(words, 0):,.2f} predicted"
        for words in dict.fromkeys([*written, *new])
        if abs(written.get(words, 0) - new.get(words, 0)) > TOLERANCE * total
    ]


def figures(text: str) -> dict[str, float]:
    """Words -> figure."""
    return {words: float(number.replace(",", "")) for number, words in FIGURE.findall(text)}


def predicted(recipe: Path) -> Estimate:
    return estimate(load_recipe(recipe, check_files=False))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, help="recipe files (default: all shipped ones)")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    given = parser.parse_args(arguments)
    wrong = 0
    for recipe in given.recipes or sorted(RECIPES.glob("*.yaml")):
        text, found = recipe.read_text(encoding="utf-8"), predicted(recipe)
        if given.check:
            for complaint in complaints(text, found):
                wrong += 1
                print(f"{recipe.name}: {complaint}")
        else:
            recipe.write_text(with_block(text, block(found)), encoding="utf-8")
            print(f"{recipe.name}: {found.peak_reserved_bytes / 2**30:.2f} GiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
