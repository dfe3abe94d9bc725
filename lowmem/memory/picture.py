"""What the pictures share: colours of categories, the canvas, the file. Needs matplotlib (`lowmem[plot]`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowmem.durable import disk_errors
from lowmem.errors import UserError

GIB = 1024**3
INK, SOFT, GRID, ALARM = "#1c1f24", "#565c66", "#e3e3de", "#b3261e"
_COLOURS = {
    "weights, frozen": "#1f4e8c",
    "weights, trainable": "#5b9bd5",
    "gradients": "#c0392b",
    "optimizer state": "#e58e26",
    "activations": "#2a9d6f",
    "loss": "#a8d08d",
    "temporaries": "#8e5ea2",
    "inside kernels": "#c9a9d6",
    "workspaces": "#6d4c41",
    "allocator slack": "#cfcfc9",
}
_OTHERS = ("#17a2b8", "#d4668f", "#7f7f26", "#454b54")
FORMATS = ("png", "svg", "pdf")


def colours(categories: Sequence[str]) -> dict[str, str]:
    """A colour for each category; one that is not known gets one of four others."""
    unknown = [name for name in categories if name not in _COLOURS]
    return {name: _COLOURS.get(name) or _OTHERS[unknown.index(name) % len(_OTHERS)] for name in categories}


def require_plot(path: str) -> Path:
    """The file a picture goes to, before anything is computed for it.

    Raises:
        UserError: its ending is no format's, its folder is not there, or matplotlib is not installed.
    """
    file = Path(path)
    if file.suffix[1:].lower() not in FORMATS:
        raise UserError(f"--plot: a file that ends in .{', .'.join(FORMATS)}; got {path}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"--plot: no such folder: {file.absolute().parent}")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install 'lowmem[plot]'") from None
    return file


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches, drawn to a file and never to a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, facecolor="white")


def titles(figure: Any, title: str, below: str) -> None:
    """What it shows, and in smaller letters how."""
    for text, inches, font in (
        (title, 0.3, {"fontsize": 13, "fontweight": "bold", "color": INK}),
        (below, 0.58, {"fontsize": 9.5, "color": SOFT}),
    ):
        figure.text(0.02, 1 - inches / figure.get_figheight(), text, va="center", **font)


def tidy(axes: Any) -> None:
    """Quiet axes: no frame but the lower line, a grid for the values."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def legend(figure: Any, shades: dict[str, str], **place: Any) -> None:
    """The colours' meaning."""
    from matplotlib.patches import Patch

    patches = [Patch(color=shade, label=name) for name, shade in shades.items()]
    figure.legend(
        handles=patches, frameon=False, fontsize=8.5, handlelength=1.1, handleheight=1.1, labelcolor=INK, **place
    )


def write(figure: Any, file: Path) -> None:
    """Write a figure in the format of the file's ending.

    Raises:
        UserError: the disk is full or refuses.
    """
    from matplotlib import rc_context

    # no date and fixed names of parts: the same numbers give the same file; text stays text
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with disk_errors(file), rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmem"}):
        figure.savefig(file, metadata=dates.get(file.suffix.lower()))
