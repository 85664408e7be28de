"""What a result was made with: package versions and the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

__all__ = ["machine", "versions"]


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that bear on a result."""
    packages = {name: version(name) for name in ("undrop", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def machine(device: torch.device | str, processes: int = 1) -> dict[str, Any]:
    """The machine, and what of it was used."""
    return {
        "platform": platform.platform(),
        "device": str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }
