"""The state of every random generator: saved, restored and seeded in one place."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrop.torch_compat import other_accelerator


class RngSnapshot:
    """The state of the global random generators of torch, Python and NumPy, and of a model's own.

    A model may draw random numbers that are not dropout: stochastic depth, sampled activations. Passes
    that are compared must draw the same ones. Otherwise u ≈ (F₊ - F₋)/2ε₀ takes their difference for
    the effect of ε, multiplied by 1/2ε₀. Other threads draw from the same generators, so the state is
    restored only after a pass that ``drew`` (see ``Interception``).

    As a context manager it restores the state at the end of the block.

    Args:
        model: the model whose own generators (attributes of its modules) are saved as well.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._torch = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()
        self._mps: Tensor | None = None
        if torch.backends.mps.is_available():
            self._mps = torch.mps.get_rng_state()
        other = _other_device()
        self._other: Tensor | None = None if other is None else other.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        self._model = model
        self._held_states = [] if model is None else [_state(each) for each in _held_by(model)]
        self._held = [_saved(each) for each in _held_by(model)] if model is not None else []

    def moved(self) -> set[str]:
        """Return which generators have drawn since: "torch", "python", "numpy" and "held"."""
        now = RngSnapshot(self._model)
        moved = set()
        pairs = ((self._torch, now._torch), *zip(self._cuda, now._cuda, strict=False))
        if not all(torch.equal(a, b) for a, b in pairs) or len(self._cuda) != len(now._cuda):
            moved.add("torch")
        if self._mps is not None and now._mps is not None and not torch.equal(self._mps, now._mps):
            moved.add("torch")
        if self._other is not None and now._other is not None:
            moved |= set() if torch.equal(self._other, now._other) else {"torch"}
        if self._python != now._python:
            moved.add("python")
        same = zip(self._numpy, now._numpy, strict=True)
        if not all(np.array_equal(a, b) for a, b in same):
            moved.add("numpy")
        if self._model is not None and self._held_states != now._held_states:
            moved.add("held")
        return moved

    @classmethod
    def of(cls, model: nn.Module, noise: Callable[[torch.device], torch.Generator]) -> RngSnapshot:
        """Take the snapshot after the generator of dropout's noise has drawn its seed, if it will."""
        for parameter in islice(model.parameters(), 1):
            noise(parameter.device)
        return cls(model)

    def __enter__(self) -> RngSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()

    def restart(self) -> None:
        """Restore the state; devices that this machine lacks are left out."""
        torch.set_rng_state(self._torch)
        if self._cuda and len(self._cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(self._mps)
        if self._other is not None:
            _other_device().set_rng_state(self._other)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for restore in self._held:
            restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        version, internal, gauss = self._python
        name, keys, position, has_gauss, cached = self._numpy
        return {
            "torch": self._torch,
            "cuda": self._cuda,
            "mps": self._mps,
            "python": {"version": version, "state": torch.tensor(internal), "gauss": gauss},
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RngSnapshot:
        """Return the snapshot that ``state_dict`` was called on."""
        snapshot = cls.__new__(cls)
        snapshot._held, snapshot._held_states = [], []
        snapshot._model, snapshot._other = None, None
        snapshot._torch, snapshot._cuda, snapshot._mps = state["torch"], state["cuda"], state["mps"]
        python, numpy = state["python"], state["numpy"]
        internal = tuple(python["state"].tolist())
        snapshot._python = (python["version"], internal, python["gauss"])
        keys = numpy["keys"].numpy().astype(np.uint32)
        rest = (numpy["position"], numpy["has_gauss"], numpy["cached"])
        snapshot._numpy = (numpy["name"], keys, *rest)
        return snapshot


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_current(seed: int) -> None:
    """Seed the global generators that exist by now; a snapshot can put them back."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    other = _other_device()
    if other is not None:
        other.manual_seed_all(seed)  # as torch.manual_seed does
    random.seed(seed)
    np.random.seed(seed)


def derive_seed(base: int, *purpose: str | int) -> int:
    """Return a seed for one purpose that is independent of the seeds for all others."""
    text = "/".join(str(part) for part in (base, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _other_device() -> Any:
    """Return torch's module for an accelerator that is neither CUDA nor MPS; None without one."""
    found = other_accelerator()
    return None if found is None else torch.get_device_module(found)


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _held_by(model: nn.Module) -> Iterator[Any]:
    """Yield every generator that is an attribute of a module, or in a list or dict there."""
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            values = value if isinstance(value, (list, tuple)) else (value,)
            if isinstance(value, dict):
                values = tuple(value.values())
            for each in values:
                if isinstance(each, _KINDS) and id(each) not in seen:
                    seen.add(id(each))
                    yield each


def _state(generator: Any) -> str:
    """Return the state that a generator has now, as something to compare."""
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        name, keys, *rest = generator.get_state(legacy=True)
        return str((name, keys.tolist(), rest))  # type: ignore[union-attr]
    return str(generator.bit_generator.state)


def _saved(generator: Any) -> Callable[[], Any]:
    """Return a function that restores the state that a generator has now."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    bits = generator.bit_generator
    state = bits.state
    return lambda: setattr(bits, "state", state)
