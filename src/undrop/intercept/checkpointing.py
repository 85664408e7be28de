"""Parts of a model that the backward pass runs a second time: activation checkpointing.

A region under ``torch.utils.checkpoint`` keeps none of its activations. When the backward pass
needs one, the region runs again, possibly in another thread, where no interception is active:
torch's dropout would draw new masks there. So an interception finds the regions that it passes
through, and makes sure that they run again under an interception with the same noise.

A region has hooks on torch's stack of saved-tensor hooks. All non-reentrant checkpointing
(``checkpoint``, ``checkpoint_sequential``, module wrappers, Transformers) uses them, and they lead
to the region's record, which holds the function that runs it again. The reentrant kind runs inside
an autograd function and has no such record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType
from typing import Any, Protocol, TypeAlias

import torch

from undrop.intercept.wrappers import frames

_Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
_CHECKPOINT_MODULE = "torch.utils.checkpoint"


class Region(Protocol):
    """Torch's record of one run of a checkpointed region."""

    recompute_fn: Callable[..., None]
    """Runs the region again."""


def regions() -> list[Region]:
    """Return the checkpointed regions that are in their first run, innermost first."""
    found: list[Region] = []
    for pack, _ in _all_hooks():
        name = getattr(pack, "__qualname__", "")
        if getattr(pack, "__module__", None) == _CHECKPOINT_MODULE and name.startswith(
            "_checkpoint_hook."
        ):
            code: Any = pack
            held = dict(zip(code.__code__.co_freevars, code.__closure__ or (), strict=True))
            found.append(held["frame"].cell_contents)
    return found


def _top_hooks() -> _Hooks | None:
    """Return the hooks on top of the stack, which apply to every tensor that is saved next."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def _all_hooks() -> list[_Hooks]:
    """Return the whole stack of hooks, the top first: take them off one by one and put them back."""
    stack: list[_Hooks] = []
    while (hooks := _top_hooks()) is not None:
        stack.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for hooks in reversed(stack):
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return stack


def in_checkpoint(error: Exception | None = None) -> bool:
    """Whether ``torch.utils.checkpoint`` is on the Python stack, or was where ``error`` was raised."""
    stack = frames() if error is None else (frame for frame, _ in walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == _CHECKPOINT_MODULE for frame in stack)


def enclosing_function() -> str | None:
    """Return the name of the autograd function whose forward is on the Python stack, or None."""
    forwards = _forwards()
    return next((forwards[f.f_code] for f in frames() if f.f_code in forwards), None)


def _forwards() -> dict[CodeType, str]:
    """Return the code of every autograd function's forward, with the function's name.

    The stack shows only the forward: since torch 2.15 ``Function.apply`` is not Python.
    """
    found: dict[CodeType, str] = {}
    waiting = torch.autograd.Function.__subclasses__()
    while waiting:
        function = waiting.pop()
        waiting += function.__subclasses__()
        code = getattr(inspect.unwrap(function.forward), "__code__", None)
        if code is not None:
            found[code] = function.__name__
    return found
