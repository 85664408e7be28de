"""The process that a run trains in: its device, precision, threads and signals, and its versions."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from undrop.errors import ConfigError
from undrop.torch_compat import portable_lstm

if TYPE_CHECKING:
    from undrop.lab.train.config import TrainConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OUT_OF_MEMORY = (
    "can't allocate memory",  # a RuntimeError on the CPU
    "out of memory",
    "storage size calculation overflowed",
    "overflow when unpacking",  # a TypeError
)


def device_of(config: TrainConfig) -> torch.device:
    """Return the device that the config asks for; see :func:`find_device`."""
    return find_device(config.device, "train.device")


def find_device(name: str, setting: str) -> torch.device:
    """Return the device of that name; ``auto`` is the fastest available.

    Raises:
        ConfigError: if the machine has no such device; ``setting`` is where the name stands.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        names = ", ".join(available)
        raise ConfigError(f"{setting} is {name!r}, but this machine has only {names}.")
    return torch.device(name)


@contextlib.contextmanager
def autocast(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Autocast to bfloat16 within the block, if the config asks for it."""
    if config.precision != "bfloat16":
        yield
        return
    with torch.autocast(device.type, torch.bfloat16), portable_lstm():
        yield


@contextlib.contextmanager
def torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Set the number of threads and, on a GPU, deterministic algorithms; restore both at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


class Interrupts:
    """A signal handler that remembers which signal asked the process to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one interrupts the process immediately."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


@contextlib.contextmanager
def catch_signals() -> Iterator[Interrupts]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the current step.

    Only the main thread can handle signals; in any other thread none is ever received.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = {number: signal.signal(number, interrupts) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, or that a size is beyond any memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError) or any(
        sign in text for sign in _OUT_OF_MEMORY
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result."""
    packages = {name: version(name) for name in ("undrop", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def machine(device: torch.device | str, processes: int = 1) -> dict[str, Any]:
    """Return a description of the machine and of the part of it that a run uses."""
    return {
        "platform": platform.platform(),
        "device": str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }
