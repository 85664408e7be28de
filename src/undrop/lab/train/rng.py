"""Every global random generator: seeded, captured and put back as one."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "derive", "isolated", "restore", "seed"]


def derive(base: int, *purpose: str | int) -> int:
    """A seed for one purpose, as good as independent of those for any other."""
    text = "/".join(str(part) for part in (base, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def seed(value: int) -> None:
    """Seed torch (all devices), Python and NumPy."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def capture() -> dict[str, Any]:
    """The state of all global generators, as a tree of plain values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        "python": {"version": version, "state": torch.tensor(internal), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def restore(state: dict[str, Any]) -> None:
    """Put the state of all global generators back; devices that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if torch.backends.mps.is_available() and state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )


@contextlib.contextmanager
def isolated(state: dict[str, Any] | None = None) -> Iterator[None]:
    """Go on from ``state`` (or from here) in the block; outside of it nothing was drawn."""
    outside = capture()
    if state is not None:
        restore(state)
    try:
        yield
    finally:
        restore(outside)
