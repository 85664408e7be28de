"""Checks of arguments; every error names the field, the value and the range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from undrop.errors import OptionError


def as_float(value: Any) -> float:
    """Return ``value`` as a float, or NaN, which fails every range check, if it is not a number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return math.nan


def check_int(field: str, value: int, *, least: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{field} must be a whole number of at least {least}, got {value!r}.")
    return value


def check_not_negative(field: str, value: float) -> float:
    """Return ``value`` if it is finite and not negative."""
    if not 0.0 <= as_float(value) < math.inf:
        raise OptionError(f"{field} must be finite and not negative, got {value!r}.")
    return value


def check_probability(field: str, value: float) -> float:
    """Return ``value`` if it is a drop probability."""
    if not 0.0 <= value < 1.0:
        raise OptionError(f"{field} must lie in [0, 1), got {value!r}.")
    return float(value)


def check_sizes(field: str, values: Sequence[int], *, least: int) -> tuple[int, ...]:
    """Return ``values`` if they are ``least`` or more positive whole numbers."""
    if len(values) < least:
        raise OptionError(f"{field} must name at least {least} sizes, got {list(values)}.")
    return tuple(check_int(f"{field}[{i}]", value) for i, value in enumerate(values))


def check_increasing(field: str, values: Sequence[int], *, below: int) -> tuple[int, ...]:
    """Return ``values`` if 0 < values[0] < values[1] < … < below."""
    bounds = (0, *values, below)
    if not all(isinstance(v, int) for v in bounds) or any(a >= b for a, b in pairwise(bounds)):
        raise OptionError(
            f"{field} must be strictly increasing whole numbers from 1 to {below - 1}, "
            f"got {list(values)}."
        )
    return tuple(values)
