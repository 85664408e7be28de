"""Where and in which precision a run computes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from undrop.errors import ConfigError
from undrop.lab.train.config import TrainConfig
from undrop.torch_compat import portable_lstm

__all__ = ["autocast", "device_of", "settled"]


def device_of(config: TrainConfig) -> torch.device:
    """The device asked for; ``auto`` is the fastest there is.

    Raises:
        ConfigError: if there is none of the kind asked for.
    """
    here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if config.device == "auto":
        return torch.device(next(name for name, available in here.items() if available))
    if not here[config.device]:
        there = ", ".join(name for name, available in here.items() if available)
        raise ConfigError(f"train.device is {config.device!r}, but this machine has only {there}.")
    return torch.device(config.device)


@contextlib.contextmanager
def autocast(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """bfloat16 where that is safe, if it was asked for."""
    if config.precision != "bfloat16":
        yield
        return
    with torch.autocast(device.type, torch.bfloat16), portable_lstm():
        yield


@contextlib.contextmanager
def settled(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """The number of threads asked for and, on a GPU, algorithms that give the same bits each time.

    Both are the process's own affair, and are put back.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
