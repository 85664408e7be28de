"""Results as pandas DataFrames, where pandas is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.explicit import Explicit
from undrop.errors import UndropError

__all__ = ["frame", "site_frame"]


def frame(figures: Mapping[str, Estimate], **columns: Mapping[str, Any]) -> Any:
    """A DataFrame with one row per figure: value, stderr, low, high, and further columns by name.

    Raises:
        UndropError: if pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise UndropError(
            "to_frame() needs pandas: pip install pandas, or use to_json()."
        ) from error
    rows = {
        name: {**{head: cells.get(name) for head, cells in columns.items()}, **figure._asdict()}
        for name, figure in figures.items()
    }
    return pandas.DataFrame.from_dict(rows, orient="index")


def site_frame(explicit: Explicit, benefit: Benefit | None) -> Any:
    """One row per site: p, kind, and the value and standard error of its figures."""
    shares = {name: effect.share for name, effect in explicit.sites.items()}
    columns: dict[str, dict[str, Any]] = {
        "p": {name: effect.p for name, effect in explicit.sites.items()},
        "kind": {name: effect.kind for name, effect in explicit.sites.items()},
        "r_drop_alone": {n: effect.parts.r_drop.value for n, effect in explicit.sites.items()},
        "half_quadratic": {
            n: effect.parts.half_quadratic.value for n, effect in explicit.sites.items()
        },
    }
    if benefit is not None:
        columns["benefit"] = {name: found.value for name, found in benefit.sites.items()}
        columns["benefit_stderr"] = {name: found.stderr for name, found in benefit.sites.items()}
    found = frame(shares, **columns)
    names = ("value", "stderr", "low", "high")
    return found.rename(columns={n: f"share_{n}".removesuffix("_value") for n in names})
