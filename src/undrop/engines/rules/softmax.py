"""Softmax and its kin: torch's forward-mode rules for them raise in the reverse pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.dual import packed, read, unpacked
from undrop.intercept import Handler, Interception

__all__ = ["RULES", "softmax"]

_NAMES = ("input", "dim")


def _applied(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None, int]:
    """What the function makes of the primal, the tangent in its type, and the dimension it is along."""
    given = read(_NAMES, args[:2], kwargs)
    x, tangent = unpacked(given.pop("input"))
    out: Tensor = func(x, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    dim = given.get("dim")
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1  # torch's own choice, which it warns of
    return out, None if tangent is None else tangent.to(out.dtype), dim


def softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """ṗ = p(ẋ - Σ p ẋ)."""
    p, tangent, dim = _applied(func, args, kwargs)
    if tangent is None:
        return p
    px = p * tangent
    return packed(p, torch.addcmul(px, p, px.sum(dim, keepdim=True), value=-1.0))


def _log_softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The tangent of log p is ẋ - Σ p ẋ."""
    log_p, tangent, dim = _applied(func, args, kwargs)
    if tangent is None:
        return log_p
    return packed(log_p, tangent - (log_p.exp() * tangent).sum(dim, keepdim=True))


def _logsumexp(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The tangent of log Σ exp x is Σ softmax(x) ẋ."""
    given = read((*_NAMES, "keepdim"), args, kwargs)
    x, tangent = unpacked(given["input"])
    dim, keepdim = given["dim"], given.get("keepdim", False)
    out = torch.logsumexp(x, dim, keepdim=keepdim)
    if tangent is None:
        return out
    p = (x - torch.logsumexp(x, dim, keepdim=True)).exp()
    return packed(out, (p * tangent).sum(dim, keepdim=keepdim))


RULES: Mapping[Callable[..., Any], Handler] = {
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), _log_softmax),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), _logsumexp),
}
