"""Kinked functions in a stacked pass: both signs take the branch of their midpoint.

A unit that changes sign between +ε₀ and -ε₀ adds O(1/ε₀) to the gradient of u = (F₊ - F₋)/2ε₀ with
probability O(ε₀): the gradient is biased, and a smaller ε₀ makes it worse. A stacked pass has both
signs in one tensor, so a rule can decide at the midpoint m = (x₊ + x₋)/2, e.g.
``relu(x±) = x± · 1[m > 0]``. Then u is f'(m)·(x₊ - x₋)/2ε₀, as the tangent engine has it.

Every rule takes its decision at ``mode.midpoint(x)``: x with m in the place of x₊ and x₋. To add a
rule, register it: ``@MIDPOINT_RULES.register(function)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept import Rule
from undrop.registry import Registry

MIDPOINT_RULES: Registry[Callable[..., Any], Rule] = Registry("midpoint rule")
"""The functions with kinks, and what a stacked pass computes in their place."""


class HasMidpoint(Protocol):
    """A stacked pass."""

    def midpoint(self, x: Tensor) -> Tensor:
        """Return x, without a graph, with (x₊ + x₋)/2 in the place of x₊ and x₋."""
        ...


def _written(x: Tensor, y: Tensor, inplace: bool) -> Tensor:
    return x.copy_(y) if inplace else y


# torch's backward functions of ReLU and leaky ReLU are g ↦ f'(m)·g: one kernel, linear in g.


@MIDPOINT_RULES.register(F.relu)
def _relu(mode: HasMidpoint, input: Tensor, inplace: bool = False) -> Tensor:
    y = torch.ops.aten.threshold_backward(input, mode.midpoint(input), 0.0)
    return _written(input, y, inplace)


@MIDPOINT_RULES.register(torch.relu, Tensor.relu)
def _torch_relu(mode: HasMidpoint, input: Tensor) -> Tensor:
    return _relu(mode, input)


@MIDPOINT_RULES.register(torch.relu_, Tensor.relu_)
def _relu_(mode: HasMidpoint, input: Tensor) -> Tensor:
    return _relu(mode, input, inplace=True)


@MIDPOINT_RULES.register(F.leaky_relu)
def _leaky_relu(
    mode: HasMidpoint, input: Tensor, negative_slope: float = 0.01, inplace: bool = False
) -> Tensor:
    m = mode.midpoint(input)
    y = torch.ops.aten.leaky_relu_backward(input, m, negative_slope, False)
    return _written(input, y, inplace)


@MIDPOINT_RULES.register(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(mode: HasMidpoint, input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1 and input.dim() > 1:
        weight = weight.view(1, -1, *(1,) * (input.dim() - 2))
    return torch.where(mode.midpoint(input) > 0, input, weight * input)


@MIDPOINT_RULES.register(F.elu)
def _elu(mode: HasMidpoint, input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _written(input, _half_exponential(mode, input, 1.0, alpha, 1.0), inplace)


@MIDPOINT_RULES.register(F.celu, torch.celu)
def _celu(mode: HasMidpoint, input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _written(input, _half_exponential(mode, input, 1.0, alpha, 1.0 / alpha), inplace)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@MIDPOINT_RULES.register(F.selu, torch.selu)
def _selu(mode: HasMidpoint, input: Tensor, inplace: bool = False) -> Tensor:
    y = _half_exponential(mode, input, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA, 1.0)
    return _written(input, y, inplace)


def _half_exponential(
    mode: HasMidpoint, x: Tensor, slope: float, alpha: float, rate: float
) -> Tensor:
    """slope·x above 0 and alpha·(exp(rate·x) - 1) below, where the midpoint decides."""
    above = mode.midpoint(x) > 0
    low = alpha * torch.expm1(rate * torch.where(above, 0.0, x))  # no overflow in what is not used
    return torch.where(above, slope * x, low)


for _function, _rule in (
    (F.leaky_relu_, _leaky_relu),
    (F.elu_, _elu),
    (F.celu_, _celu),
    (F.selu_, _selu),
):
    MIDPOINT_RULES.register(_function)(partial(_rule, inplace=True))


def _bounded(x: Tensor, m: Tensor, low: Any, high: Any) -> Tensor:
    """Return x clamped to [low, high], where m decides which of the three it is."""
    y = x if low is None else torch.where(m < low, low, x)
    return y if high is None else torch.where(m > high, high, y)


@MIDPOINT_RULES.register(F.hardtanh)
def _hardtanh(
    mode: HasMidpoint,
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
) -> Tensor:
    return _written(input, _bounded(input, mode.midpoint(input), min_val, max_val), inplace)


@MIDPOINT_RULES.register(F.relu6)
def _relu6(mode: HasMidpoint, input: Tensor, inplace: bool = False) -> Tensor:
    return _hardtanh(mode, input, 0.0, 6.0, inplace)


@MIDPOINT_RULES.register(F.hardsigmoid)
def _hardsigmoid(mode: HasMidpoint, input: Tensor, inplace: bool = False) -> Tensor:
    y = _bounded(input / 6 + 0.5, mode.midpoint(input) / 6 + 0.5, 0.0, 1.0)
    return _written(input, y, inplace)


@MIDPOINT_RULES.register(F.hardswish)
def _hardswish(mode: HasMidpoint, input: Tensor, inplace: bool = False) -> Tensor:
    return _written(input, input * _hardsigmoid(mode, input), inplace)


@MIDPOINT_RULES.register(F.threshold)
def _threshold(
    mode: HasMidpoint, input: Tensor, threshold: float, value: float, inplace: bool = False
) -> Tensor:
    return _written(input, torch.where(mode.midpoint(input) > threshold, input, value), inplace)


MIDPOINT_RULES.register(getattr(F, "threshold_"))(  # noqa: B009 (torch's stubs lack it)
    partial(_threshold, inplace=True)
)
MIDPOINT_RULES.register(torch.threshold)(_threshold)


@MIDPOINT_RULES.register(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)
def _clamp(mode: HasMidpoint, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return _bounded(input, mode.midpoint(input), min, max)


@MIDPOINT_RULES.register(torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_)
def _clamp_(mode: HasMidpoint, input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return _written(input, _clamp(mode, input, min, max), True)


@MIDPOINT_RULES.register(torch.clamp_min, Tensor.clamp_min)
def _clamp_min(mode: HasMidpoint, input: Tensor, min: Any) -> Tensor:
    return _bounded(input, mode.midpoint(input), min, None)


@MIDPOINT_RULES.register(torch.clamp_max, Tensor.clamp_max)
def _clamp_max(mode: HasMidpoint, input: Tensor, max: Any) -> Tensor:
    return _bounded(input, mode.midpoint(input), None, max)


@MIDPOINT_RULES.register(F.softshrink)
def _softshrink(mode: HasMidpoint, input: Tensor, lambd: float = 0.5) -> Tensor:
    m = mode.midpoint(input)
    return torch.where(m.abs() > lambd, input - lambd * m.sign(), 0.0)


@MIDPOINT_RULES.register(F.hardshrink, torch.hardshrink, Tensor.hardshrink)
def _hardshrink(mode: HasMidpoint, input: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(mode.midpoint(input).abs() > lambd, input, 0.0)


@MIDPOINT_RULES.register(torch.abs, Tensor.abs, Tensor.__abs__)
def _abs(mode: HasMidpoint, input: Tensor) -> Tensor:
    if input.is_complex():
        return torch.abs(input)
    return input * mode.midpoint(input).sign()


def _decided(function: Callable[..., Any], mode: HasMidpoint, *args: Any, **kwargs: Any) -> Any:
    """A function whose result is a decision: take it at the midpoint, for both signs alike."""
    args = tuple(mode.midpoint(a) if _floating(a) else a for a in args)
    kwargs = {k: mode.midpoint(v) if _floating(v) else v for k, v in kwargs.items()}
    return function(*args, **kwargs)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


for _name in ("gt", "ge", "lt", "le", "eq", "ne", "sign", "sgn", "argmax", "argmin", "argsort"):
    for _owner in (torch, Tensor):
        MIDPOINT_RULES.register(getattr(_owner, _name))(partial(_decided, getattr(_owner, _name)))
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    _operator = getattr(Tensor, f"__{_name}__")
    if _operator not in MIDPOINT_RULES:
        MIDPOINT_RULES.register(_operator)(partial(_decided, _operator))
for _name in ("round", "floor", "ceil", "trunc"):
    for _owner in (torch, Tensor):
        MIDPOINT_RULES.register(getattr(_owner, _name))(partial(_decided, getattr(_owner, _name)))


def _larger(smaller: bool, mode: HasMidpoint, input: Tensor, other: Tensor) -> Tensor:
    a, b = (mode.midpoint(x) if _floating(x) else x for x in (input, other))
    return torch.where(a <= b if smaller else a >= b, input, other)


for _owner in (torch, Tensor):
    MIDPOINT_RULES.register(_owner.maximum, _owner.fmax)(partial(_larger, False))
    MIDPOINT_RULES.register(_owner.minimum, _owner.fmin)(partial(_larger, True))


def _chosen(
    function: Callable[..., Any], mode: HasMidpoint, input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """max, min, sort, topk, … along a dimension: the midpoint chooses the entries."""
    if not input.is_floating_point():
        return function(input, *args, **kwargs)
    found = function(mode.midpoint(input), *args, **kwargs)
    if isinstance(found, Tensor):  # over all entries: one number for the whole batch
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return _larger(function in (torch.min, Tensor.min), mode, input, other)
        return function(input, *args, **kwargs)
    _, indices = found
    dim = kwargs.get("dim", _position(function, args))
    keep = indices if indices.dim() == input.dim() else indices.unsqueeze(dim)
    gathered = input.gather(dim, keep)
    gathered = gathered if keep is indices else gathered.squeeze(dim)
    return type(found)((gathered, indices))


def _position(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return the dimension among the positional arguments: topk and kthvalue have k before it."""
    place = 1 if function.__name__ in ("topk", "kthvalue") else 0
    return int(args[place]) if len(args) > place else -1


