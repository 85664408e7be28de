"""Draw the figures of a diagnosis, readable without color, and write its HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.diagnosis.measure.estimates import Estimate
from undrop.report import html
from undrop.report.figures import bar_style, line_style, literal, new_figure, save, styled
from undrop.report.figures import svg as as_svg

if TYPE_CHECKING:
    from undrop.diagnosis.report.result import Diagnosis


_ROWS = 12  # the most bars in a panel
_TICKS = 4  # the most labels below bars, which may be long

Panel = Callable[["Diagnosis", Any], None]


def panels(diagnosis: Diagnosis) -> dict[str, Panel]:
    """The panels of this diagnosis, by title."""
    found: dict[str, Panel] = {"R_drop and its parts": _parts, "Share of ½E[uᵀHu] by site": _sites}
    if diagnosis.benefit is not None:
        found["Benefit by site (right of 0 helps)"] = _benefit
    found["Where second order breaks down"] = _curve
    if diagnosis.explicit.classes:
        found["Classes that carry uᵀHu"] = _classes
    if diagnosis.implicit is not None:
        found["Gradient noise by part of the model"] = _groups
        found["Noise of the mean of k samples"] = _shrinking
    return found


def draw(diagnosis: Diagnosis, path: Path) -> None:
    """Draw all panels into one picture.

    Raises:
        OptionError: if the suffix is not a picture format.
    """
    found = panels(diagnosis)
    columns = 2
    rows = math.ceil(len(found) / columns)
    figure = new_figure(6.4 * columns, 3.8 * rows)
    with styled():
        for place, (title, panel) in enumerate(found.items()):
            axes = figure.add_subplot(rows, columns, place + 1)
            panel(diagnosis, axes)
            axes.set_title(title)
        figure.suptitle(f"What dropout does in {literal(diagnosis.model)}")
    save(figure, path)


def picture(diagnosis: Diagnosis, title: str, panel: Panel) -> str:
    """One panel as an ``<svg>`` element."""
    figure = new_figure(5.6, 3.5)  # small: a phone shows it at this size
    with styled():
        panel(diagnosis, figure.add_subplot())
    return as_svg(figure, f"{title}; the figures are in the tables below")


def _errors(estimates: Sequence[Estimate], scale: float = 1.0) -> list[float]:
    return [scale * (e.stderr or 0.0) for e in estimates]


def _bars(axes: Any, names: Sequence[str], values: Sequence[Estimate], scale: float = 1.0) -> None:
    """Horizontal bars with error bars, the first at the top."""
    places = range(len(names))
    widths = [scale * e.value for e in values]
    axes.barh(places, widths, xerr=_errors(values, scale), **bar_style(1))
    axes.set_yticks(places, [literal(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=_TICKS)


def _parts(diagnosis: Diagnosis, axes: Any) -> None:
    names = ("R_drop", "½E[uᵀHu]", "curvature", "rest")
    for place, part in enumerate(diagnosis.explicit.parts):
        axes.barh(place, part.value, xerr=part.stderr or 0.0, **bar_style(place))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.locator_params(axis="x", nbins=_TICKS)
    axes.set_xlabel("loss per term")


def _sites(diagnosis: Diagnosis, axes: Any) -> None:
    effects = sorted(diagnosis.explicit.sites.items(), key=lambda item: -item[1].share.value)
    shown = effects[:_ROWS]
    names = [f"{name} (p = {effect.p:g})" for name, effect in shown]
    _bars(axes, names, [effect.share for _, effect in shown], 100.0)
    more = f" (the first {_ROWS} of {len(effects)} sites)" if len(effects) > _ROWS else ""
    axes.set_xlabel(f"% of ½E[uᵀHu]{more}")


def _benefit(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.benefit is not None
    known = [item for item in diagnosis.benefit.sites.items() if not math.isnan(item[1].value)]
    found = sorted(known, key=lambda item: -abs(item[1].value))[:_ROWS]
    rows = [*found, ("weight decay", diagnosis.benefit.weight_decay)]
    _bars(axes, [name for name, _ in rows], [value for _, value in rows])
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"loss after {diagnosis.benefit.steps} steps without it, minus with it")


def _curve(diagnosis: Diagnosis, axes: Any) -> None:
    curve = diagnosis.explicit.curve
    p = [point.p for point in curve]
    r_drop = [point.parts.r_drop for point in curve]
    half = [point.parts.half_quadratic.value for point in curve]
    both = [h + point.parts.curvature.value for h, point in zip(half, curve, strict=True)]
    lines = {"R_drop": [e.value for e in r_drop], "½E[uᵀHu]": half, "second order": both}
    for place, (label, values) in enumerate(lines.items()):
        errors = _errors(r_drop) if label == "R_drop" else None
        axes.errorbar(p, values, yerr=errors, label=label, **_line(place))
    axes.axvline(max(site.p for site in diagnosis.sites), color="0.5", linewidth=1.0)
    if all(value > 0.0 for values in lines.values() for value in values):
        _log_scale(axes, "y")
    axes.set(xlabel="largest p (all p scaled alike; the line is the model's own)", ylabel="loss")
    axes.legend()


def _log_scale(axes: Any, which: str) -> None:
    """A logarithmic axis with as many labels as it has room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0.0 else math.inf
    marks = (1, 2, 3, 5, 7) if decades < 0.7 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _line(place: int) -> dict[str, Any]:
    return {**line_style(place), "color": "black", "markerfacecolor": "white", "capsize": 3}


