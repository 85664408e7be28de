"""Random numbers that belong to no site: which module draws them, by which function, on which line."""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from undrop.intercept.wrappers import frames, running_path

_NOT_USER_CODE = (
    f"{Path(__file__).parent.parent}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    "<",
)


class Unaccounted(NamedTuple):
    """Random numbers of a training pass that belong to no site."""

    module: str
    """The path of the module that draws them; "" for the model itself."""
    function: str
    """The function or generator that draws them."""
    where: str
    """The file and line of the call."""
    calls: int
    """How often a pass reaches this call."""

    def __str__(self) -> str:
        """The function, the module and the line, for use in a sentence."""
        where = f" at {self.where}" if self.where else ""
        return f"{self.function} in {self.module or 'the model'!r}{where}"


def find_unaccounted(
    paths: dict[int, str], run: Callable[[], Any], changed: set[str]
) -> list[Unaccounted]:
    """Return the random numbers of a pass that belong to no site.

    Args:
        paths: the path of each module, by its id.
        run: runs the model without noise.
        changed: the generators that an earlier pass has used (``RngSnapshot.changed_generators``).
    """
    with record_python_draws(paths) as python_draws, RandomOps(paths) as ops:
        run()
    found = [*ops.unaccounted, *python_draws]
    if not ops.unaccounted:
        texts = [text for name, text in _GENERATORS.items() if name in changed]
        found += [Unaccounted("", text, "", 1) for text in texts]
    return found


_GENERATORS = {
    "torch": "torch's generator, by an unknown kernel",
    "model": "a generator that the model holds",
}
"""The ``function`` of draws that no operation shows, by the generator that has changed."""


class RandomOps(TorchDispatchMode):
    """Records every operation of a pass that draws random numbers, whatever code calls it."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self._paths = paths
        self._calls: Counter[tuple[str, str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch import all of torch._dynamo just to skip it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record the operation if it draws, and run it."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _uses_generator(func, args, kwargs):
            name = func.overloadpacket.__name__
            self._calls[(running_path(self._paths), name, _caller_location())] += 1
        return func(*args, **kwargs)

    @property
    def unaccounted(self) -> list[Unaccounted]:
        """The recorded operations, in the order of their first calls."""
        return [Unaccounted(*key, calls) for key, calls in self._calls.items()]


def _uses_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the operation draws with these arguments; attention without dropout does not."""
    schema = func._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    for name in ("dropout_p", "dropout", "p"):
        if name in values and isinstance(values[name], (int, float)):
            certain = (0.0, 1.0) if "bernoulli" in func.name() else (0.0,)
            return values[name] not in certain
    return values.get("train", values.get("training", True)) is not False


def _caller_location() -> str:
    """Return the file and line of the innermost call that is neither torch's nor undrop's."""
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USER_CODE):
            return f"{file}:{frame.f_lineno}"
    return ""


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, keys.tobytes(), *rest)  # type: ignore[union-attr]


_STATES: dict[str, Callable[[], Any]] = {
    "Python's random": random.getstate,
    "NumPy's random": _numpy_state,
}
"""Generators outside of torch, and the functions that return their states."""


@contextmanager
def record_python_draws(paths: dict[int, str]) -> Iterator[list[Unaccounted]]:
    """Yield a list that gets the uses of Python's and NumPy's generators when the block ends."""
    records: list[Unaccounted] = []
    stack: list[nn.Module] = []
    states = {name: state() for name, state in _STATES.items()}
    calls: Counter[tuple[str, str, str]] = Counter()

    def record_changes() -> None:
        for name, state in _STATES.items():
            current = state()
            if current != states[name]:
                states[name] = current
                owner = stack[-1] if stack else None
                calls[(paths.get(id(owner), ""), name, _forward_location(owner))] += 1

    def begin(module: nn.Module, args: Any) -> None:
        record_changes()
        stack.append(module)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        record_changes()
        while stack and stack.pop() is not module:
            pass

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    try:
        yield records
        record_changes()
    finally:
        for hook in hooks:
            hook.remove()
    records += [Unaccounted(*key, count) for key, count in calls.items()]


def _forward_location(module: nn.Module | None) -> str:
    """Return the file and line of the module's forward; "" if there is none in Python."""
    forward = getattr(type(module), "forward", None)  # TorchScript has none
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
