"""How well ½E[uᵀHu] describes dropout: the one rule of a diagnosis and of a check.

A ratio is judged by its 95 % interval, and R and 1/R are judged alike.
"""

from __future__ import annotations

from undrop.diagnosis.measure.estimates import Estimate

GOOD = 0.8
"""A ratio from here to 1/GOOD is good."""
ROUGH = 0.5
"""A ratio from here to 1/ROUGH is right in the order of magnitude, at least."""


def verdict(ratio: Estimate) -> str:
    """Return "good", "rough", "poor", or "unclear" if the interval is too wide or unknown.

    Args:
        ratio: ½E[uᵀHu] / R_drop.
    """
    if is_within(ratio, GOOD):
        return "good"
    if is_within(ratio, ROUGH):
        return "rough"
    return "poor" if is_outside(ratio, ROUGH) else "unclear"


def is_within(ratio: Estimate, limit: float) -> bool:
    """Return whether the whole interval of a ratio lies between ``limit`` and its inverse."""
    return ratio.low >= limit and ratio.high <= 1.0 / limit


def is_outside(ratio: Estimate, limit: float) -> bool:
    """Return whether the whole interval of a ratio lies outside of ``limit`` and its inverse."""
    return ratio.high < limit or ratio.low > 1.0 / limit
