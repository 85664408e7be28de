"""The style of all figures: they are readable without color, and equal numbers give equal bytes."""

from __future__ import annotations

import importlib.util
import io
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.errors import MissingExtraError, OptionError
from undrop.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OTHER = "#1f5fa8", "#b3541e"
"""The colors of undrop's measurements, and of the values that they are compared with."""

_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "undrop",
}
_NO_DATE = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Metadata that would make equal figures differ."""

_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (7, 3)))
_MARKERS = "os^Dv*PX"
_HATCHES = ("", "///", "...", "xxx")
_FILLS = ("0.55", "0.75", "0.92", "0.4")


def line_style(index: int) -> dict[str, Any]:
    """Return the dashes and the marker of a line, by its index in the legend."""
    return {"linestyle": _DASHES[index % len(_DASHES)], "marker": _MARKERS[index % len(_MARKERS)]}


def bar_style(index: int) -> dict[str, Any]:
    """Return the hatch and the shade of gray of a bar, by its index in the legend."""
    return {
        "hatch": _HATCHES[index % len(_HATCHES)],
        "color": _FILLS[index % len(_FILLS)],
        "edgecolor": "black",
        "capsize": 3,
    }


def literal(text: str) -> str:
    """Escape a name for matplotlib, where a dollar sign begins a formula."""
    return text.replace("$", r"\$")


def check_drawable() -> None:
    """Check that matplotlib is installed, before a command starts long work.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a figure", "matplotlib", "plot")


def check_picture(path: Path) -> None:
    """Check that the suffix of a path is a picture format.

    Raises:
        MissingExtraError: if matplotlib is not installed.
        OptionError: if the suffix is missing or unknown.
    """
    check_drawable()
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FigureCanvasBase.get_supported_filetypes():
        kind = f"{path.suffix} is not a picture format" if suffix else "it has no suffix"
        raise OptionError(f"{path} can't be drawn: {kind}; use .png, .pdf or .svg.")


def styled() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in undrop's style."""
    import matplotlib as mpl

    context: AbstractContextManager[None] = mpl.rc_context(_STYLE)
    return context


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, whose size is in inches.

    The figure is made without pyplot, so there is no global state and no window to close.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    check_drawable()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def svg(figure: Figure, title: str) -> str:
    """Return the figure as an ``<svg>`` element, with a title for screen readers."""
    text = io.StringIO()
    with styled():
        figure.savefig(text, format="svg", metadata=_NO_DATE["svg"])
    element = text.getvalue()
    element = element[element.index("<svg") :]
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def save(figure: Figure, path: Path) -> None:
    """Write the figure atomically; the suffix sets the format (png, pdf, svg).

    Raises:
        OptionError: if the suffix is missing or unknown.
        RunError: if the file can't be written.
    """
    check_picture(path)
    kind = path.suffix.removeprefix(".").lower()
    with replacing(path) as temporary, styled():
        figure.savefig(temporary, format=kind, metadata=_NO_DATE.get(kind))
