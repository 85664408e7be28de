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
    """How often a pass draws them there."""

    def __str__(self) -> str:
        """The function, the module and the line, for use in a sentence."""
        return f"{self.function} in {self.module or 'the model'!r}" + (
            f" at {self.where}" if self.where else ""
        )


def unaccounted(
    names: dict[int, str], run: Callable[[], Any], moved: set[str]
) -> list[Unaccounted]:
    """Return the random numbers of a pass that belong to no site.

    ``names`` are the paths of the modules by id, ``run`` runs the model without noise, and ``moved``
    are the generators that drew in an earlier pass (``RngSnapshot.changed_generators``).
    """
    found: list[Unaccounted] = []
    ops = RandomOps(names)
    with record_python_draws(names, found), ops:
        run()
    found = [*ops.unaccounted, *found]
    if "torch" in moved and not ops.unaccounted:
        found.append(Unaccounted("", "torch's generator, by an unknown kernel", "", 1))
    if "model" in moved and not ops.unaccounted:
        found.append(Unaccounted("", "a generator that the model holds", "", 1))
    return found


class RandomOps(TorchDispatchMode):
    """Records every operation of a pass that draws random numbers, whatever code calls it."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._module_paths = names
        self._calls: Counter[tuple[str, str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch import all of torch._dynamo just to skip it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record the operation if it draws, and run it."""
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            name = func.overloadpacket.__name__
            self._calls[(running_path(self._module_paths), name, _where())] += 1
        return func(*args, **(kwargs or {}))

    @property
    def unaccounted(self) -> list[Unaccounted]:
        """The recorded operations, in the order of their first calls."""
        return [Unaccounted(*key, calls) for key, calls in self._calls.items()]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the operation draws with these arguments; attention without dropout does not."""
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    for name in ("dropout_p", "dropout", "p"):
        if name in given and isinstance(given[name], (int, float)):
            inactive = (0.0, 1.0) if "bernoulli" in func.name() else (0.0,)
            return given[name] not in inactive
    return given.get("train", given.get("training", True)) is not False


def _where() -> str:
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


@contextmanager
def record_python_draws(names: dict[int, str], found: list[Unaccounted]) -> Iterator[None]:
    """Add to ``found`` what a pass draws from Python's and NumPy's generators, by innermost module."""
    stack: list[nn.Module] = []
    last = {source: state() for source, state in _STATES.items()}
    calls: Counter[tuple[str, str, str]] = Counter()

    def look() -> None:
        for source, state in _STATES.items():
            now = state()
            if now != last[source]:
                last[source] = now
                owner = stack[-1] if stack else None
                calls[(names.get(id(owner), ""), source, _forward_location(owner))] += 1

    def begin(module: nn.Module, args: Any) -> None:
        look()
        stack.append(module)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        look()
        while stack and stack.pop() is not module:
            pass

    hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end)
    try:
        yield
        look()
    finally:
        for hook in hooks:
            hook.remove()
    found += [Unaccounted(*key, count) for key, count in calls.items()]


def _forward_location(module: nn.Module | None) -> str:
    forward = getattr(type(module), "forward", None)  # none in TorchScript
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
