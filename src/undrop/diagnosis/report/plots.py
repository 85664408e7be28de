"""Draw the plots of a diagnosis, readable without color, and write its HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.r_drop import PART_LABELS
from undrop.report import html
from undrop.report.figures import bar_style, line_style, literal, new_figure, save, styled
from undrop.report.figures import svg as as_svg

if TYPE_CHECKING:
    from undrop.diagnosis.report.result import Diagnosis


_MAX_BARS = 12  # in a panel
_MAX_TICKS = 4  # below bars, because the labels may be long

Panel = Callable[["Diagnosis", Any], None]
"""Draws one panel of a diagnosis into matplotlib axes."""


def panels(diagnosis: Diagnosis) -> dict[str, Panel]:
    """Return the panels of a diagnosis by title."""
    by_title: dict[str, Panel] = {
        "R_drop and its parts": _draw_parts,
        "Share of ½E[uᵀHu] by site": _draw_shares,
    }
    if diagnosis.benefit is not None:
        by_title["Benefit by site (right of 0 helps)"] = _draw_benefit
    by_title["Where second order breaks down"] = _draw_curve
    if diagnosis.explicit.classes:
        by_title["Classes that carry uᵀHu"] = _draw_classes
    if diagnosis.implicit is not None:
        by_title["Gradient noise by part of the model"] = _draw_groups
        by_title["Noise of the mean of k samples"] = _draw_shrinking
    return by_title


def draw_all(diagnosis: Diagnosis, path: Path) -> None:
    """Draw all panels into one picture, in two columns.

    Raises:
        OptionError: if the suffix is not a picture format.
    """
    by_title = panels(diagnosis)
    rows = math.ceil(len(by_title) / 2)
    figure = new_figure(12.8, 3.8 * rows)
    with styled():
        for number, (title, panel) in enumerate(by_title.items(), start=1):
            axes = figure.add_subplot(rows, 2, number)
            panel(diagnosis, axes)
            axes.set_title(title)
        figure.suptitle(f"What dropout does in {literal(diagnosis.model)}")
    save(figure, path)


def _panel_svg(diagnosis: Diagnosis, title: str, panel: Panel) -> str:
    """Return one panel as an ``<svg>`` element."""
    figure = new_figure(5.6, 3.5)  # small enough for a phone
    with styled():
        panel(diagnosis, figure.add_subplot())
    return as_svg(figure, f"{title}; the tables below have the numbers")


def _errors(estimates: Sequence[Estimate], scale: float = 1.0) -> list[float]:
    return [scale * (e.stderr or 0.0) for e in estimates]


def _bars(axes: Any, names: Sequence[str], values: Sequence[Estimate], scale: float = 1.0) -> None:
    """Draw horizontal bars with error bars, the first at the top."""
    rows = range(len(names))
    widths = [scale * e.value for e in values]
    axes.barh(rows, widths, xerr=_errors(values, scale), **bar_style(1))
    axes.set_yticks(rows, [literal(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=_MAX_TICKS)


def _draw_parts(diagnosis: Diagnosis, axes: Any) -> None:
    for row, part in enumerate(diagnosis.explicit.parts):
        axes.barh(row, part.value, xerr=part.stderr or 0.0, **bar_style(row))
    axes.set_yticks(range(len(PART_LABELS)), PART_LABELS)
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.locator_params(axis="x", nbins=_MAX_TICKS)
    axes.set_xlabel("loss")


def _draw_shares(diagnosis: Diagnosis, axes: Any) -> None:
    effects = sorted(diagnosis.explicit.sites.items(), key=lambda item: -item[1].share.value)
    shown = effects[:_MAX_BARS]
    names = [f"{name} (p = {effect.p:.3g})" for name, effect in shown]
    _bars(axes, names, [effect.share for _, effect in shown], 100.0)
    more = f" (the first {_MAX_BARS} of {len(effects)} sites)" if len(effects) > _MAX_BARS else ""
    axes.set_xlabel(f"% of ½E[uᵀHu]{more}")


def _draw_benefit(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.benefit is not None
    measured = [item for item in diagnosis.benefit.sites.items() if not math.isnan(item[1].value)]
    largest = sorted(measured, key=lambda item: -abs(item[1].value))[:_MAX_BARS]
    rows = [*largest, ("weight decay", diagnosis.benefit.weight_decay)]
    _bars(axes, [name for name, _ in rows], [value for _, value in rows])
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"loss after {diagnosis.benefit.steps} steps without it, minus with it")


def _draw_curve(diagnosis: Diagnosis, axes: Any) -> None:
    curve = diagnosis.explicit.curve
    parts = [point.parts for point in curve]
    lines = {
        "R_drop": [p.r_drop.value for p in parts],
        "½E[uᵀHu]": [p.half_quadratic.value for p in parts],
        "second order": [p.half_quadratic.value + p.curvature.value for p in parts],
    }
    for number, (label, values) in enumerate(lines.items()):
        errors = _errors([p.r_drop for p in parts]) if label == "R_drop" else None
        style = {"yerr": errors, "label": label, **_errorbar_style(number)}
        axes.errorbar([point.p for point in curve], values, **style)
    axes.axvline(max(site.p for site in diagnosis.sites), color="0.5", linewidth=1.0)
    if all(value > 0.0 for values in lines.values() for value in values):
        _log_scale(axes, "y")
    axes.set(xlabel="largest p, if every p is scaled (line: the model's p)", ylabel="loss")
    axes.legend()


def _log_scale(axes: Any, name: str) -> None:
    """Make the axis "x" or "y" logarithmic, with as many labels as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0.0 else math.inf
    marks = (1, 2, 3, 5, 7) if decades < 0.7 else (1, 2, 5) if decades < 2.5 else (1,)
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _errorbar_style(number: int) -> dict[str, Any]:
    return {**line_style(number), "color": "black", "markerfacecolor": "white", "capsize": 3}


