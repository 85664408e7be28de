"""Rules of our own for functions on which torch's forward mode is missing, wrong or slow.

A rule takes the dual numbers apart, computes the result and its tangent in ordinary differentiable
operations, and puts them together again; the reverse pass through that is ordinary too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.twice import TWICE_DIFFERENTIABLE
from undrop.sites import Handler, Interception
from undrop.sites.attention import AttentionCall, written_out

__all__ = ["TANGENT_RULES"]


def _dual(x: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward.unpack_dual(x)
    return primal, tangent


def _packed(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward.make_dual(primal, tangent)
    return dual


def _read(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """ṗ = p(ẋ - Σ p ẋ); torch's own rule raises in the reverse pass."""
    x, tangent = _dual(args[0] if args else kwargs.pop("input"))
    p: Tensor = func(x, *args[1:], **kwargs)
    if tangent is None:
        return p
    dim = kwargs["dim"] if "dim" in kwargs else args[1]
    px = p * tangent.to(p.dtype)
    return _packed(p, torch.addcmul(px, p, px.sum(dim, keepdim=True), value=-1.0))


def _log_softmax(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """D log p = ẋ - Σ p ẋ."""
    x, tangent = _dual(args[0] if args else kwargs.pop("input"))
    logp: Tensor = func(x, *args[1:], **kwargs)
    if tangent is None:
        return logp
    dim = kwargs["dim"] if "dim" in kwargs else args[1]
    mean = (logp.exp() * tangent).sum(dim, keepdim=True)
    return _packed(logp, tangent - mean)


def _logsumexp(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """D log Σ exp x = Σ softmax(x) ẋ."""
    given = _read(("input", "dim", "keepdim"), args, kwargs)
    x, tangent = _dual(given["input"])
    dim, keepdim = given["dim"], given.get("keepdim", False)
    out = torch.logsumexp(x, dim, keepdim=keepdim)
    if tangent is None:
        return out
    p = (x - torch.logsumexp(x, dim, keepdim=True)).exp()
    return _packed(out, (p * tangent).sum(dim, keepdim=keepdim))


def _attention(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Attention in matrix products, with the rule above for its softmax."""
    return written_out(
        mode,
        AttentionCall(*args, **kwargs),
        lambda x, dim: _softmax(mode, torch.softmax, (x, dim), {}),
    )


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """(x - mean)/sqrt(var + eps) over dims, in mean and variance arithmetic.

    On dual numbers each of these operations is right, where torch's rule for the whole gives a
    gradient that is silently wrong.
    """
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def _has_tangent(*tensors: Tensor | None) -> bool:
    return any(t is not None and forward.unpack_dual(t).tangent is not None for t in tensors)


def _layer_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = _read(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not _has_tangent(x, weight, bias):
        plain: Tensor = func(*args, **kwargs)
        return plain
    shape = given["normalized_shape"]
    size = 1 if isinstance(shape, int) else len(shape)
    out = _normalised(x, tuple(range(-size, 0)), given.get("eps", 1e-5))
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift by channel (dimension 1)."""
    shape = (1, -1, *(1,) * (out.dim() - 2))
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _move_statistics(func: Callable[..., Any], given: dict[str, Any]) -> None:
    """Let torch's own function run for its effect on the running statistics alone."""
    if given.get("running_mean") is not None:
        with torch.no_grad():
            func(**{**given, "input": _dual(given["input"])[0], "weight": None, "bias": None})


_BATCH_NORM = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)


def _batch_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = _read(_BATCH_NORM, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not given.get("training", False) or not _has_tangent(x, weight, bias):
        plain: Tensor = func(*args, **kwargs)
        return plain
    _move_statistics(func, given)
    dims = (0, *range(2, x.dim()))
    return _affine(_normalised(x, dims, given.get("eps", 1e-5)), weight, bias)


_INSTANCE_NORM = (*_BATCH_NORM[:5], "use_input_stats", "momentum", "eps")


def _instance_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = _read(_INSTANCE_NORM, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not given.get("use_input_stats", True) or not _has_tangent(x, weight, bias):
        plain: Tensor = func(*args, **kwargs)
        return plain
    _move_statistics(func, given)
    return _affine(_normalised(x, tuple(range(2, x.dim())), given.get("eps", 1e-5)), weight, bias)


TANGENT_RULES: Mapping[Callable[..., Any], Handler] = {
    **TWICE_DIFFERENTIABLE,
    F.scaled_dot_product_attention: _attention,
    F.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    Tensor.log_softmax: _log_softmax,
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
"""The functions that the tangent engine computes by rules of its own."""
