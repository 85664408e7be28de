"""Parts of a model that the backward pass runs a second time: activation checkpointing.

A region under ``torch.utils.checkpoint`` keeps none of its activations. When the backward pass needs
one, the region runs again, possibly in another thread. No interception is active then, so torch's
dropout would draw new masks. Therefore an interception finds the regions in which it meets a dropout,
and makes them run again under an interception with the same noise.

Non-reentrant checkpointing (``checkpoint``, ``checkpoint_sequential``, module wrappers, Transformers)
puts hooks for saved tensors on torch's stack of such hooks. These hooks lead to torch's record of the
region, which contains the function that runs it again. Reentrant checkpointing runs inside an autograd
function and has no such record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType
from typing import Any, Protocol

import torch

from undrop.intercept.wrappers import frames

_CHECKPOINT_MODULE = "torch.utils.checkpoint"


class Region(Protocol):
    """Torch's record of one run of a checkpointed region."""

    recompute_fn: Callable[..., None]
    """Runs the region again."""


def regions() -> list[Region]:
    """Return the checkpointed regions that are in their first run, innermost first."""
    found: list[Region] = []
    for pack, _ in _all_hooks():
        name = f"{getattr(pack, '__module__', '')}.{getattr(pack, '__qualname__', '')}"
        if name.startswith(f"{_CHECKPOINT_MODULE}._checkpoint_hook."):
            found.append(pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents)
    return found


def _all_hooks() -> list[tuple[Any, Any]]:
    """Return the stack of hooks, the top first: take all hooks off, and put them back."""
    top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
    stack: list[tuple[Any, Any]] = []
    while (hooks := top_hooks(False)) is not None:
        stack.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for hooks in reversed(stack):
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return stack


def in_checkpoint(error: Exception | None = None) -> bool:
    """Return whether ``torch.utils.checkpoint`` is on the Python stack, or on the stack of an error."""
    stack = frames() if error is None else (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == _CHECKPOINT_MODULE for frame in stack)


def enclosing_function() -> str | None:
    """Return the name of the autograd function whose forward is on the Python stack, or None."""
    forwards = _forwards()
    return next((forwards[f.f_code] for f in frames() if f.f_code in forwards), None)


def _forwards() -> dict[CodeType, str]:
    """Return the name of every autograd function, by the code of its forward.

    ``Function.apply`` is not on the Python stack since torch 2.15; the forward is.
    """
    names: dict[CodeType, str] = {}
    functions = torch.autograd.Function.__subclasses__()
    while functions:
        function = functions.pop()
        functions += function.__subclasses__()
        code = getattr(inspect.unwrap(function.forward), "__code__", None)
        if code is not None:
            names[code] = function.__name__
    return names
