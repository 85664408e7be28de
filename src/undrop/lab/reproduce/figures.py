"""The figures of experiments: curves with a band over seeds, a point for each method, or two bars."""

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

    from undrop.lab.reproduce.report import ReportSection, Row

FIGURE_KINDS: Registry[str, Callable[[ReportSection, Results], Any]] = Registry("figure")
"""The kinds of figures; an experiment names one."""


def draw(section: ReportSection, results: Results) -> Figure | None:
    """Return the experiment's figure; None if it has no records yet."""
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
def _validation(section: ReportSection, results: Results) -> Figure:
    """Return two panels: validation perplexities, and their differences from Drop₁'s."""
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "valid_ppl")
    left.legend(fontsize=8)
    _differences(right, section, results)
    return figure


def _differences(axes: Axes, section: ReportSection, results: Results) -> None:
    """Draw how far each method's validation perplexity is above Drop₁'s, in percent.

    Drop₁, plain dropout, is the ``REFERENCE``. A run is compared with the reference's run of the same
    seed. A line is the mean over seeds.
    """
    for index, row in enumerate(section.rows):
        pairs = list(results.pairs(row.cell).values())
        if row.method == REFERENCE or not pairs:
            continue
        length = min(len(record.curve.epoch) for pair in pairs for record in pair)
        shown = slice(length // 3, length)  # the first epochs would hide the differences
        # Shape: (seeds, 2, epochs). In each pair, the second record is the reference's.
        ppl = np.asarray([[record.curve.valid_ppl[shown] for record in pair] for pair in pairs])
        percent = 100.0 * (ppl[:, 0] / ppl[:, 1] - 1.0)
        color = _color(row, section.rows, index)
        epochs = pairs[0][0].curve.epoch[shown]
        axes.plot(epochs, percent.mean(0), lw=1.4, color=color, label=mathtext(row.label))
        axes.fill_between(epochs, percent.min(0), percent.max(0), color=color, alpha=0.18, lw=0)
    axes.axhline(0.0, color="black", lw=0.8)
    _label_epochs(axes)
    axes.set_ylabel(mathtext("percent above Drop₁ in the same epoch"))


@FIGURE_KINDS.register("train-and-validation")
def _train_and_validation(section: ReportSection, results: Results) -> Figure:
    figure = new_figure(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "train_ppl")
    _curves(right, section, results, "valid_ppl")
    right.legend(fontsize=8)
    return figure


_LABELS = {"valid_ppl": "validation perplexity", "train_ppl": "training perplexity, without noise"}


def _curves(axes: Axes, section: ReportSection, results: Results, name: str) -> None:
    """Draw a curve of each method: the mean over seeds, in a band from the minimum to the maximum.

    All curves of a method are cut to the length of the shortest one.
    """
    lowest_means = []
    for index, row in enumerate(section.rows):
        curves = [record.curve for record in results.records_of(row.cell).values()]
        length = min((len(curve.epoch) for curve in curves), default=0)
        ys = np.asarray([getattr(curve, name)[:length] for curve in curves], dtype=float)
        if not curves or np.isnan(ys).any():
            continue
        xs = curves[0].epoch[:length]
        style = {**line_style(index), "color": _color(row, section.rows, index)}
        every = max(1, len(xs) // 8)
        axes.plot(xs, ys.mean(0), lw=1.4, ms=4, markevery=every, label=mathtext(row.label), **style)
        axes.fill_between(xs, ys.min(0), ys.max(0), color=style["color"], alpha=0.18, lw=0)
        lowest_means.append(ys.mean(0).min())
    if lowest_means:
        # Cut off the first epochs, whose high values would flatten the curves.
        top = np.median(lowest_means) * (1.45 if name == "valid_ppl" else 3.0)
        axes.set_ylim(min(lowest_means) * 0.95, float(top))
    _label_epochs(axes)
    axes.set_ylabel(_LABELS[name])


def _label_epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")


def _color(row: Row, rows: Sequence[Row], index: int) -> Any:
    """Return black for Drop₁, gray for no regularization, or a color from viridis."""
    import matplotlib as mpl

    fixed_colors = {REFERENCE: "black", "none": "#999999"}
    if row.method in fixed_colors:
        return fixed_colors[row.method]
    others = [i for i, other in enumerate(rows) if other.method not in fixed_colors]
    return mpl.colormaps["viridis"](0.05 + 0.85 * others.index(index) / max(1, len(others) - 1))


@FIGURE_KINDS.register("points")
def _points(section: ReportSection, results: Results) -> Figure:
    """Return a figure with a point and its interval for each method, by setting.

    In each setting, the lowest value is on top.
    """
    settings = list(dict.fromkeys(row.setting for row in section.rows))
    rows = [(row, row.interval) for row in section.rows if row.interval is not None]
    rows.sort(key=lambda pair: (settings.index(pair[0].setting), pair[1].estimate))
    figure = new_figure(6.4, 0.9 + 0.3 * len(rows))
    axes = figure.subplots()
    for position, (row, interval) in enumerate(rows):
        color = "black" if row.method == REFERENCE else OURS
        axes.plot([interval.low, interval.high], [position] * 2, color=color, lw=2.5, alpha=0.5)
        axes.plot(interval.estimate, position, "o", color=color, ms=5)
    names = [f"{r.setting}: {r.label}" if len(settings) > 1 else r.label for r, _ in rows]
    axes.set_yticks(range(len(rows)), [mathtext(name) for name in names])
    axes.invert_yaxis()
    label = mathtext(MEASURES[section.experiment.measure].label)
    figure.supxlabel(f"{label}, mean and 95 % interval over seeds", fontsize=9)
    return figure


@FIGURE_KINDS.register("shares")
def _paired_bars(section: ReportSection, results: Results) -> Figure:
    """Return a figure with two bars for each seed: R_drop and its quadratic term."""
    records = results.records_of(section.rows[0].cell)
    figure = new_figure(4.8, 3.2)
    axes = figure.subplots()
    positions = np.arange(len(records))
    quadratic = r"$\frac{1}{2}\,\mathrm{E}[u^\top H u]$"
    bars = (("dropped", mathtext("R_drop"), OURS, -0.2), ("quadratic", quadratic, OTHER, 0.2))
    for name, label, color, shift in bars:
        heights = [record.probed[name] for record in records.values()]
        axes.bar(positions + shift, heights, 0.38, label=label, color=color)
    axes.set_xticks(positions, [f"seed {seed}" for seed in records])
    axes.set_ylabel("nats per token")
    axes.legend()
    return figure
