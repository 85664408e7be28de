"""Differences between versions of torch and between machines."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from undrop.errors import TorchVersionError

OLDEST = (2, 8)
"""The first version of torch that tells a mode which regions are under activation checkpointing."""

_log = logging.getLogger("undrop")


def check_version(version: str) -> None:
    """Raise a ``TorchVersionError`` for a version of torch that is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchVersionError(
            f"undrop needs torch {oldest} or later, but torch {version} is installed: "
            "pip install --upgrade torch."
        )


check_version(torch.__version__)


def other_accelerator() -> torch.device | None:
    """Return the accelerator of this machine if it is neither CUDA nor MPS, else None."""
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type in ("cpu", "cuda", "mps") else device


def lstm(*args: Any) -> Any:
    """Call ``torch.lstm``, in float32 if the CPU has no kernel for the dtype of autocast.

    On a CPU without AVX-512 or AMX, oneDNN has no LSTM in bfloat16 or float16, and torch raises.
    """
    if _autocast_has_kernel(args[0].device.type):
        return torch.lstm(*args)
    with torch.autocast("cpu", enabled=False):
        return torch.lstm(*tree_map(_to_float32, args))


def _autocast_has_kernel(device: str) -> bool:
    """Return whether an LSTM runs on a device in the dtype of the current autocast."""
    if device != "cpu" or not torch.is_autocast_enabled("cpu"):
        return True
    return _has_kernel(torch.get_autocast_dtype("cpu"))


@functools.cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Run the smallest LSTM to find out whether this CPU has a kernel for ``dtype``."""
    x, weight = (torch.zeros(size, device="cpu") for size in ((1, 1, 1), (4, 1)))
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            torch.lstm(x, [x, x], [weight, weight], False, 1, 0.0, False, False, False)
    except RuntimeError:
        name = str(dtype).removeprefix("torch.")
        _log.info("undrop runs LSTM layers in float32: this CPU has no %s LSTM.", name)
        return False
    return True


def _to_float32(value: Any) -> Any:
    """Convert tensors in half precision; return any other value."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def portable_lstm() -> contextlib.AbstractContextManager[object]:
    """A context in which an LSTM under the current autocast runs on any CPU."""
    return contextlib.nullcontext() if _autocast_has_kernel("cpu") else _PortableLSTM()


class _PortableLSTM(TorchFunctionMode):
    """Replaces every call of ``torch.lstm`` by :func:`lstm`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (lstm if func is torch.lstm else func)(*args, **(kwargs or {}))


def force_eager() -> contextlib.AbstractContextManager[object]:
    """A context in which compiled models and functions run as plain Python.

    An interception can't see the dropout in compiled code.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()  # nothing has been compiled
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


Backend: TypeAlias = str | Callable[..., Any]
"""The type of the argument ``backend`` of ``torch.compile``."""


def backend_of(function: Any) -> Backend:
    """Return the backend of a function that ``torch.compile`` made.

    For torch's own backend, this is its name, "inductor", without the user's options. The result is also
    "inductor" if this version of torch stores the backend in another place.
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    callback = dict(zip(code.co_freevars if code else (), cells, strict=False)).get("callback")
    backend = None if callback is None else callback.cell_contents
    # The second name is that of torch 2.8.
    for attribute in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while hasattr(backend, attribute):
            backend = getattr(backend, attribute)
    custom = callable(backend) and getattr(backend, "compiler_name", "") != "inductor"
    return cast(Backend, backend) if custom else "inductor"


@contextlib.contextmanager
def allow_compiled() -> Iterator[None]:
    """A context in which compiled functions run compiled, even within :func:`force_eager`."""
    with torch.compiler.set_stance("default"), _intercept_rand_like():
        yield


@contextlib.contextmanager
def _intercept_rand_like() -> Iterator[None]:
    """Let a mode intercept ``torch.rand_like`` in compiled code as well.

    Torch's compiler has a list of the functions that a mode can intercept. ``torch.rand`` is in it, but
    ``torch.rand_like`` is not. If a version of torch has the list in another place, nothing happens.
    """
    module = sys.modules.get("torch._dynamo.variables.torch")
    overridable: set[Any] = getattr(module, "get_overridable_functions", set)()
    missing = {torch.rand_like} - overridable
    overridable |= missing
    try:
        yield
    finally:
        overridable -= missing


P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """A context at whose end autocast forgets the weights that it has converted.

    Older versions of torch reuse a weight that was converted without a graph. In a later pass, this
    weight gets no gradient.
    """
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def untraced(method: Callable[P, T]) -> Callable[P, T]:
    """Let ``torch.compile`` call ``method`` without tracing it, for users who compile a whole step."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch._dynamo.disable(method))
        return disabled[0](*args, **kwargs)

    return call
