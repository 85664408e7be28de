"""The check of an argument that every part of undrop makes."""

from __future__ import annotations

from undrop.errors import OptionError

__all__ = ["whole"]


def whole(field: str, value: int, *, least: int = 1) -> int:
    """``value``, if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{field} must be a whole number of at least {least}, got {value!r}.")
    return value
