"""The device that the math tests run on: ``UNDROP_TEST_DEVICE``, the CPU by default.

``cuda`` and ``mps`` are devices of torch. ``stand_in`` is the device in ``tests/stand_in``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import stand_in
import undrop

if os.environ.get("UNDROP_TEST_DEVICE") == stand_in.NAME:
    stand_in.install()
DEVICE = torch.device(os.environ.get("UNDROP_TEST_DEVICE") or "cpu")

_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = str(Path(undrop.__file__).parent)
_MODELS = tuple(str(Path(_LIBRARY, *folder)) for folder in (("nn",), ("lab", "models")))


def new_generator(seed: int) -> torch.Generator:
    """A random generator of the device."""
    return torch.Generator(DEVICE).manual_seed(seed)


class OnDevice(TorchFunctionMode):
    """Puts the tensors and models that a test makes on the device, but not those that undrop makes.

    So a tensor that undrop makes without naming a device is on the CPU, as it is for a user, and an
    operation with a tensor on the device fails. Tests draw random numbers on the CPU, so their data are
    the same on every device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None or _in_undrop():
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs, device=kwargs["generator"].device)
        leaf = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs).to(DEVICE)
        return made.requires_grad_() if leaf else made


def _in_undrop() -> bool:
    """Whether the code that called torch is undrop's, but for its models, which users move."""
    frame = sys._getframe(2)
    while frame is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(_LIBRARY) and not file.startswith(_MODELS)


def _passes_on(code: Any) -> bool:
    """Whether a function only hands on what its caller asked for."""
    return code.co_filename.startswith(_TORCH) or code.co_name == "__torch_function__"