def _draw_classes(diagnosis: Diagnosis, axes: Any) -> None:
    classes = diagnosis.explicit.classes
    _bars(axes, [c.name for c in classes], [c.share for c in classes], 100.0)
    weights = [100.0 * c.weight for c in classes]
    style = {"linestyle": "none", "marker": "D", "color": "black", "markerfacecolor": "white"}
    axes.plot(weights, range(len(classes)), label="% of p(1-p)", **style)
    axes.set_xlabel("% of uᵀHu")
    axes.legend()


def _draw_groups(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    by_name = diagnosis.implicit.groups
    names = sorted(by_name, key=lambda name: -by_name[name].trace_dropout.value)[:_MAX_BARS]
    groups = [by_name[name] for name in names]
    kinds = {
        "dropout": [group.trace_dropout for group in groups],
        "ξ_approx": [group.trace_analytic for group in groups],
        "mini-batching": [group.trace_batch or Estimate(0.0, None) for group in groups],
    }
    height = 0.8 / len(kinds)
    for number, (label, traces) in enumerate(kinds.items()):
        rows = [row + (number - 1) * height for row in range(len(groups))]
        style = {"xerr": _errors(traces), "label": label, **bar_style(number)}
        axes.barh(rows, [e.value for e in traces], height=height, **style)
    axes.set_yticks(range(len(groups)), [literal(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if any(group.trace_dropout.value > 0.0 for group in groups):
        _log_scale(axes, "x")
    axes.set_xlabel("trace of the gradient's covariance")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(kinds))


def _draw_shrinking(diagnosis: Diagnosis, axes: Any) -> None:
    assert diagnosis.implicit is not None
    points = diagnosis.implicit.shrinking
    ks = [point.k for point in points]
    kinds = {"dropout": [p.dropout for p in points], "ξ_approx": [p.analytic for p in points]}
    for number, (label, estimates) in enumerate(kinds.items()):
        traces = [e.scaled(1.0 / k) for e, k in zip(estimates, ks, strict=True)]
        style = {"yerr": _errors(traces), "label": label, **_errorbar_style(number)}
        axes.errorbar(ks, [e.value for e in traces], **style)
    first = points[0].dropout.value
    axes.plot(ks, [first / k for k in ks], color="0.6", linewidth=3.0, zorder=0, label="1/k")
    axes.set_xscale("log", base=2)
    if first > 0.0:
        _log_scale(axes, "y")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="k", ylabel="trace")
    axes.legend()


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write the HTML page atomically."""
    pictures = [
        html.figure(_panel_svg(diagnosis, title, panel), title)
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


def notebook_html(diagnosis: Diagnosis) -> str:
    """Return the conclusion, the tables and the symbols for a notebook's output cell."""
    return html.fragment(*_summary(diagnosis), *_tables(diagnosis), diagnosis.glossary().html())


def _summary(diagnosis: Diagnosis) -> list[str]:
    from undrop.diagnosis.report.result import SYMBOLS_NOTE

    return [
        html.callout("Conclusion", html.paragraph(diagnosis.conclusion)),
        html.heading("What to do"),
        html.bullets(diagnosis.advice),
        html.paragraph(SYMBOLS_NOTE),
    ]


def _tables(diagnosis: Diagnosis) -> list[str]:
    """Return the tables; the rows of wide ones become cards on a narrow screen."""
    return [table.html("cards" if len(table.headers) > 3 else "") for table in diagnosis.tables()]
