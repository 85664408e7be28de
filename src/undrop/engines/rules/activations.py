"""GELU and SiLU by kernel: torch's rules are right and slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from undrop.engines.rules.dual import packed, read, unpacked
from undrop.intercept import Handler, Interception
from undrop.kernels.pointwise import GELU, GELU_TANH, SILU, pointwise

__all__ = ["RULES"]


def _gelu(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = read(("input",), args, kwargs)
    x, tangent = unpacked(given["input"])
    if tangent is None:
        return func(*args, **kwargs)
    tanh = given.get("approximate", "none") == "tanh"
    return packed(*pointwise(GELU_TANH if tanh else GELU, x, tangent))


def _silu(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = read(("input", "inplace"), args, kwargs)
    x, tangent = unpacked(given["input"])
    if tangent is None:
        return func(*args, **kwargs)
    out = packed(*pointwise(SILU, x, tangent))
    return given["input"].copy_(out) if given.get("inplace") else out


RULES: Mapping[Callable[..., Any], Handler] = {F.gelu: _gelu, F.silu: _silu}
