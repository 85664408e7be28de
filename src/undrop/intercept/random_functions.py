"""The functions that models draw masks with, as the first step of a site."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrop.intercept.interception import SITE_RULES, Interception

_NOT_OF_FULL = ("generator", "out", "requires_grad", "size", "names", "input")


def _filling(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _NOT_OF_FULL}


@SITE_RULES.register(torch.rand)
def _rand(mode: Interception, *args: Any, **kwargs: Any) -> Any:
    size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
    if kwargs.get("out") is not None or kwargs.get("requires_grad"):
        mode.drew = True
        return torch.rand(*args, **kwargs)
    how = _filling(kwargs)
    return mode.uniform(lambda k: torch.full(size, k, **how), lambda: torch.rand(*args, **kwargs))


@SITE_RULES.register(torch.rand_like)
def _rand_like(mode: Interception, input: Tensor, **kwargs: Any) -> Any:
    how = _filling(kwargs)
    return mode.uniform(
        lambda k: torch.full_like(input, k, **how), lambda: torch.rand_like(input, **kwargs)
    )


@SITE_RULES.register(Tensor.uniform_)
def _uniform_(mode: Interception, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    low = args[0] if args else kwargs.get("from", 0.0)
    high = args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    return mode.uniform(
        lambda k: torch.full_like(input, k),
        lambda: input.uniform_(*args, **kwargs),
        target=input,
        low=float(low),
        high=float(high),
    )


@SITE_RULES.register(Tensor.bernoulli_)
def _bernoulli_(mode: Interception, input: Tensor, p: Any = 0.5, **kwargs: Any) -> Any:
    return mode.bernoulli(
        lambda k: _full_like(input, k),
        lambda: input.bernoulli_(p, **kwargs),
        mode.chance(p),
        input.dtype,
        target=input,
    )


@SITE_RULES.register(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(mode: Interception, input: Tensor, p: Any = None, **kwargs: Any) -> Any:
    given = () if p is None else (p,)
    if kwargs.get("out") is not None:
        mode.drew = True
        return torch.bernoulli(input, *given, **kwargs)
    return mode.bernoulli(
        lambda k: _full_like(input, k),
        lambda: torch.bernoulli(input, *given, **kwargs),
        mode.chance(input if p is None else p),
        input.dtype,
    )


def _full_like(x: Tensor, k: float) -> Tensor:
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.full_like(x, k, dtype=dtype, requires_grad=False)
