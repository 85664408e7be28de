"""Draw the ratios as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undrop.lab.bench.methods import BASELINE
from undrop.lab.bench.run import Row
from undrop.report.figures import bar_style, new_figure, save, styled


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw each method's time as a multiple of dropout's, with its 90 % interval."""
    with styled():
        figure = new_figure(7, 0.45 * len(rows) + 1.2)
        axes = figure.subplots()
        for y, row in enumerate(rows):
            error = [[row.ratio - row.low], [row.high - row.ratio]]
            axes.barh(y, row.ratio, xerr=error, **bar_style(1 if row.name == BASELINE else 2))
            axes.text(row.high, y, f"  {row.ratio:.2f}", va="center")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.2", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, max(row.high for row in rows) * 1.12)
        axes.set(xlabel="time of a training step, × dropout", title=title)
    save(figure, path)