for _name in ("max", "min", "sort", "topk", "kthvalue", "cummax", "cummin", "median", "nanmedian"):
    for _owner in (torch, Tensor):
        MIDPOINT_RULES.register(getattr(_owner, _name))(partial(_chosen, getattr(_owner, _name)))


def _extreme(
    smallest: bool, mode: HasMidpoint, input: Tensor, dim: Any = (), keepdim: bool = False
) -> Tensor:
    """amax and amin: the midpoint chooses the entry."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
    dims = sorted(d % input.dim() for d in dims)
    kept = [d for d in range(input.dim()) if d not in dims]
    flat, m = (x.permute(*kept, *dims).flatten(len(kept)) for x in (input, mode.midpoint(input)))
    index = (m.argmin(-1) if smallest else m.argmax(-1)).unsqueeze(-1)
    out = flat.gather(-1, index).squeeze(-1)
    if keepdim:
        for d in dims:
            out = out.unsqueeze(d)
    return out


MIDPOINT_RULES.register(torch.amax, Tensor.amax)(partial(_extreme, False))
MIDPOINT_RULES.register(torch.amin, Tensor.amin)(partial(_extreme, True))


def _max_pool(
    function: Callable[..., Any],
    space: int,
    mode: HasMidpoint,
    input: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Max pooling: the midpoint chooses the entry of each window."""
    wanted = kwargs.pop("return_indices", False)
    _, indices = function(mode.midpoint(input), *args, **kwargs, return_indices=True)
    flat = input.flatten(-space).gather(-1, indices.flatten(-space))
    out = flat.view(indices.shape)
    return (out, indices) if wanted else out


for _space in (1, 2, 3):
    for _kind in ("max_pool", "adaptive_max_pool"):
        _function = getattr(F, f"{_kind}{_space}d")
        # F.max_pool2d dispatches to one of two functions, whichever the mode sees.
        _with_indices = getattr(F, f"{_kind}{_space}d_with_indices")
        _seen = {_function, getattr(torch, f"{_kind}{_space}d", _function)}
        for _each in _seen:
            MIDPOINT_RULES.register(_each)(partial(_max_pool, _function, _space))
        if _with_indices not in _seen:
            MIDPOINT_RULES.register(_with_indices)(
                partial(_max_pool, _function, _space, return_indices=True)
            )
