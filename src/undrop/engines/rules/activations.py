"""GELU and SiLU by kernel: torch's rules are right and slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.dual import packed, read, unpacked
from undrop.kernels.pointwise import GELU, GELU_TANH, SILU, Activation, pointwise
from undrop.sites import Handler, Interception

__all__ = ["RULES"]


def _activated(activation: Activation, x: Tensor) -> Tensor:
    x, tangent = unpacked(x)
    if tangent is None:
        return activation.f(x)
    return packed(*pointwise(activation, x, tangent))


def _gelu(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = read(("input",), args, kwargs)
    tanh = given.get("approximate", "none") == "tanh"
    return _activated(GELU_TANH if tanh else GELU, given["input"])


def _silu(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = read(("input", "inplace"), args, kwargs)
    out = _activated(SILU, given["input"])
    return given["input"].copy_(out) if given.get("inplace") else out


RULES: Mapping[Callable[..., Any], Handler] = {F.gelu: _gelu, F.silu: _silu}
