"""Convert results to values for JSON, or to a pandas DataFrame."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from undrop.errors import UndropError


def as_json(value: Any) -> Any:
    """Return a value as dicts, lists, strings and finite numbers.

    A dataclass or a named tuple becomes a dict of its fields. An object with a ``to_json`` method
    becomes the result of that method. JSON has no infinity and no NaN: they become None.

    >>> as_json({"best": Path("runs/a"), "loss": float("nan")})
    {'best': 'runs/a', 'loss': None}
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays
        return as_json(value.tolist())
    if isinstance(value, Iterable):
        return [as_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} can't be converted to JSON: give it a to_json method.")


def as_frame(rows: Iterable[Mapping[str, Any]], index: Sequence[Any]) -> Any:
    """Return a DataFrame with one row per mapping.

    Raises:
        UndropError: if pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        message = "to_frame() needs pandas: pip install pandas, or use to_json()."
        raise UndropError(message) from error
    return pandas.DataFrame(list(rows), index=list(index))
