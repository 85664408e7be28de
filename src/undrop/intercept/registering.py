"""Declaring a function or a module of your own that multiplies its input by noise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from undrop.errors import OptionError
from undrop.intercept.interception import SITE_RULES, Interception

Target = TypeVar("Target")


def register_site(
    target: Any = None,
    *,
    p: float | str | Callable[..., float],
    shared: Sequence[int] = (),
    kind: str = "dropout",
    mask: str = "independent",
    per_example: bool = True,
) -> Any:
    """Declare that a function, or a module class, multiplies its input h by noise of mean 1.

    undrop finds most masks by itself. This is for noise that it can't see: a kernel of your own, a mask
    from NumPy. Use the function that is returned, or use this as a decorator; a class is changed in
    place. Outside of undrop's passes both do what they did.

    Args:
        target: a function whose first argument is h, or a subclass of ``nn.Module``.
        p: the drop probability: a number, the name of an argument (for a class: of an attribute), or a
            function of the same arguments.
        shared: the dimensions of h along which one entry of the noise is shared.
        kind: what the site is called in ``undrop.sites``.
        mask: the mask structure's name there.
        per_example: False where all examples of a batch share the noise.

    Returns:
        The function or class to use.

    Raises:
        OptionError: if the target can't be called, or p names none of its arguments.
    """
    if target is None:
        return functools.partial(
            register_site, p=p, shared=shared, kind=kind, mask=mask, per_example=per_example
        )
    how = {"shared": shared, "kind": kind, "mask": mask, "per_example": per_example}
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = _declared(target.forward, 1, p, how)
        return target
    if not callable(target) or isinstance(target, nn.Module):
        raise OptionError(
            f"register_site takes a function or a module class, got {type(target).__name__}."
        )
    return _declared(target, 0, p, how)


def _compiled_mode() -> bool:
    """Whether compiled code runs under a mode, which torch.compile forgets in has_torch_function."""
    return torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled()


def _declared(
    function: Callable[..., Any], place: int, p: Any, how: dict[str, Any]
) -> Callable[..., Any]:
    """Return the function with its calls passed to the active interception, if there is one."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if len(names) <= place:
        raise OptionError(f"{function.__qualname__} has no argument that noise could multiply.")
    if isinstance(p, str) and place == 0 and p not in names:
        raise OptionError(
            f"{function.__qualname__} has no argument {p!r}: it has {', '.join(names)}."
        )

    defaults = {n: v.default for n, v in signature.parameters.items() if v.default is not v.empty}

    @functools.wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        h = args[place] if len(args) > place else kwargs[names[place]]
        if has_torch_function_unary(h) or _compiled_mode():
            return handle_torch_function(declared, (h,), *args, **kwargs)
        return function(*args, **kwargs)

    @SITE_RULES.register(declared)
    def rule(mode: Interception, *args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        owner = args[0] if place else None
        training = owner.training if isinstance(owner, nn.Module) else values.get("training", True)
        if callable(p):
            rate = p(*args, **kwargs)
        elif isinstance(p, str):
            rate = getattr(owner, p) if place else values[p]
        else:
            rate = p
        h = values[names[place]]
        if not training or not rate:
            return mode.off(h, training)
        return mode.noisy(h, float(rate), label=None if place else how["kind"], **how)

    return declared
