"""Site rules of dropout functions (torch's, undrop's and your own), and of random draws."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import _C, Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from undrop.errors import OptionError, UnsupportedDropoutError
from undrop.intercept.interception import SITE_RULES, Interception, Rule
from undrop.noise import structured_dropout

aten: Any = torch.ops.aten


def _apply_noise(
    mode: Interception, h: Tensor, p: float, training: bool, inplace: bool = False, **options: Any
) -> Tensor:
    """Return h with the noise of a site, in h itself or in a new tensor; h alone if nothing drops."""
    if not training or not p:
        return mode.idle_dropout(h, training)
    if inplace:  # the derivative in η needs the old value, so the site gets a clone
        return h.copy_(mode.noisy(h.clone(), p, **options))
    out = mode.noisy(h, p, **options)
    return h.clone() if out is h else out  # the result may be changed in place, but not h


def _with_train(rule: Rule, **options: Any) -> Rule:
    """Return the rule for functions that have ``train`` in place of ``training``."""
    return lambda mode, input, p, train: rule(mode, input, p, train, **options)


@SITE_RULES.register(F.dropout)
def _dropout(
    mode: Interception, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _apply_noise(mode, input, p, training, inplace, kind="dropout", label="dropout")


SITE_RULES.register(torch.dropout, aten.dropout, aten.dropout.default)(_with_train(_dropout))
SITE_RULES.register(torch.dropout_, aten.dropout_, aten.dropout_.default)(
    _with_train(_dropout, inplace=True)
)


@SITE_RULES.register(torch.native_dropout, aten.native_dropout, aten.native_dropout.default)
def _native_dropout(
    mode: Interception, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Any]:
    """A mask made by hand, because the function also returns the mask and the model may use it."""
    if train is False or not p:
        return mode.idle_dropout(input, train), torch.ones_like(input, dtype=torch.bool)
    keep = mode.bernoulli(
        lambda k: torch.full_like(input, k, requires_grad=False),
        lambda: torch.rand_like(input) >= p,
        1.0 - p,
        torch.bool,
    )
    scaled = input / (1.0 - p)
    out = scaled * keep if isinstance(keep, Tensor) else keep.mul(scaled)
    return out, keep


def _feature_dropout(
    mode: Interception,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    kind: str,
    unbatched: int | None = None,
) -> Tensor:
    """One η for each feature map: all dimensions after the channel share it.

    An input with ``unbatched`` dimensions is one example without a batch dimension, such as (C, L) in
    dropout1d and (C, D, H, W) in dropout3d.
    """
    shared = tuple(range(1 if input.dim() == unbatched else 2, input.dim()))
    options = {"kind": kind, "label": kind, "mask": "per feature map", "shared": shared}
    return _apply_noise(mode, input, p, training, inplace, **options)


SITE_RULES.register(F.dropout1d)(partial(_feature_dropout, kind="dropout1d", unbatched=2))
SITE_RULES.register(F.dropout2d)(partial(_feature_dropout, kind="dropout2d"))
SITE_RULES.register(F.dropout3d)(partial(_feature_dropout, kind="dropout3d", unbatched=4))
SITE_RULES.register(torch.feature_dropout, aten.feature_dropout, aten.feature_dropout.default)(
    _with_train(_feature_dropout, kind="dropout2d")
)
SITE_RULES.register(torch.feature_dropout_, aten.feature_dropout_, aten.feature_dropout_.default)(
    _with_train(_feature_dropout, kind="dropout2d", inplace=True)
)


@SITE_RULES.register(structured_dropout)
def _structured_dropout(
    mode: Interception, h: Tensor, p: float, *, training: bool = True, **structure: Any
) -> Tensor:
    return _apply_noise(mode, h, p, training, **{"kind": "dropout", **structure})


@SITE_RULES.register(F.alpha_dropout, F.feature_alpha_dropout)
def _alpha_dropout(
    mode: Interception, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    if not training or not p:
        return input
    name = mode.site(input.shape, p, kind="alpha").name
    raise UnsupportedDropoutError(
        f"alpha dropout at {name!r} is not multiplicative zero-mean noise, so undrop can't "
        "separate its effects: use nn.Dropout there, or put that module in eval mode."
    )


SITE_RULES.register(
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)(_with_train(_alpha_dropout))


_NOT_FOR_FULL = ("generator", "out", "requires_grad", "size", "names", "input")


def _options_for_full(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``torch.rand`` that ``torch.full`` needs as well."""
    return {name: value for name, value in kwargs.items() if name not in _NOT_FOR_FULL}


@SITE_RULES.register(torch.rand)
def _rand(mode: Interception, *args: Any, **kwargs: Any) -> Any:
    size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
    if kwargs.get("out") is not None or kwargs.get("requires_grad"):
        return torch.rand(*args, **kwargs)
    options = _options_for_full(kwargs)
    return mode.uniform(
        lambda k: torch.full(size, k, **options), lambda: torch.rand(*args, **kwargs)
    )


@SITE_RULES.register(torch.rand_like)
def _rand_like(mode: Interception, input: Tensor, **kwargs: Any) -> Any:
    options = _options_for_full(kwargs)
    return mode.uniform(
        lambda k: torch.full_like(input, k, **options), lambda: torch.rand_like(input, **kwargs)
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
        mode.as_probability(p),
        input.dtype,
        target=input,
    )


@SITE_RULES.register(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(mode: Interception, input: Tensor, p: Any = None, **kwargs: Any) -> Any:
    args = () if p is None else (p,)
    if kwargs.get("out") is not None:
        return torch.bernoulli(input, *args, **kwargs)
    return mode.bernoulli(
        lambda k: _full_like(input, k),
        lambda: torch.bernoulli(input, *args, **kwargs),
        mode.as_probability(input if p is None else p),
        input.dtype,
    )


def _full_like(x: Tensor, k: float) -> Tensor:
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.full_like(x, k, dtype=dtype, requires_grad=False)


def register_site(
    target: Any = None,
    *,
    p: float | str | Callable[..., float],
    shared: Sequence[int] = (),
    kind: str = "dropout",
    mask: str = "independent",
) -> Any:
    """Declare that a function, or a module class, multiplies its input h by noise of mean 1.

    undrop finds most masks by itself. Use this for noise that undrop can't see, such as the noise of
    your own kernel or a mask from NumPy. Call the returned function in place of yours, or use this as a
    decorator. A class is changed in place. Outside of undrop's passes, both work as before.

    Args:
        target: a function whose first argument is h, or a subclass of ``nn.Module``.
        p: the drop probability: a number, the name of an argument (for a class, the name of an
            attribute), or a function of the same arguments.
        shared: the dimensions of h along which one entry of the noise is shared.
        kind: the kind of the site in ``undrop.sites``.
        mask: the mask structure of the site in ``undrop.sites``.

    Returns:
        The function or class to use.

    Raises:
        OptionError: if the target can't be called, or p names none of its arguments.
    """
    if target is None:
        return functools.partial(register_site, p=p, shared=shared, kind=kind, mask=mask)
    options = {"shared": shared, "kind": kind, "mask": mask}
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = _declare(target.forward, 1, p, options)
        return target
    if not callable(target) or isinstance(target, nn.Module):
        raise OptionError(
            f"register_site takes a function or a module class, got {type(target).__name__}."
        )
    return _declare(target, 0, p, options)


def _declare(
    function: Callable[..., Any], h_index: int, p: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that passes its calls to the active interception, if there is one.

    ``h_index`` is the position of h among the arguments: 0 for a function, 1 for a method.
    """
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if len(names) <= h_index:
        raise OptionError(f"{function.__qualname__} has no argument that noise could multiply.")
    if isinstance(p, str) and h_index == 0 and p not in names:
        raise OptionError(
            f"{function.__qualname__} has no argument {p!r}: it has {', '.join(names)}."
        )

    defaults = {n: v.default for n, v in signature.parameters.items() if v.default is not v.empty}

    @functools.wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        h = args[h_index] if len(args) > h_index else kwargs[names[h_index]]
        # While torch.compile traces, has_torch_function does not see a mode.
        compiling = torch.compiler.is_compiling()
        if has_torch_function_unary(h) or (compiling and _C._is_torch_function_mode_enabled()):
            return handle_torch_function(declared, (h,), *args, **kwargs)
        return function(*args, **kwargs)

    @SITE_RULES.register(declared)
    def rule(mode: Interception, *args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        owner = args[0] if h_index else None
        training = owner.training if isinstance(owner, nn.Module) else values.get("training", True)
        value = p(*args, **kwargs) if callable(p) else p
        if isinstance(value, str):
            value = getattr(owner, value) if h_index else values[value]
        h, label = values[names[h_index]], None if h_index else options["kind"]
        return _apply_noise(mode, h, float(value or 0.0), training, label=label, **options)

    return declared
