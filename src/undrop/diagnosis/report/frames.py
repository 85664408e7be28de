"""The figures of a diagnosis as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.explicit import Explicit
from undrop.report.plain import as_frame


def figure_frame(figures: Mapping[str, Estimate]) -> Any:
    """One row per figure: value, stderr, low and high."""
    return as_frame([figure._asdict() for figure in figures.values()], list(figures))


def site_frame(explicit: Explicit, benefit: Benefit | None) -> Any:
    """One row per site: p, kind, and the value and standard error of its figures."""
    rows = []
    for name, effect in explicit.sites.items():
        row: dict[str, Any] = {"p": effect.p, "kind": effect.kind}
        figures = {
            "share": effect.share,
            "r_drop_alone": effect.parts.r_drop,
            "half_quadratic": effect.parts.half_quadratic,
        }
        if benefit is not None:
            figures["benefit"] = benefit.sites[name]
        for key, figure in figures.items():
            row |= {key: figure.value, f"{key}_stderr": figure.stderr}
        rows.append(row)
    return as_frame(rows, list(explicit.sites))
