"""Layer, batch and instance norm: torch's gradient through their tangents is silently wrong.

Layer norm over one dimension goes by a kernel; the others are written out in means and variances,
every operation of which is right on dual numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.dual import has_tangent, packed, read, unpacked
from undrop.intercept import Handler, Interception
from undrop.kernels.layer_norm import layer_norm

__all__ = ["RULES"]

_BATCH = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_INSTANCE = (*_BATCH[:5], "use_input_stats", "momentum", "eps")
_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_EPS = 1e-5  # torch's default


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """(x - mean)/sqrt(var + eps) over dims."""
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift by channel (dimension 1)."""
    shape = (1, -1, *(1,) * (out.dim() - 2))
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _move_statistics(func: Callable[..., Any], given: dict[str, Any]) -> None:
    """Let torch's own function run for its effect on the running statistics alone."""
    if given.get("running_mean") is not None:
        with torch.no_grad():
            func(**{**given, "input": unpacked(given["input"])[0], "weight": None, "bias": None})


def _layer_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = read(_LAYER, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not has_tangent(x, weight, bias):
        return func(*args, **kwargs)
    shape = given["normalized_shape"]
    size = 1 if isinstance(shape, int) else len(shape)
    eps = given.get("eps", _EPS)
    if size == 1 and not has_tangent(weight, bias):
        x, dx = unpacked(x)
        assert dx is not None
        return packed(*layer_norm(x, dx, weight, bias, eps))
    out = _normalised(x, tuple(range(-size, 0)), eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _batch_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = read(_BATCH, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not given.get("training", False) or not has_tangent(x, weight, bias):
        return func(*args, **kwargs)
    _move_statistics(func, given)
    out = _normalised(x, (0, *range(2, x.dim())), given.get("eps", _EPS))
    return _affine(out, weight, bias)


def _instance_norm(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = read(_INSTANCE, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    if not given.get("use_input_stats", True) or not has_tangent(x, weight, bias):
        return func(*args, **kwargs)
    _move_statistics(func, given)
    return _affine(_normalised(x, tuple(range(2, x.dim())), given.get("eps", _EPS)), weight, bias)


RULES: Mapping[Callable[..., Any], Handler] = {
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
