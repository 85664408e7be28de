"""The verdict on how well ½E[uᵀHu] describes dropout, for a diagnosis and for a check.

The verdict depends on the 95 % interval of the ratio R, and is the same for R and 1/R.
"""

from __future__ import annotations

from undrop.diagnosis.measure.estimates import Estimate

GOOD = 0.8
"""A ratio from here to 1/GOOD is good."""
ROUGH = 0.5
"""A ratio from here to 1/ROUGH has at least the right order of magnitude."""


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
