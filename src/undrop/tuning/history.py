"""What a tuner did: every trial and the values after it, as records, a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import DataError
from undrop.report import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECAY = "weight decay"
"""The name of trials of weight decay."""
EVERY = "every site"
"""The name of trials of all sites together."""
RECENT = 10
"""A benefit is the mean of the last trials, at most this many."""


class Entry(NamedTuple):
    """One trial."""

    step: int
    tried: str
    """A site, "every site" or "weight decay"."""
    difference: float
    """The validation loss with less minus the validation loss with more: positive if more helps."""
    values: dict[str, float]
    """p of every site after the trial, and λ under "weight decay" if it is tuned."""


def mean_difference(differences: Sequence[float]) -> Estimate:
    """Return the mean of independent differences, with Student's interval."""
    n = len(differences)
    error = stdev(differences) / math.sqrt(n) if n > 1 else None
    return Estimate.of(fmean(differences), error, n - 1.0)


class History:
    """All trials, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @property
    def values(self) -> dict[str, float]:
        """The values after the last trial."""
        return self.entries[-1].values if self.entries else {}

    def benefits(self) -> dict[str, Estimate]:
        """Return the benefit of each site, and of weight decay, in its last ten trials."""
        found: dict[str, list[float]] = {}
        for entry in self.entries:
            found.setdefault(entry.tried, []).append(entry.difference)
        return {name: mean_difference(differences[-RECENT:]) for name, differences in found.items()}

    def z_score(self, tried: str, benefit: Estimate) -> float:
        """Return the benefit of a new trial in standard errors.

        The error of a trial comes from its validation batches alone, but its masks and training
        batches vary too. So the error is at least the standard deviation of the last ten trials.
        """
        before = [e.difference for e in self.entries if e.tried == tried][1 - RECENT :]
        spread = stdev([*before, benefit.value]) if before else 0.0
        error = max(benefit.stderr or 0.0, spread)
        return benefit.value / error if error else 0.0

    def path(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and the values of one site, or of weight decay."""
        return [e.step for e in self.entries], [e.values[name] for e in self.entries]

    def table(self) -> Table:
        """Return the newest p, benefit and evidence as a table."""
        benefits, rows = self.benefits(), []
        for name in dict.fromkeys([*benefits, *self.values]):
            value, found = self.values.get(name), benefits.get(name)
            decay = f"{DECAY} (λ = {value:.2g})" if name == DECAY else None
            p = "" if value is None or decay else f"{value:.3f}"
            rows.append((decay or name, p, *(("", "") if found is None else _shown(found))))
        return Table(("site", "p", "benefit", "evidence"), rows, numbers={"p", "benefit"})

    def figure(self) -> Figure:
        """Draw p of every site over the steps, and below it λ if weight decay is tuned.

        Raises:
            DataError: if there was no trial yet.
            MissingExtraError: if matplotlib is not installed.
        """
        from undrop.report import figures

        if not self.entries:
            raise DataError("there is nothing to draw: the tuner has made no trial yet.")
        names = [name for name in self.values if name != DECAY]
        rows = 2 if len(names) < len(self.values) else 1
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
        """Write the figure; the suffix sets the format (png, pdf, svg)."""
        from undrop.report import figures

        figures.save(self.figure(), Path(path))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one dictionary per trial, for programs."""
        return [entry._asdict() for entry in self.entries]


def _shown(found: Estimate) -> tuple[str, str]:
    error = "?" if found.stderr is None else f"{found.stderr:.4f}"
    sign = "more helps" if found.value > 0.0 else "less helps"
    return f"{found.value:+.4f} ± {error}", "no evidence" if found.includes_zero else sign
