"""Curves of runs, readable without colour: each run has its own dash and marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrop.errors import OptionError, RunError

__all__ = ["curves"]

_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (7, 3)))
_MARKERS = "os^Dv*PX"
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
        OptionError: if there is no such value.
        RunError: if no epoch has the value, or matplotlib is missing.
    """
    if value not in _LABELS:
        raise OptionError(f"there is no curve of {value!r}: use one of {', '.join(_LABELS)}.")
    points = {
        name: [(r["epoch"], r[value]) for r in records if r.get(value) is not None]
        for name, records in runs.items()
    }
    if not any(points.values()):
        raise RunError(f"there is nothing to plot: no epoch of these runs has {value}.")
    figure, axes = _figure()
    for place, (name, line) in enumerate(points.items()):
        axes.plot(
            [epoch for epoch, _ in line],
            [y for _, y in line],
            label=name,
            linestyle=_DASHES[place % len(_DASHES)],
            marker=_MARKERS[place % len(_MARKERS)],
            markevery=max(1, len(line) // 10),
            markersize=5,
        )
    if value.endswith("_ppl"):
        _focus(axes, [y for line in points.values() for _, y in line])
    axes.set(xlabel="epoch", ylabel=_LABELS[value])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{path} can't be saved: {error}.") from error


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError("plots need matplotlib: pip install 'undrop[plot]'.") from error
    figure = Figure(figsize=(7, 4.5))  # no pyplot: nothing global, no window, no leak
    return figure, figure.add_subplot()


def _focus(axes: Any, values: Sequence[float]) -> None:
    """Cut off the high values of the first epochs if they would flatten everything else."""
    lowest, highest = min(values), max(values)
    if highest > 3.0 * lowest:
        axes.set_ylim(0.95 * lowest, 3.0 * lowest)
