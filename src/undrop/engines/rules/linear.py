"""The linear layer: no product with a tangent that is zero, and none for examples without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from undrop.engines.rules.dual import TangentField, has_tangent, packed, padded, read, unpacked
from undrop.intercept import Handler, Interception

__all__ = ["RULES"]


def _linear(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Y = xWᵀ + b and ẏ = ẋWᵀ + xẆᵀ, the latter for the carrying examples alone.

    Torch's own rule multiplies with a Ẇ of zeros, forth and back: a third more arithmetic a step.
    """
    field = mode.field
    given = read(("input", "weight", "bias"), args, kwargs)
    x, bias = given["input"], given.get("bias")
    if not isinstance(field, TangentField) or has_tangent(bias):
        return func(*args, **kwargs)
    whole, rows = field.whole(x), field.carrying(x)
    (x, dx), (weight, dweight) = unpacked(x), unpacked(given["weight"])
    y = F.linear(x, weight, bias)
    products = [
        F.linear(a if whole else a.narrow(field.dim, 0, rows), b)
        for a, b in ((dx, weight), (x, dweight))
        if a is not None and b is not None
    ]
    tangent = sum(products[1:], products[0]) if products else None
    return packed(y, tangent if whole else padded(tangent, y, field.dim))


RULES: Mapping[Callable[..., Any], Handler] = {F.linear: _linear}
