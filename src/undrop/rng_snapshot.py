"""Save, restore and seed the state of every random generator."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from undrop.torch_compat import other_accelerator


class _Source(NamedTuple):
    """A global source of random numbers: how to read its state, write it, and seed it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _sources() -> dict[str, _Source]:
    """Return the global sources that this process has so far."""
    found = {
        "torch": _Source(
            torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
        ),
        "python": _Source(random.getstate, random.setstate, random.seed),
        "numpy": _Source(np.random.get_state, np.random.set_state, np.random.seed),
    }
    if torch.cuda.is_initialized():
        cuda = torch.cuda
        found["cuda"] = _Source(cuda.get_rng_state_all, _put_cuda, cuda.manual_seed_all)
    if torch.backends.mps.is_available():
        mps = torch.mps
        found["mps"] = _Source(mps.get_rng_state, mps.set_rng_state, mps.manual_seed)
    device = other_accelerator()
    if device is not None:
        other: Any = torch.get_device_module(device)
        found["other"] = _Source(other.get_rng_state, other.set_rng_state, other.manual_seed_all)
    return found


def _put_cuda(states: list[Tensor]) -> None:
    if len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)


class RngSnapshot:
    """The state of the global random generators of torch, Python and NumPy, and of a model's own.

    A model may draw random numbers that are not dropout: stochastic depth, sampled activations. Passes
    that are compared must draw the same ones. Otherwise u ≈ (F₊ - F₋)/2ε₀ would count their difference,
    multiplied by 1/2ε₀, as an effect of ε. Other threads draw from the same generators, so restore the
    state only if ``changed_generators()`` reports a change.

    As a context manager, it restores the state at the end of the block.

    Args:
        model: the model whose own generators (attributes of its modules) are saved as well.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._states = {name: source.get() for name, source in _sources().items()}
        self._held = [(each, _state(each)) for each in _held_by(model)]

    def changed_generators(self) -> set[str]:
        """Return the names of the generators that have advanced since the snapshot.

        They are any of "torch", "python", "numpy" and "model".
        """
        now = {name: source.get() for name, source in _sources().items()}
        moved = {
            name if name in ("python", "numpy") else "torch"
            for name, state in now.items()
            if not _same(self._states.get(name), state)
        }
        if any(not _same(state, _state(each)) for each, state in self._held):
            moved.add("model")
        return moved

    @classmethod
    def of(
        cls, model: nn.Module, generator_for: Callable[[torch.device], torch.Generator]
    ) -> RngSnapshot:
        """Take a snapshot after the noise generator has drawn its seed from the global generator."""
        for parameter in islice(model.parameters(), 1):
            generator_for(parameter.device)
        return cls(model)

    def __enter__(self) -> RngSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the state of every generator that this machine has."""
        for name, source in _sources().items():
            if name in self._states:
                source.put(self._states[name])
        for each, state in self._held:
            if isinstance(each, random.Random):
                each.setstate(state)
            elif isinstance(each, np.random.Generator):
                each.bit_generator.state = state
            else:
                each.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        version, internal, gauss = self._states["python"]
        name, keys, position, has_gauss, cached = self._states["numpy"]
        return {
            "torch": self._states["torch"],
            "cuda": self._states.get("cuda", []),
            "mps": self._states.get("mps"),
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
        """Rebuild a snapshot from its ``state_dict``."""
        snapshot = cls.__new__(cls)
        python, numpy = state["python"], state["numpy"]
        keys = numpy["keys"].numpy().astype(np.uint32)
        snapshot._states = {
            "torch": state["torch"],
            "python": (python["version"], tuple(python["state"].tolist()), python["gauss"]),
            "numpy": (
                *(numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]),
            ),
            **{name: state[name] for name in ("cuda", "mps") if state[name] not in (None, [])},
        }
        snapshot._held = []
        return snapshot


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_current(seed: int) -> None:
    """Seed the global generators that exist so far; a snapshot can restore them."""
    for source in _sources().values():
        source.seed(seed)


def derive_seed(base: int, *purpose: str | int) -> int:
    """Return a seed for one purpose that is independent of the seeds for all others."""
    text = "/".join(str(part) for part in (base, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _held_by(model: nn.Module | None) -> Iterator[Any]:
    """Yield every generator that is an attribute of a module, or in a list or dict there."""
    seen: set[int] = set()
    for module in () if model is None else model.modules():
        for value in vars(module).values():
            values = value if isinstance(value, (list, tuple)) else (value,)
            if isinstance(value, dict):
                values = tuple(value.values())
            for each in values:
                if isinstance(each, _KINDS) and id(each) not in seen:
                    seen.add(id(each))
                    yield each


def _state(generator: Any) -> Any:
    """Return the state that a generator has now."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _same(a: Any, b: Any) -> bool:
    """Return whether two states are equal: numbers, tensors and arrays, perhaps in containers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and any(isinstance(x, Tensor | np.ndarray) for x in a):
        return b is not None and len(a) == len(b) and all(map(_same, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
