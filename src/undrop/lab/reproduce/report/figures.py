"""Figures in the paper's style: perplexity by epoch with a band over seeds, or methods side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from undrop.lab.reproduce.measures import MEASURES
from undrop.lab.reproduce.records import Record
from undrop.lab.reproduce.report.content import Row, Section
from undrop.lab.reproduce.results import Results
from undrop.registry import Registry
from undrop.report.figures import OTHER, OURS, line_style, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KINDS", "draw"]

KINDS: Registry[str, Callable[[Section, Results], Any]] = Registry("figure")
"""The kinds of figures; an experiment names one."""


def draw(section: Section, results: Results) -> Figure | None:
    """Return the experiment's figure, or None if there is nothing to show yet."""
    if all(row.interval is None for row in section.rows):
        return None
    with styled():
        figure: Figure = KINDS[section.experiment.figure](section, results)
        return figure


@KINDS.register("validation")
def _validation(section: Section, results: Results) -> Figure:
    figure = new_figure(6.0, 3.8)
    _curves(figure.subplots(), section, results, "valid_ppl", "epoch")
    return figure


@KINDS.register("train-and-validation")
def _train_and_validation(section: Section, results: Results) -> Figure:
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "train_ppl", "epoch")
    _curves(right, section, results, "valid_ppl", "epoch")
    left.get_legend().remove()
    return figure


@KINDS.register("time")
def _time(section: Section, results: Results) -> Figure:
    figure = new_figure(6.0, 3.8)
    _curves(figure.subplots(), section, results, "valid_ppl", "seconds")
    return figure


_AXES = {
    "valid_ppl": "validation perplexity",
    "train_ppl": "training perplexity, without noise",
    "epoch": "epoch",
    "seconds": "seconds of training on one core",
}


def _curves(axes: Axes, section: Section, results: Results, y: str, x: str) -> None:
    """A line for each method, the mean over seeds, in a band from the least to the greatest."""
    ends = []
    for index, row in enumerate(section.rows):
        records = list(results.of(row.setting, row.method).values())
        if not records:
            continue
        xs, ys = _aligned(records, x, y)
        if ys is None:
            continue
        mark = {**line_style(index), "color": _color(row, section.rows, index)}
        every = max(1, len(xs) // 8)
        axes.plot(xs, ys.mean(0), lw=1.4, ms=4, markevery=every, label=row.label, **mark)
        axes.fill_between(xs, ys.min(0), ys.max(0), color=mark["color"], alpha=0.18, lw=0)
        ends.append(ys.mean(0).min())
    if ends:
        axes.set_ylim(min(ends) * 0.95, _top(y, ends))
    if x == "epoch":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(_AXES[x])
    axes.set_ylabel(_AXES[y])
    axes.legend(fontsize=8)


def _top(y: str, ends: Sequence[float]) -> float:
    """The upper limit: the first epochs would flatten everything that matters."""
    return float(np.median(ends) * (1.45 if y == "valid_ppl" else 3.0))


def _aligned(records: Sequence[Record], x: str, y: str) -> tuple[Any, Any]:
    """The curves of several seeds on a common axis, as long as the shortest."""
    length = min(len(record.curve.epoch) for record in records)
    ys = [getattr(record.curve, y)[:length] for record in records]
    if any(value is None for values in ys for value in values):
        return None, None
    times = [
        record.training_seconds if x == "seconds" else record.curve.epoch for record in records
    ]
    xs = np.mean([values[:length] for values in times], axis=0)
    return xs, np.asarray(ys, dtype=float)


def _color(row: Row, rows: Sequence[Row], index: int) -> Any:
    """Black for plain dropout, grey for none; the others along a map that prints in grey too."""
    import matplotlib as mpl

    fixed = {"drop-1": "black", "none": "#999999"}
    if row.method in fixed:
        return fixed[row.method]
    others = [i for i, other in enumerate(rows) if other.method not in fixed]
    return mpl.colormaps["viridis"](0.05 + 0.85 * others.index(index) / max(1, len(others) - 1))


@KINDS.register("bars")
def _bars(section: Section, results: Results) -> Figure:
    """A point with its interval for each method, and the paper's number scaled to our Drop₁."""
    rows = [row for row in section.rows if row.interval is not None]
    figure = new_figure(6.4, 1.2 + 0.34 * len(rows))
    axes = figure.subplots()
    several = len(section.experiment.settings) > 1
    for position, row in enumerate(rows):
        interval, anchor = row.interval, _anchor(section, row)
        assert interval is not None
        axes.plot([interval.low, interval.high], [position] * 2, color=OURS, lw=2.5, alpha=0.5)
        axes.plot(interval.estimate, position, "o", color=OURS, ms=5)
        if row.paper is not None and anchor is not None:
            axes.plot(row.paper.value * anchor, position, "D", color=OTHER, ms=4, mfc="none")
    axes.plot([], [], "o", color=OURS, label="ours, with 95 % interval")
    if any(row.paper is not None for row in rows):
        label = "the paper's, scaled to our Drop₁"
        axes.plot([], [], "D", color=OTHER, mfc="none", label=label)
    names = [f"{row.setting}: {row.label}" if several else row.label for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel(MEASURES[section.experiment.measure].label)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def _anchor(section: Section, row: Row) -> float | None:
    """Our Drop₁ divided by the paper's, on the row's setting."""
    for other in section.rows:
        same = other.setting == row.setting and other.method == "drop-1"
        if same and other.paper is not None and other.interval is not None:
            return other.interval.estimate / other.paper.value
    return None


@KINDS.register("shares")
def _shares(section: Section, results: Results) -> Figure:
    """R_drop and its quadratic term, by seed."""
    row = section.rows[0]
    records = results.of(row.setting, row.method)
    figure = new_figure(4.8, 3.2)
    axes = figure.subplots()
    places = np.arange(len(records))
    for shift, name, label in ((-0.2, "dropped", "R_drop"), (0.2, "quadratic", "½ E[uᵀHu]")):
        heights = [record.probed[name] for record in records.values()]
        axes.bar(places + shift, heights, 0.38, label=label, color=OURS if shift < 0 else OTHER)
    axes.set_xticks(places, [f"seed {seed}" for seed in records])
    axes.set_ylabel("nats per token")
    axes.legend()
    return figure
