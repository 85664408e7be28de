"""Softmax and its kin: torch's forward-mode rules for them raise in the reverse pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.dual import packed, read, unpacked
from undrop.sites import Handler, Interception

__all__ = ["RULES", "softmax"]

_NAMES = ("input", "dim")


def softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """ṗ = p(ẋ - Σ p ẋ)."""
    given = read(_NAMES, args[:2], kwargs)
    x, tangent = unpacked(given.pop("input"))
    p: Tensor = func(x, given["dim"], *args[2:], **{k: v for k, v in given.items() if k != "dim"})
    if tangent is None:
        return p
    px = p * tangent.to(p.dtype)
    return packed(p, torch.addcmul(px, p, px.sum(given["dim"], keepdim=True), value=-1.0))


def _log_softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The tangent of log p is ẋ - Σ p ẋ."""
    given = read(_NAMES, args[:2], kwargs)
    x, tangent = unpacked(given.pop("input"))
    dim = given.pop("dim")
    log_p: Tensor = func(x, dim, *args[2:], **given)
    if tangent is None:
        return log_p
    tangent = tangent.to(log_p.dtype)
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
