"""Functions with kinks in a stacked pass: the rows at +ε₀ and -ε₀ take the branch of their midpoint.

If a unit changes sign between +ε₀ and -ε₀, which has probability O(ε₀), it adds O(1/ε₀) to the gradient
of u = (F₊ - F₋)/2ε₀. So the gradient is biased, and a smaller ε₀ does not help. A stacked pass has both
rows in one tensor, so a rule can choose the branch at the midpoint m = (x₊ + x₋)/2, for example
``relu(x±) = x± · 1[m > 0]``. Then u is f'(m)·(x₊ - x₋)/2ε₀, as in the tangent engine.

Every rule reads ``mode.midpoint(x)``, which is x with m in place of x₊ and x₋. To add a rule, register
it: ``@MIDPOINT_RULES.register(function)``. Rules for functions of one tensor use ``_kinked``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept import Rule
from undrop.registry import Registry

if TYPE_CHECKING:
    from undrop.engines.stacked import StackedPass

Function: TypeAlias = Callable[..., Any]
MIDPOINT_RULES: Registry[Function, Rule] = Registry("midpoint rule")
"""Functions with kinks, and the rules that a stacked pass calls in their place."""


def _kinked(
    *functions: Function, in_place: tuple[Function, ...] = ()
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a rule that computes y from x, its midpoint m and the function's other arguments.

    The last argument of ``functions`` may be ``inplace``. The functions in ``in_place`` write to x.
    """

    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        others = compute.__code__.co_argcount - 2  # the number of arguments after x and m

        def rule(
            mode: StackedPass, input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any
        ) -> Tensor:
            inplace = args[others] if len(args) > others else inplace
            y = compute(input, mode.midpoint(input), *args[:others], **kwargs)
            return input.copy_(y) if inplace else y

        MIDPOINT_RULES.register(*functions)(rule)
        MIDPOINT_RULES.register(*in_place)(partial(rule, inplace=True))
        return compute

    return register


# torch's backward functions of ReLU and leaky ReLU are g ↦ f'(m)·g: one kernel, linear in g.


@_kinked(F.relu, torch.relu, Tensor.relu, in_place=(torch.relu_, Tensor.relu_))
def _relu(x: Tensor, m: Tensor) -> Tensor:
    y: Tensor = torch.ops.aten.threshold_backward(x, m, 0.0)
    return y


@_kinked(F.leaky_relu, in_place=(F.leaky_relu_,))
def _leaky_relu(x: Tensor, m: Tensor, negative_slope: float = 0.01) -> Tensor:
    y: Tensor = torch.ops.aten.leaky_relu_backward(x, m, negative_slope, False)
    return y


