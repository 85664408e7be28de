"""The figures of a diagnosis drawn, readable without colour: hatches, markers and dashes differ."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import OptionError, UndropError

if TYPE_CHECKING:
    from undrop.diagnosis.report.result import Diagnosis

__all__ = ["draw", "panels", "svg"]

_HATCHES = ("", "///", "...", "xxx")
_FILLS = ("0.55", "0.75", "0.92", "0.4")
_ROWS = 12  # the most bars of a panel

Panel = Callable[["Diagnosis", Any], None]


def panels(diagnosis: Diagnosis) -> dict[str, Panel]:
    """The panels that a diagnosis has something to show in, by title."""
    found: dict[str, Panel] = {
        "R_drop and its parts": _parts,
        "Share of ½E[uᵀHu] by site": _sites,
        "Where second order breaks down": _curve,
    }
    if diagnosis.explicit.classes:
        found["Classes that carry uᵀHu"] = _classes
    if diagnosis.implicit is not None:
        found["Gradient noise by part of the model"] = _groups
        found["Noise of the mean of k samples"] = _shrinking
    return found


def draw(diagnosis: Diagnosis, path: Path) -> None:
    """Draw all panels into one picture.

    Raises:
        OptionError: if the suffix is not that of a kind of picture.
    """
    found = panels(diagnosis)
    columns = 2
    rows = math.ceil(len(found) / columns)
    figure = _figure(6.4 * columns, 3.8 * rows)
    for place, (title, panel) in enumerate(found.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        panel(diagnosis, axes)
        axes.set_title(title)
    figure.suptitle(f"What dropout does in {_plain(diagnosis.model)}")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{path} can't be drawn: {error}.") from error


def svg(diagnosis: Diagnosis, panel: Panel) -> bytes:
    """One panel as an SVG picture."""
    figure = _figure(7.0, 3.9)
    panel(diagnosis, figure.add_subplot())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UndropError("plots need matplotlib: pip install 'undrop[plot]'.") from error
    # no pyplot: nothing global, no window, no leak
    return Figure(figsize=(width, height), layout="constrained")


def _plain(text: str) -> str:
    """A name as it is: to matplotlib a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _errors(estimates: Sequence[Estimate], scale: float = 1.0) -> list[float]:
    return [scale * (e.stderr or 0.0) for e in estimates]


def _bars(axes: Any, names: Sequence[str], values: Sequence[Estimate], scale: float = 1.0) -> None:
    """Horizontal bars with error bars, the first at the top."""
    places = range(len(names))
    axes.barh(
        places,
        [scale * e.value for e in values],
        xerr=_errors(values, scale),
        color="0.75",
        edgecolor="black",
        hatch="///",
        capsize=3,
    )
    axes.set_yticks(places, [_plain(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _parts(diagnosis: Diagnosis, axes: Any) -> None:
    parts = diagnosis.explicit.parts
    names = ("R_drop", "½E[uᵀHu]", "non-PSD term", "missed by Taylor")
    for place, (part, hatch, fill) in enumerate(zip(parts, _HATCHES, _FILLS, strict=True)):
        axes.barh(
            place,
            part.value,
            xerr=part.stderr or 0.0,
            hatch=hatch,
            color=fill,
            edgecolor="black",
            capsize=3,
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("mean loss per term")


def _sites(diagnosis: Diagnosis, axes: Any) -> None:
    effects = sorted(diagnosis.explicit.sites.items(), key=lambda item: -item[1].share.value)
    shown = effects[:_ROWS]
    names = [f"{name} (p = {effect.site.p:g})" for name, effect in shown]
    _bars(axes, names, [effect.share for _, effect in shown], 100.0)
    more = f" (the first {_ROWS} of {len(effects)} sites)" if len(effects) > _ROWS else ""
    axes.set_xlabel(f"% of ½E[uᵀHu]{more}")


def _curve(diagnosis: Diagnosis, axes: Any) -> None:
    curve = diagnosis.explicit.curve
    q = [point.q for point in curve]
    r_drop = [point.parts.r_drop for point in curve]
    lines = (
        ("R_drop", "o", "-", [e.value for e in r_drop]),
        ("½E[uᵀHu]", "s", "--", [p.parts.psd.value for p in curve]),
        ("second order", "^", ":", [p.parts.psd.value + p.parts.non_psd.value for p in curve]),
    )
    for label, marker, dash, values in lines:
        errors = _errors(r_drop) if label == "R_drop" else None
        axes.errorbar(
            q,
            values,
            yerr=errors,
            label=label,
            marker=marker,
            linestyle=dash,
            color="black",
            markerfacecolor="white",
            capsize=3,
        )
    axes.axvline(max(site.p for site in diagnosis.sites), color="0.5", linewidth=1.0)
    if all(value > 0.0 for _, _, _, values in lines for value in values):
        axes.set_yscale("log")
    axes.set(xlabel="largest p (all p scaled alike; the line is the model's own)", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _classes(diagnosis: Diagnosis, axes: Any) -> None:
    classes = diagnosis.explicit.classes
    _bars(axes, [c.name for c in classes], [c.share for c in classes], 100.0)
    axes.plot(
        [100.0 * c.weight for c in classes],
        range(len(classes)),
        linestyle="none",
        marker="D",
        color="black",
        markerfacecolor="white",
        label="% of p(1-p)",
    )
    axes.set_xlabel("% of uᵀHu")
    axes.legend()


def _groups(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    groups = sorted(
        diagnosis.implicit.groups.items(), key=lambda item: -item[1].trace_dropout.value
    )[:_ROWS]
    kinds = ("trace_dropout", "trace_analytic", "trace_batch")
    height = 0.8 / len(kinds)
    for place, (kind, label) in enumerate(
        zip(kinds, ("dropout", "ξ_approx", "mini-batching"), strict=True)
    ):
        found = [getattr(group, kind) or Estimate(0.0, None) for _, group in groups]
        axes.barh(
            [row + (place - 1) * height for row in range(len(groups))],
            [e.value for e in found],
            height=height,
            xerr=_errors(found),
            label=label,
            hatch=_HATCHES[place],
            color=_FILLS[place],
            edgecolor="black",
            capsize=2,
        )
    axes.set_yticks(range(len(groups)), [_plain(name) for name, _ in groups])
    axes.invert_yaxis()
    if any(group.trace_dropout.value > 0.0 for _, group in groups):
        axes.set_xscale("log")
    axes.set_xlabel("trace of the gradient's covariance")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(kinds))


def _shrinking(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    points = diagnosis.implicit.shrinking
    ks = [point.k for point in points]
    for kind, marker, dash in (("dropout", "o", "-"), ("analytic", "s", "--")):
        found: list[Estimate] = [getattr(point, kind) for point in points]
        axes.errorbar(
            ks,
            [e.value / k for e, k in zip(found, ks, strict=True)],
            yerr=[(e.stderr or 0.0) / k for e, k in zip(found, ks, strict=True)],
            label="ξ_approx" if kind == "analytic" else kind,
            marker=marker,
            linestyle=dash,
            color="black",
            markerfacecolor="white",
            capsize=3,
        )
    first = points[0].dropout.value
    axes.plot(ks, [first / k for k in ks], color="0.6", linewidth=3.0, zorder=0, label="1/k")
    axes.set_xscale("log", base=2)
    if first > 0.0:
        axes.set_yscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="trace")
    axes.grid(alpha=0.3)
    axes.legend()
