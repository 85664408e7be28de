"""Figures in the paper's style: perplexity over epochs with a band over seeds, or one dot per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from undrop.lab.reproduce.results import MEASURES, REFERENCE, Results
from undrop.registry import Registry
from undrop.report.figures import OTHER, OURS, line_style, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from undrop.lab.reproduce.report import Row, Section

FIGURE_KINDS: Registry[str, Callable[[Section, Results], Any]] = Registry("figure")
"""The kinds of figures; an experiment names one."""


def draw(section: Section, results: Results) -> Figure | None:
    """Return the experiment's figure, or None if there is nothing to show yet."""
    if all(row.interval is None for row in section.rows):
        return None
    with styled():
        figure: Figure = FIGURE_KINDS[section.experiment.figure](section, results)
        return figure


_SYMBOLS = {
    "R̃_approx": r"$\tilde{R}_\mathrm{approx}$",
    "R_approx": r"$R_\mathrm{approx}$",
    "R_drop": r"$R_\mathrm{drop}$",
    "ξ_approx": r"$\xi_\mathrm{approx}$",
    "Drop₃₂": r"Drop$_{32}$",
    **{f"Drop{digit}": f"Drop$_{number}$" for digit, number in zip("₁₂₄₈", "1248", strict=True)},
    "ℓ₂": r"$\ell_2$",
    "ρ": r"$\rho$",
}


def mathtext(label: str) -> str:
    """Return a label with its symbols as mathtext."""
    for plain, symbol in _SYMBOLS.items():
        label = label.replace(plain, symbol)
    return label


@FIGURE_KINDS.register("validation")
def _validation(section: Section, results: Results) -> Figure:
    """Curves, and next to them their small difference from plain dropout."""
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "valid_ppl")
    left.legend(fontsize=8)
    _differences(right, section, results)
    return figure


def _differences(axes: Axes, section: Section, results: Results) -> None:
    """How far each method's validation perplexity is above plain dropout's, in percent, seed by seed."""
    for index, row in enumerate(section.rows):
        pairs = list(results.pairs(row.cell).values())
        if row.method == REFERENCE or not pairs:
            continue
        length = min(len(record.curve.epoch) for pair in pairs for record in pair)
        late = slice(length // 3, length)  # the first epochs would hide the differences
        own, plain = (
            np.asarray([record.curve.valid_ppl[late] for record in side])
            for side in zip(*pairs, strict=True)
        )
        percent = 100.0 * (own / plain - 1.0)
        color, epochs = _color(row, section.rows, index), pairs[0][0].curve.epoch[late]
        axes.plot(epochs, percent.mean(0), lw=1.4, color=color, label=mathtext(row.label))
        axes.fill_between(epochs, percent.min(0), percent.max(0), color=color, alpha=0.18, lw=0)
    axes.axhline(0.0, color="black", lw=0.8)
    _count_epochs(axes)
    axes.set_ylabel(mathtext("percent above Drop₁ in the same epoch"))


@FIGURE_KINDS.register("train-and-validation")
def _train_and_validation(section: Section, results: Results) -> Figure:
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "train_ppl")
    _curves(right, section, results, "valid_ppl")
    right.legend(fontsize=8)
    return figure


_AXES = {"valid_ppl": "validation perplexity", "train_ppl": "training perplexity, without noise"}


def _curves(axes: Axes, section: Section, results: Results, y: str) -> None:
    """A line for each method, the mean over seeds, in a band from the smallest to the largest value."""
    ends = []
    for index, row in enumerate(section.rows):
        curves = [record.curve for record in results.records_of(row.cell).values()]
        length = min(
            (len(curve.epoch) for curve in curves), default=0
        )  # that of the shortest curve
        ys = np.asarray([getattr(curve, y)[:length] for curve in curves], dtype=float)
        if not curves or np.isnan(ys).any():
            continue
        xs = curves[0].epoch[:length]
        mark = {**line_style(index), "color": _color(row, section.rows, index)}
        every = max(1, len(xs) // 8)
        axes.plot(xs, ys.mean(0), lw=1.4, ms=4, markevery=every, label=mathtext(row.label), **mark)
        axes.fill_between(xs, ys.min(0), ys.max(0), color=mark["color"], alpha=0.18, lw=0)
        ends.append(ys.mean(0).min())
    if ends:
        # Leave out the first epochs, which would flatten the rest.
        top = np.median(ends) * (1.45 if y == "valid_ppl" else 3.0)
        axes.set_ylim(min(ends) * 0.95, float(top))
    _count_epochs(axes)
    axes.set_ylabel(_AXES[y])


def _count_epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")


def _color(row: Row, rows: Sequence[Row], index: int) -> Any:
    """Black for plain dropout, gray for none; a color map that prints well in gray for the others."""
    import matplotlib as mpl

    fixed = {"drop-1": "black", "none": "#999999"}
    if row.method in fixed:
        return fixed[row.method]
    others = [i for i, other in enumerate(rows) if other.method not in fixed]
    return mpl.colormaps["viridis"](0.05 + 0.85 * others.index(index) / max(1, len(others) - 1))


@FIGURE_KINDS.register("bars")
def _bars(section: Section, results: Results) -> Figure:
    """A point with its interval for each method, by setting, the best on top."""
    settings = list(dict.fromkeys(row.setting for row in section.rows))
    rows = sorted(
        (row for row in section.rows if row.interval is not None),
        key=lambda row: (settings.index(row.setting), row.interval and row.interval.estimate),
    )
    figure = new_figure(6.4, 0.9 + 0.3 * len(rows))
    axes = figure.subplots()
    for position, row in enumerate(rows):
        interval = row.interval
        assert interval is not None
        color = "black" if row.method == REFERENCE else OURS
        axes.plot([interval.low, interval.high], [position] * 2, color=color, lw=2.5, alpha=0.5)
        axes.plot(interval.estimate, position, "o", color=color, ms=5)
    names = [f"{row.setting}: {row.label}" if len(settings) > 1 else row.label for row in rows]
    axes.set_yticks(range(len(rows)), [mathtext(name) for name in names])
    axes.invert_yaxis()
    label = mathtext(MEASURES[section.experiment.measure].label)
    figure.supxlabel(f"{label}, mean and 95 % interval over seeds", fontsize=9)
    return figure


_QUADRATIC = r"$\frac{1}{2}\,\mathrm{E}[u^\top H u]$"


@FIGURE_KINDS.register("shares")
def _shares(section: Section, results: Results) -> Figure:
    """R_drop and its quadratic term, by seed."""
    records = results.records_of(section.rows[0].cell)
    figure = new_figure(4.8, 3.2)
    axes = figure.subplots()
    places = np.arange(len(records))
    for shift, name, label in (
        (-0.2, "dropped", mathtext("R_drop")),
        (0.2, "quadratic", _QUADRATIC),
    ):
        heights = [record.probed[name] for record in records.values()]
        axes.bar(places + shift, heights, 0.38, label=label, color=OURS if shift < 0 else OTHER)
    axes.set_xticks(places, [f"seed {seed}" for seed in records])
    axes.set_ylabel("nats per token")
    axes.legend()
    return figure