@_kinked(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(x: Tensor, m: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1 and x.dim() > 1:
        weight = weight.view(1, -1, *(1,) * (x.dim() - 2))
    return torch.where(m > 0, x, weight * x)


@_kinked(F.elu, in_place=(F.elu_,))
def _elu(x: Tensor, m: Tensor, alpha: float = 1.0) -> Tensor:
    return _half_exponential(x, m, 1.0, alpha, 1.0)


@_kinked(F.celu, torch.celu, in_place=(F.celu_,))
def _celu(x: Tensor, m: Tensor, alpha: float = 1.0) -> Tensor:
    return _half_exponential(x, m, 1.0, alpha, 1.0 / alpha)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@_kinked(F.selu, torch.selu, in_place=(F.selu_,))
def _selu(x: Tensor, m: Tensor) -> Tensor:
    return _half_exponential(x, m, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA, 1.0)


def _half_exponential(x: Tensor, m: Tensor, slope: float, alpha: float, rate: float) -> Tensor:
    """slope·x if the midpoint is above 0, else alpha·(exp(rate·x) - 1)."""
    above = m > 0
    low = alpha * torch.expm1(rate * torch.where(above, 0.0, x))  # no overflow in unused entries
    return torch.where(above, slope * x, low)


@_kinked(
    *(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, torch.clamp_min, Tensor.clamp_min),
    in_place=(torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_),
)
def _clamp(x: Tensor, m: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Clamp x to [min, max]; the midpoint decides between x, min and max."""
    y = x if min is None else torch.where(m < min, min, x)
    return y if max is None else torch.where(m > max, max, y)


@_kinked(torch.clamp_max, Tensor.clamp_max)
def _clamp_max(x: Tensor, m: Tensor, max: Any) -> Tensor:
    return _clamp(x, m, None, max)


@_kinked(F.hardtanh)
def _hardtanh(x: Tensor, m: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return _clamp(x, m, min_val, max_val)


@_kinked(F.relu6)
def _relu6(x: Tensor, m: Tensor) -> Tensor:
    return _clamp(x, m, 0.0, 6.0)


@_kinked(F.hardsigmoid)
def _hardsigmoid(x: Tensor, m: Tensor) -> Tensor:
    return _clamp(x / 6 + 0.5, m / 6 + 0.5, 0.0, 1.0)


@_kinked(F.hardswish)
def _hardswish(x: Tensor, m: Tensor) -> Tensor:
    return x * _hardsigmoid(x, m)


@_kinked(F.threshold, torch.threshold, in_place=(getattr(F, "threshold_"),))  # noqa: B009 (no stub)
def _threshold(x: Tensor, m: Tensor, threshold: float, value: float) -> Tensor:
    return torch.where(m > threshold, x, value)


@_kinked(F.softshrink)
def _softshrink(x: Tensor, m: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(m.abs() > lambd, x - lambd * m.sign(), 0.0)


@_kinked(F.hardshrink, torch.hardshrink, Tensor.hardshrink)
def _hardshrink(x: Tensor, m: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(m.abs() > lambd, x, 0.0)


@_kinked(torch.abs, Tensor.abs, Tensor.__abs__)
def _abs(x: Tensor, m: Tensor) -> Tensor:
    return torch.abs(x) if x.is_complex() else x * m.sign()


def _at_midpoint(function: Function, mode: StackedPass, *args: Any, **kwargs: Any) -> Any:
    """Evaluate a function that makes a decision, such as ``x > 0``, at the midpoint."""
    args = tuple(mode.midpoint(a) if _floating(a) else a for a in args)
    kwargs = {k: mode.midpoint(v) if _floating(v) else v for k, v in kwargs.items()}
    return function(*args, **kwargs)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _named(names: str) -> list[Function]:
    """Return the functions with these names in torch (without underscores) and in torch.Tensor."""
    pairs = ((owner, name) for name in names.split() for owner in (torch, Tensor))
    return list(dict.fromkeys(getattr(o, n) for o, n in pairs if o is Tensor or n[0] != "_"))


for _function in _named(
    """gt ge lt le eq ne __gt__ __ge__ __lt__ __le__ __eq__ __ne__
    sign sgn argmax argmin argsort round floor ceil trunc"""
):
    MIDPOINT_RULES.register(_function)(partial(_at_midpoint, _function))


def _larger_or_smaller(smaller: bool, mode: StackedPass, input: Tensor, other: Tensor) -> Tensor:
    """Return the larger (or smaller) of two tensors, chosen entry by entry at the midpoint."""
    a, b = (mode.midpoint(x) if _floating(x) else x for x in (input, other))
    return torch.where(a <= b if smaller else a >= b, input, other)


MIDPOINT_RULES.register(*_named("maximum fmax"))(partial(_larger_or_smaller, False))
MIDPOINT_RULES.register(*_named("minimum fmin"))(partial(_larger_or_smaller, True))


def _select(function: Function, mode: StackedPass, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Evaluate max, min, sort, topk, … along a dimension; the entries are chosen at the midpoint."""
    if not input.is_floating_point():
        return function(input, *args, **kwargs)
    result = function(mode.midpoint(input), *args, **kwargs)
    if isinstance(result, Tensor):  # max or min of two tensors, or over all entries
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            return _larger_or_smaller(function in (torch.min, Tensor.min), mode, input, other)
        return function(input, *args, **kwargs)
    _, indices = result
    dim = kwargs.get("dim", _dim_argument(function, args))
    if indices.dim() == input.dim():
        return type(result)((input.gather(dim, indices), indices))
    return type(result)((input.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices))


def _dim_argument(function: Function, args: tuple[Any, ...]) -> int:
    """Return ``dim`` from the positional arguments; topk and kthvalue take k before it."""
    index = 1 if function.__name__ in ("topk", "kthvalue") else 0
    return int(args[index]) if len(args) > index else -1


for _function in _named("max min sort topk kthvalue cummax cummin median nanmedian"):
    MIDPOINT_RULES.register(_function)(partial(_select, _function))


def _extreme(
    smallest: bool, mode: StackedPass, input: Tensor, dim: Any = (), keepdim: bool = False
) -> Tensor:
    """Evaluate amax or amin; the entry is chosen at the midpoint."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
    dims = sorted(d % input.dim() for d in dims)
    others = [d for d in range(input.dim()) if d not in dims]
    flat, m = (
        x.permute(*others, *dims).flatten(len(others)) for x in (input, mode.midpoint(input))
    )
    index = m.argmin(-1, keepdim=True) if smallest else m.argmax(-1, keepdim=True)
    out = flat.gather(-1, index).squeeze(-1)
    return out.view([1 if d in dims else n for d, n in enumerate(input.shape)]) if keepdim else out


MIDPOINT_RULES.register(*_named("amax"))(partial(_extreme, False))
MIDPOINT_RULES.register(*_named("amin"))(partial(_extreme, True))


def _max_pool(
    function: Function, dims: int, mode: StackedPass, input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Evaluate max pooling over ``dims`` dimensions; the entry of a window is chosen at the midpoint."""
    return_indices = kwargs.pop("return_indices", False)
    _, indices = function(mode.midpoint(input), *args, **kwargs, return_indices=True)
    out = input.flatten(-dims).gather(-1, indices.flatten(-dims)).view(indices.shape)
    return (out, indices) if return_indices else out


for _dims in (1, 2, 3):
    for _name in (f"max_pool{_dims}d", f"adaptive_max_pool{_dims}d"):
        _function = getattr(F, _name)
        _rule = partial(_max_pool, _function, _dims)
        _functions = {_function, getattr(torch, _name, _function)}
        MIDPOINT_RULES.register(*_functions)(_rule)
        # F.max_pool2d calls this one, and the mode may see either.
        _with_indices = getattr(F, f"{_name}_with_indices")
        if _with_indices not in _functions:
            MIDPOINT_RULES.register(_with_indices)(partial(_rule, return_indices=True))
