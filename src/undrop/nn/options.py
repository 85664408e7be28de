"""Checks of constructor arguments: the field, the value, the range."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from undrop.errors import OptionError
from undrop.options import whole

__all__ = ["increasing", "probability", "sizes", "whole"]


def probability(field: str, value: float) -> float:
    """``value``, if it is a drop probability."""
    if not 0.0 <= value < 1.0:
        raise OptionError(f"{field} must lie in [0, 1), got {value!r}.")
    return float(value)


def sizes(field: str, values: Sequence[int], *, least: int) -> tuple[int, ...]:
    """``values``, if they are at least ``least`` positive whole numbers."""
    if len(values) < least:
        raise OptionError(f"{field} must name at least {least} sizes, got {list(values)}.")
    return tuple(whole(f"{field}[{i}]", value) for i, value in enumerate(values))


def increasing(field: str, values: Sequence[int], *, below: int) -> tuple[int, ...]:
    """``values``, if 0 < values[0] < values[1] < … < below."""
    bounds = (0, *values, below)
    if not all(isinstance(v, int) for v in bounds) or any(a >= b for a, b in pairwise(bounds)):
        raise OptionError(
            f"{field} must be whole numbers that rise strictly within 1 … {below - 1}, "
            f"got {list(values)}."
        )
    return tuple(values)
