"""Checks of arguments that every part of undrop makes."""

from __future__ import annotations

import math
from typing import Any

from undrop.errors import OptionError

__all__ = ["number", "whole"]


def number(value: Any) -> float:
    """``value`` as a float; NaN, which lies in no range, for what is not a number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is a tensor's, of several numbers
        return math.nan


def whole(field: str, value: int, *, least: int = 1) -> int:
    """``value``, if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{field} must be a whole number of at least {least}, got {value!r}.")
    return value
