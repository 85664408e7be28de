"""Look inside the wrappers of a model, and find which module is running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from undrop.errors import OptionError
from undrop.torch_compat import Backend, backend_of

_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_undrop_policy")
"""The names under which wrappers hold what they wrap."""


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``: compiled code hides its dropout.

    Raises:
        OptionError: for anything but a module, for ``nn.DataParallel``, whose threads no interception
            reaches, and for a model in TorchScript, which runs no Python.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be an nn.Module, got {_not_a_module(model)}.")
    if isinstance(model, DataParallel):
        raise OptionError(
            "nn.DataParallel runs the model in its own threads, where undrop sees no dropout: use "
            "DistributedDataParallel, one process per device (torchrun)."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            "a model in TorchScript hides its dropout: pass the module that it was made from."
        )
    return model._modules.get("_orig_mod") or model


def bare(model: nn.Module) -> nn.Module:
    """Return the module within ``torch.compile`` and DistributedDataParallel."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _not_a_module(thing: object) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}: pass {thing.__name__}(…)"
    return f"{type(thing).__name__}: wrap it in one"


def chosen_backend(model: nn.Module) -> Backend | None:
    """Return the backend with which the user compiled the model or a part of it; None without one.

    The user calls ``torch.compile`` on a module or a method, or compiles a module in place.
    """
    if "torch._dynamo" not in sys.modules or not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        own = getattr(type(module), "forward", None)  # none in TorchScript
        for value in (*vars(module).values(), own):
            if callable(value) and _is_compiled(value):
                return backend_of(value)
    return None


def _is_compiled(function: object) -> bool:
    """Return whether ``torch.compile`` made a function; ``torch.compiler.disable`` marks it as well."""
    marked = hasattr(function, "_torchdynamo_orig_callable")
    return marked and not getattr(function, "_torchdynamo_disable", False)


def module_paths(model: nn.Module) -> dict[int, str]:
    """The path of every module by its id, without the names that wrappers add."""
    return {id(module): _without_wrappers(name) for name, module in bare(model).named_modules()}


def frames() -> Iterator[FrameType]:
    """The frames of the Python stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_module(names: dict[int, str]) -> nn.Module | None:
    """Return the innermost of the named modules that have a method on the Python stack.

    Reading the stack needs no hooks on the model, so there is nothing to restore, and it works in
    every thread and under every function transform.
    """
    owners = (frame.f_locals.get("self") for frame in frames())
    return next((x for x in owners if isinstance(x, nn.Module) and id(x) in names), None)


def running_path(names: dict[int, str]) -> str:
    """Return the path of the innermost module that runs; "" for the model itself."""
    module = running_module(names)
    return "" if module is None else names[id(module)]


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters of the model are sharded over processes by FSDP, of either version."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False  # without this import, no model is sharded
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
