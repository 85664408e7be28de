"""Figures in the paper's style: perplexity by epoch with a band over seeds, or methods side by side."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from undrop.files import replacing
from undrop.lab.reproduce.measures import MEASURES
from undrop.lab.reproduce.records import Record
from undrop.lab.reproduce.report.content import Row, Section
from undrop.lab.reproduce.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KINDS", "as_svg", "draw", "save"]

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "path",
    "svg.hashsalt": "undrop",
    "legend.frameon": False,
}
_FORMATS = ("png", "pdf")
_NO_DATE = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Metadata that would make equal figures differ."""

_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = "osD^vPX"
"""Dashes and markers of as many as there are, so that curves can be told apart without colour."""

_OURS, _PAPERS = "#1f5fa8", "#b3541e"


def draw(section: Section, results: Results) -> Figure | None:
    """The experiment's figure; None while there is nothing to show."""
    if all(row.interval is None for row in section.rows):
        return None
    from matplotlib.figure import Figure

    with _styled():
        figure = Figure(layout="constrained", dpi=150)
        KINDS[section.experiment.figure](figure, section, results)
        return figure


def as_svg(figure: Figure, title: str) -> str:
    """The figure as an element for a page, with its title for those who can't see it."""
    text = io.StringIO()
    with _styled():
        figure.savefig(text, format="svg", metadata=_NO_DATE["svg"])
    svg = text.getvalue()
    element = svg[svg.index("<svg") :]
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def save(figure: Figure, out: Path, name: str) -> str:
    """Write the figure in every format; the path of the one that Markdown shows."""
    for kind in _FORMATS:
        with replacing(out / "figures" / f"{name}.{kind}") as temporary, _styled():
            figure.savefig(temporary, format=kind, metadata=_NO_DATE[kind])
    return f"figures/{name}.{_FORMATS[0]}"


def _styled() -> AbstractContextManager[None]:
    import matplotlib as mpl

    context: AbstractContextManager[None] = mpl.rc_context(_STYLE)
    return context


def _validation(figure: Figure, section: Section, results: Results) -> None:
    figure.set_size_inches(6.0, 3.6)
    _curves(figure.subplots(), section, results, "valid_ppl", "epoch")


def _train_and_validation(figure: Figure, section: Section, results: Results) -> None:
    figure.set_size_inches(8.4, 3.6)
    left, right = figure.subplots(1, 2)
    _curves(left, section, results, "train_ppl", "epoch")
    _curves(right, section, results, "valid_ppl", "epoch")
    left.get_legend().remove()


def _time(figure: Figure, section: Section, results: Results) -> None:
    figure.set_size_inches(6.0, 3.6)
    _curves(figure.subplots(), section, results, "valid_ppl", "seconds")


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
        colour = _colour(row, section.rows, index)
        mark: dict[str, Any] = {
            "ls": _DASHES[index % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        every = max(1, len(xs) // 8)
        axes.plot(
            xs, ys.mean(0), color=colour, lw=1.4, ms=4, markevery=every, label=row.label, **mark
        )
        axes.fill_between(xs, ys.min(0), ys.max(0), color=colour, alpha=0.18, lw=0)
        ends.append(ys.mean(0).min())
    if ends:
        axes.set_ylim(min(ends) * 0.95, _top(y, ends))
    if x == "epoch":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(_AXES[x])
    axes.set_ylabel(_AXES[y])
    axes.legend(fontsize=7.5)


def _top(y: str, ends: Sequence[float]) -> float:
    """What to leave out above: the first epochs would flatten all that matters."""
    return float(np.median(ends) * (1.45 if y == "valid_ppl" else 3.0))


def _aligned(records: Sequence[Record], x: str, y: str) -> tuple[Any, Any]:
    """The curves of several seeds over a common axis, as long as the shortest."""
    length = min(len(record.curve.epoch) for record in records)
    ys = [getattr(record.curve, y)[:length] for record in records]
    if any(value is None for values in ys for value in values):
        return None, None
    times = [
        record.training_seconds if x == "seconds" else record.curve.epoch for record in records
    ]
    xs = np.mean([values[:length] for values in times], axis=0)
    return xs, np.asarray(ys, dtype=float)


def _colour(row: Row, rows: Sequence[Row], index: int) -> Any:
    """Black for plain dropout, grey for none; the others along a map that prints in grey too."""
    import matplotlib as mpl

    fixed = {"drop-1": "black", "none": "#999999"}
    if row.method in fixed:
        return fixed[row.method]
    others = [i for i, other in enumerate(rows) if other.method not in fixed]
    return mpl.colormaps["viridis"](0.05 + 0.85 * others.index(index) / max(1, len(others) - 1))


def _bars(figure: Figure, section: Section, results: Results) -> None:
    """A point and its interval for each method, and the paper's ratio to its own Drop₁ beside it."""
    rows = [row for row in section.rows if row.interval is not None]
    figure.set_size_inches(6.4, 1.1 + 0.32 * len(rows))
    axes = figure.subplots()
    several = len(section.experiment.settings) > 1
    for position, row in enumerate(rows):
        interval, anchor = row.interval, _anchor(section, row)
        assert interval is not None
        axes.plot([interval.low, interval.high], [position] * 2, color=_OURS, lw=2.5, alpha=0.5)
        axes.plot(interval.estimate, position, "o", color=_OURS, ms=5)
        if row.paper is not None and anchor is not None:
            axes.plot(row.paper.value * anchor, position, "D", color=_PAPERS, ms=4, mfc="none")
    axes.plot([], [], "o", color=_OURS, label="ours, with 95 % interval")
    if any(row.paper is not None for row in rows):
        label = "the paper's, scaled to our Drop₁"
        axes.plot([], [], "D", color=_PAPERS, mfc="none", label=label)
    names = [f"{row.setting}: {row.label}" if several else row.label for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel(MEASURES[section.experiment.measure].label)
    figure.legend(fontsize=7.5, loc="outside lower center", ncols=2)


def _anchor(section: Section, row: Row) -> float | None:
    """Our Drop₁ over the paper's, on the row's setting."""
    for other in section.rows:
        same = other.setting == row.setting and other.method == "drop-1"
        if same and other.paper is not None and other.interval is not None:
            return other.interval.estimate / other.paper.value
    return None


def _shares(figure: Figure, section: Section, results: Results) -> None:
    """R_drop and its quadratic term, seed by seed."""
    row = section.rows[0]
    records = results.of(row.setting, row.method)
    figure.set_size_inches(4.8, 3.0)
    axes = figure.subplots()
    places = np.arange(len(records))
    for shift, name, label in ((-0.2, "dropped", "R_drop"), (0.2, "quadratic", "½ E[uᵀHu]")):
        heights = [record.probed[name] for record in records.values()]
        axes.bar(places + shift, heights, 0.38, label=label, color=_OURS if shift < 0 else _PAPERS)
    axes.set_xticks(places, [f"seed {seed}" for seed in records])
    axes.set_ylabel("nats per token")
    axes.legend(fontsize=8)


KINDS: Mapping[str, Callable[[Any, Section, Results], None]] = {
    "validation": _validation,
    "train-and-validation": _train_and_validation,
    "bars": _bars,
    "time": _time,
    "shares": _shares,
}
"""How each kind of figure is drawn; an experiment names one."""