def _classes(diagnosis: Diagnosis, axes: Any) -> None:
    classes = diagnosis.explicit.classes
    _bars(axes, [c.name for c in classes], [c.share for c in classes], 100.0)
    weights = [100.0 * c.weight for c in classes]
    style = {"linestyle": "none", "marker": "D", "color": "black", "markerfacecolor": "white"}
    axes.plot(weights, range(len(classes)), label="% of p(1-p)", **style)
    axes.set_xlabel("% of uᵀHu")
    axes.legend()


def _groups(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    groups = sorted(
        diagnosis.implicit.groups.items(), key=lambda item: -item[1].trace_dropout.value
    )[:_ROWS]
    kinds = {
        "dropout": [group.trace_dropout for _, group in groups],
        "ξ_approx": [group.trace_analytic for _, group in groups],
        "mini-batching": [group.trace_batch or Estimate(0.0, None) for _, group in groups],
    }
    height = 0.8 / len(kinds)
    for place, (label, found) in enumerate(kinds.items()):
        rows = [row + (place - 1) * height for row in range(len(groups))]
        values = [e.value for e in found]
        axes.barh(rows, values, height=height, xerr=_errors(found), label=label, **bar_style(place))
    axes.set_yticks(range(len(groups)), [literal(name) for name, _ in groups])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if any(group.trace_dropout.value > 0.0 for _, group in groups):
        _log_scale(axes, "x")
    axes.set_xlabel("trace of the gradient's covariance")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(kinds))


def _shrinking(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    points = diagnosis.implicit.shrinking
    ks = [point.k for point in points]
    kinds = {"dropout": [p.dropout for p in points], "ξ_approx": [p.analytic for p in points]}
    for place, (label, found) in enumerate(kinds.items()):
        values = [e.value / k for e, k in zip(found, ks, strict=True)]
        errors = [(e.stderr or 0.0) / k for e, k in zip(found, ks, strict=True)]
        axes.errorbar(ks, values, yerr=errors, label=label, **_line(place))
    first = points[0].dropout.value
    axes.plot(ks, [first / k for k in ks], color="0.6", linewidth=3.0, zorder=0, label="1/k")
    axes.set_xscale("log", base=2)
    if first > 0.0:
        _log_scale(axes, "y")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="trace")
    axes.legend()


def write(diagnosis: Diagnosis, path: Path) -> None:
    """Write the HTML page atomically."""
    pictures = [
        html.figure(picture(diagnosis, title, panel), title)
        for title, panel in panels(diagnosis).items()
    ]
    text = html.page(
        f"What dropout does in {diagnosis.model}",
        *_summary(diagnosis),
        html.heading("In pictures"),
        '<div class="figures">' + "\n".join(pictures) + "</div>",
        *_tables(diagnosis),
        html.heading("How it was measured"),
        html.bullets(diagnosis.notes),
        diagnosis.glossary().html(),
        diagnosis.origin().html(),
    )
    html.write(path, text)


def notebook(diagnosis: Diagnosis) -> str:
    """The conclusion and the tables for a notebook's output cell."""
    return html.fragment(*_summary(diagnosis), *_tables(diagnosis))


def _summary(diagnosis: Diagnosis) -> list[str]:
    return [
        html.callout("Conclusion", html.paragraph(diagnosis.conclusion)),
        html.heading("What to do"),
        html.bullets(diagnosis.advice),
    ]


def _tables(diagnosis: Diagnosis) -> list[str]:
    """Return the tables; the rows of wide ones become cards on a narrow screen."""
    return [table.html("cards" if len(table.headers) > 3 else "") for table in diagnosis.tables()]
