"""The ratios as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undrop.lab.bench.run import Row

__all__ = ["draw"]


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw each method's time as a multiple of dropout's, with its 90 % interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for y, row in enumerate(reversed(rows)):
        hatch = "//" if row.name == "dropout" else ""
        error = [[row.ratio - row.low], [row.high - row.ratio]]
        axes.barh(y, row.ratio, color="0.8", edgecolor="0.2", hatch=hatch, xerr=error, capsize=3)
        axes.text(row.high, y, f"  {row.ratio:.2f}", va="center")
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    axes.axvline(1.0, color="0.2", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, max(row.high for row in rows) * 1.12)
    axes.set_xlabel("time of a training step, × dropout")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
