"""What a tuner did: p and benefit of every site over the steps, as records, a table and a figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from undrop.errors import DataError
from undrop.report import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DECAY", "Entry", "History", "said"]

DECAY = "weight decay"
"""The name under which weight decay stands among the sites."""

CLEAR = 2.0
"""The z-score from which on a sign counts as known."""


class Entry(NamedTuple):
    """One site (or weight decay) after one signal."""

    step: int
    name: str
    value: float
    """p, or λ for weight decay."""
    benefit: float
    """What it takes off the validation loss per step and unit of learning rate; a running mean."""
    error: float
    """The standard error of the benefit."""
    slope: float
    """This measurement alone: ⟨∇L_val, ∇r_i⟩, or ⟨∇L_val, W⟩ for weight decay."""

    @property
    def z(self) -> float:
        """The benefit over its standard error."""
        return self.benefit / self.error if self.error > 0.0 else 0.0


def said(z: float) -> str:
    """What a z-score says, in words."""
    if not math.isfinite(z) or abs(z) < CLEAR:
        return "no evidence either way"
    return "more helps" if z > 0.0 else "in the way"


class History:
    """All entries, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def last(self) -> dict[str, Entry]:
        """Return the newest entry of every site."""
        return {entry.name: entry for entry in self.entries}

    def path(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and the values of one site."""
        mine = [entry for entry in self.entries if entry.name == name]
        return [entry.step for entry in mine], [entry.value for entry in mine]

    def table(self) -> Table:
        """Return the newest state: p, benefit and what it says."""
        rows = [
            (
                f"{DECAY} (λ)" if e.name == DECAY else e.name,
                f"{e.value:.3g}",
                *(f"{e.benefit:+.2e}", f"{e.error:.1e}", said(e.z)),
            )
            for e in self.last().values()
        ]
        heads = ("site", "p", "benefit", "±", "says")
        return Table(heads, rows, numbers={"p", "benefit", "±"})

    def figure(self) -> Figure:
        """Draw p of every site over the steps, and below it λ where weight decay is tuned.

        Raises:
            DataError: if nothing was measured yet.
            MissingExtraError: if matplotlib is not installed.
        """
        from undrop.report import figures

        if not self.entries:
            raise DataError("there is nothing to draw: the tuner has not measured yet.")
        names = [name for name in self.last() if name != DECAY]
        rows = 2 if len(names) < len(self.last()) else 1
        with figures.styled():
            figure = figures.new_figure(7.0, 2.0 + 1.5 * rows)
            every = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
            for place, name in enumerate(names):
                self._draw(every[0], name, place)
            every[0].set(ylabel="p", ylim=(0.0, None))
            every[0].legend()
            if rows == 2:
                self._draw(every[1], DECAY, 0)
                every[1].set(ylabel=f"{DECAY}, λ", yscale="log")
            every[-1].set(xlabel="step")
        return figure

    def _draw(self, axes: Axes, name: str, place: int) -> None:
        from undrop.report import figures

        steps, values = self.path(name)
        style = {**figures.line_style(place), "markevery": max(1, len(steps) // 8)}
        axes.plot(steps, values, label=figures.literal(name), **style)

    def save_figure(self, path: Path | str) -> None:
        """Write the figure; the suffix says how (png, pdf, svg)."""
        from undrop.report import figures

        figures.save(self.figure(), Path(path))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one dictionary per entry, for programs."""
        return [entry._asdict() for entry in self.entries]
