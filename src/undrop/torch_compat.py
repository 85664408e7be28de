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
"""The first version of torch that shows which regions are under activation checkpointing."""

_log = logging.getLogger("undrop")


def check_version(found: str) -> None:
    """Raise a ``TorchVersionError`` for a torch that is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchVersionError(
            f"undrop needs torch {oldest} or later, but torch {found} is installed: "
            "pip install --upgrade torch."
        )


check_version(torch.__version__)


def other_accelerator() -> torch.device | None:
    """Return the accelerator if it is neither CUDA nor MPS, else None."""
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type in ("cpu", "cuda", "mps") else found


def lstm(*args: Any) -> Any:
    """``torch.lstm``, in float32 if the CPU has no kernel for the dtype of autocast.

    On a CPU without AVX-512 or AMX, oneDNN has no LSTM in bfloat16 or float16, and torch raises.
    """
    if _runs_here(args[0].device.type):
        return torch.lstm(*args)
    with torch.autocast("cpu", enabled=False):
        return torch.lstm(*tree_map(_widened, args))


def _runs_here(device: str) -> bool:
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


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def portable_lstm() -> contextlib.AbstractContextManager[object]:
    """A context in which an LSTM under the current autocast runs on any CPU."""
    return contextlib.nullcontext() if _runs_here("cpu") else _PortableLSTM()


class _PortableLSTM(TorchFunctionMode):
    """Replaces every LSTM call by :func:`lstm`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (lstm if func is torch.lstm else func)(*args, **(kwargs or {}))


def force_eager() -> contextlib.AbstractContextManager[object]:
    """A context in which compiled models and functions run as plain Python.

    Compiled code has torch's own dropout in it, which no interception sees.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()  # nothing has been compiled
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


Backend: TypeAlias = str | Callable[..., Any]
"""What ``torch.compile`` takes as ``backend``."""


def backend_of(function: Any) -> Backend:
    """Return the backend with which ``torch.compile`` made a function.

    For torch's own backend this is its name, "inductor", without the options that the user gave it. If
    this version of torch keeps the backend elsewhere, the result is also "inductor".
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    found = dict(zip(code.co_freevars if code else (), cells, strict=False)).get("callback")
    backend = None if found is None else found.cell_contents
    for name in (
        "_torchdynamo_orig_backend",
        "_torchdynamo_orig_callable",
    ):  # torch 2.8: the second
        while hasattr(backend, name):
            backend = getattr(backend, name)
    own = callable(backend) and getattr(backend, "compiler_name", "") != "inductor"
    return cast(Backend, backend) if own else "inductor"


@contextlib.contextmanager
def allow_compiled() -> Iterator[None]:
    """A context in which compiled functions run compiled, even within :func:`force_eager`."""
    with torch.compiler.set_stance("default"), _rand_like_seen():
        yield


@contextlib.contextmanager
def _rand_like_seen() -> Iterator[None]:
    """Let a mode see ``torch.rand_like`` in compiled code too.

    Torch's compiler has a list of the functions that a mode sees. The list has ``torch.rand``, but not
    ``torch.rand_like``. If a version of torch keeps the list elsewhere, this does nothing.
    """
    module = sys.modules.get("torch._dynamo.variables.torch")
    seen: set[Any] = getattr(module, "get_overridable_functions", set)()
    missing = {torch.rand_like} - seen
    seen |= missing
    try:
        yield
    finally:
        seen -= missing


P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Forget the weights that autocast converts in the block.

    Older versions of torch reuse a weight that was converted without a graph in later passes, where it
    then gets no gradient.
    """
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def untraced(method: Callable[P, T]) -> Callable[P, T]:
    """Make ``torch.compile`` call ``method`` without tracing it, if a user compiles a whole step."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch._dynamo.disable(method))
        return disabled[0](*args, **kwargs)

    return call
