"""Results as pandas DataFrames, where pandas is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from undrop.errors import UndropError


def as_frame(rows: Iterable[Mapping[str, Any]], index: Sequence[Any]) -> Any:
    """Return a DataFrame with one row per mapping.

    Raises:
        UndropError: if pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise UndropError(
            "to_frame() needs pandas: pip install pandas, or use to_json()."
        ) from error
    return pandas.DataFrame(list(rows), index=list(index))
