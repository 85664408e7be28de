"""Curves of runs, readable without colour: each run has its own dash and marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrop.errors import RunError, UnknownNameError
from undrop.report.figures import line_style, literal, new_figure, save, styled

_LABELS = {
    "valid_ppl": "validation perplexity",
    "test_ppl": "test perplexity",
    "train_ppl": "training perplexity without noise",
    "loss": "training loss",
    "explicit": "explicit part",
    "implicit": "implicit part",
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
}


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, value: str = "valid_ppl"
) -> None:
    """Plot a value over the epochs of several runs, and save the figure.

    Args:
        runs: the epoch records of each run, by its name in the legend.
        path: where to save the figure; the suffix gives the format (png, pdf, svg).
        value: a key of the epoch records.

    Raises:
        OptionError: if there is no such value, or the suffix names no kind of picture.
        RunError: if no epoch has the value.
        MissingExtraError: if matplotlib is not installed.
    """
    if value not in _LABELS:
        raise UnknownNameError("curve", value, _LABELS)
    points = {
        name: [(r["epoch"], r[value]) for r in records if r.get(value) is not None]
        for name, records in runs.items()
    }
    if not any(points.values()):
        raise RunError(f"there is nothing to plot: no epoch of these runs has {value}.")
    figure = new_figure(7.0, 4.5)
    with styled():
        _draw(figure.add_subplot(), points, value)
    save(figure, path)


def _draw(axes: Any, points: Mapping[str, Sequence[tuple[int, float]]], value: str) -> None:
    for place, (name, line) in enumerate(points.items()):
        axes.plot(
            [epoch for epoch, _ in line],
            [y for _, y in line],
            label=literal(name),
            markevery=max(1, len(line) // 10),
            markersize=5,
            **line_style(place),
        )
    if value.endswith("_ppl"):
        _focus(axes, [y for line in points.values() for _, y in line])
    axes.set(xlabel="epoch", ylabel=_LABELS[value])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def _focus(axes: Any, values: Sequence[float]) -> None:
    """Cut off the high values of the first epochs if they would flatten everything else."""
    lowest, highest = min(values), max(values)
    if highest > 3.0 * lowest:
        axes.set_ylim(0.95 * lowest, 3.0 * lowest)
