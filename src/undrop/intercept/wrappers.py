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

_WRAPPED_NAMES = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "_undrop_policy",
)
"""The names of a wrapped module within its wrapper."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``, because compiled code hides its dropout.

    Raises:
        OptionError: for anything but a module, for ``nn.DataParallel``, whose threads no interception
            reaches, and for a model in TorchScript, which runs no Python.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be an nn.Module, got {_description(model)}.")
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
        wrapped = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            wrapped = model.module
        if wrapped is None:
            return model
        model = wrapped


def _description(x: object) -> str:
    if isinstance(x, type):
        return f"the class {x.__name__}: pass {x.__name__}(…)"
    return f"{type(x).__name__}: wrap it in one"


def chosen_backend(model: nn.Module) -> Backend | None:
    """Return the backend with which the user compiled the model or a part of it; None if neither.

    The user can call ``torch.compile`` on a module or on a method, or compile a module in place.
    """
    if "torch._dynamo" not in sys.modules or not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        forward = getattr(type(module), "forward", None)  # TorchScript has none
        for value in (*vars(module).values(), forward):
            if callable(value) and _is_compiled(value):
                return backend_of(value)
    return None


def _is_compiled(function: object) -> bool:
    """Return whether ``torch.compile`` made the function."""
    marked = hasattr(function, "_torchdynamo_orig_callable")  # torch.compiler.disable also sets it
    return marked and not getattr(function, "_torchdynamo_disable", False)


def module_paths(model: nn.Module) -> dict[int, str]:
    """Return the path of every module, by its id, without the names that wrappers add."""
    return {id(module): _without_wrappers(name) for name, module in bare(model).named_modules()}


def frames() -> Iterator[FrameType]:
    """Yield the frames of the Python stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_module(paths: dict[int, str]) -> nn.Module | None:
    """Return the innermost running module: of the modules in ``paths``, the last on the Python stack.

    Reading the stack needs no hooks on the model, so there is nothing to restore, and it works in
    every thread and under every function transform.
    """
    owners = (frame.f_locals.get("self") for frame in frames())
    return next((x for x in owners if isinstance(x, nn.Module) and id(x) in paths), None)


def running_path(paths: dict[int, str]) -> str:
    """Return the path of the innermost running module; "" for the model itself."""
    module = running_module(paths)
    return "" if module is None else paths[id(module)]


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED_NAMES)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP, of either version, shards parameters of the model over processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False  # without this import, no model is sharded
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
