"""The trials of a tuner and the tuned values after each, as records, a table and a figure."""

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
"""The value of ``Entry.tried`` for a trial of weight decay, and the key of λ among the tuned values."""
EVERY_SITE = "every site"
"""The value of ``Entry.tried`` for a trial of all sites together."""
RECENT = 10
"""A benefit is the mean over this many of the latest trials with the same ``Entry.tried``."""


class Entry(NamedTuple):
    """One trial, and the tuned values after it."""

    step: int
    tried: str
    """A site, "every site" or "weight decay"."""
    difference: float
    """The validation loss with less noise or decay, minus that with more: positive if more helps."""
    values: dict[str, float]
    """p of every site after the trial, and λ under "weight decay" if it is tuned."""


def mean_difference(differences: Sequence[float]) -> Estimate:
    """Return the mean of independent differences, with Student's interval."""
    n = len(differences)
    error = stdev(differences) / math.sqrt(n) if n > 1 else None
    return Estimate.of(fmean(differences), error, n - 1.0)


class History:
    """All trials of a tuner, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @property
    def values(self) -> dict[str, float]:
        """The tuned values after the last trial; empty before the first."""
        return self.entries[-1].values if self.entries else {}

    def benefits(self) -> dict[str, Estimate]:
        """Return the mean benefit in the last ten trials of each site, all sites and weight decay."""
        differences: dict[str, list[float]] = {}
        for entry in self.entries:
            differences.setdefault(entry.tried, []).append(entry.difference)
        return {name: mean_difference(values[-RECENT:]) for name, values in differences.items()}

    def z_score(self, tried: str, benefit: Estimate) -> float:
        """Return the benefit of a new trial divided by its standard error.

        The error of ``benefit`` comes from the validation batches alone, but masks and training
        batches also vary from trial to trial. So this method takes at least the standard deviation of
        the benefit over the last ten trials.
        """
        previous = [e.difference for e in self.entries if e.tried == tried][1 - RECENT :]
        spread = stdev([*previous, benefit.value]) if previous else 0.0
        error = max(benefit.stderr or 0.0, spread)
        return benefit.value / error if error else 0.0

    def path(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps of all trials, and p of a site (or λ of weight decay) after each of them."""
        return [e.step for e in self.entries], [e.values[name] for e in self.entries]

    def table(self) -> Table:
        """Return a table of the newest p, the benefit and the evidence, with a row for each site.

        p can move without evidence, because every trial moves it, an uncertain one by less.
        """
        benefits, rows = self.benefits(), []
        for name in dict.fromkeys([*benefits, *self.values]):
            value, benefit = self.values.get(name), benefits.get(name)
            label = f"{DECAY} (λ = {value:.2g})" if name == DECAY else name
            p = "" if value is None or name == DECAY else f"{value:.3f}"
            cells = benefit_cells(benefit, "more helps", "less helps") if benefit else ("", "")
            rows.append((label, p, *cells))
        title = f"Mean benefit of the last {RECENT} trials; no evidence: its interval contains 0"
        return Table(("site", "p", "benefit", "evidence"), rows, {"p", "benefit"}, title)

    def figure(self) -> Figure:
        """Draw p of every site over the steps, and λ below it if weight decay is tuned.

        Raises:
            DataError: before the first trial.
            MissingExtraError: if matplotlib is not installed.
        """
        from undrop.report import figures

        if not self.entries:
            raise DataError("there is nothing to draw: the tuner has made no trial yet.")
        names = [name for name in self.values if name != DECAY]
        rows = 2 if DECAY in self.values else 1
        with figures.styled():
            figure = figures.new_figure(7.0, 2.0 + 1.5 * rows)
            axes = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
            for index, name in enumerate(names):
                self._plot(axes[0], name, index)
            axes[0].set(ylabel="p", ylim=(0.0, None))
            axes[0].legend()
            if rows == 2:
                self._plot(axes[1], DECAY, 0)
                axes[1].set(ylabel=f"{DECAY}, λ", yscale="log")
            axes[-1].set(xlabel="step")
        return figure

    def _plot(self, axes: Axes, name: str, index: int) -> None:
        from undrop.report import figures

        steps, values = self.path(name)
        style = {**figures.line_style(index), "markevery": max(1, len(steps) // 8)}
        axes.plot(steps, values, label=figures.literal(name), **style)

    def save_figure(self, path: Path | str) -> None:
        """Save the figure; the suffix of the path sets the format (png, pdf, svg)."""
        from undrop.report import figures

        figures.save(self.figure(), Path(path))

    def to_json(self) -> list[dict[str, Any]]:
        """Return one dictionary per trial."""
        return [entry._asdict() for entry in self.entries]


def benefit_cells(benefit: Estimate, if_positive: str, if_negative: str) -> tuple[str, str]:
    """Return the table cells of a benefit: its value with the error, and the evidence for its sign."""
    error = "?" if benefit.stderr is None else f"{benefit.stderr:.4f}"
    evidence = if_positive if benefit.value > 0.0 else if_negative
    return f"{benefit.value:+.4f} ± {error}", "no evidence" if benefit.includes_zero else evidence
