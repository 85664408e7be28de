"""Save and restore the state of random generators, and seed them."""

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


class _GlobalGenerator(NamedTuple):
    """The functions that read, write and seed a global random generator."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _global_generators() -> dict[str, _GlobalGenerator]:
    """Return the global random generators that exist so far in this process."""
    generators = {
        "torch": _GlobalGenerator(
            torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
        ),
        "python": _GlobalGenerator(random.getstate, random.setstate, random.seed),
        "numpy": _GlobalGenerator(np.random.get_state, np.random.set_state, np.random.seed),
    }
    if torch.cuda.is_initialized():
        cuda = torch.cuda
        generators["cuda"] = _GlobalGenerator(
            cuda.get_rng_state_all, _set_cuda_states, cuda.manual_seed_all
        )
    if torch.backends.mps.is_available():
        mps = torch.mps
        generators["mps"] = _GlobalGenerator(mps.get_rng_state, mps.set_rng_state, mps.manual_seed)
    device = other_accelerator()
    if device is not None:
        other: Any = torch.get_device_module(device)
        generators["other"] = _GlobalGenerator(
            other.get_rng_state, other.set_rng_state, other.manual_seed_all
        )
    return generators


def _set_cuda_states(states: list[Tensor]) -> None:
    """Set the states of all GPUs, unless they come from a machine with another number of GPUs."""
    if len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)


_NUMPY_STATE = ("name", "keys", "position", "has_gauss", "cached")
"""The names of the entries of NumPy's legacy state, in its order."""


class RngSnapshot:
    """The state of the global random generators of torch, Python and NumPy, and of a model's own.

    A model may draw random numbers that are not dropout: stochastic depth, sampled activations. Passes
    that are compared must draw the same numbers. Otherwise u ≈ (F₊ - F₋)/2ε₀ would count the difference
    of the numbers, multiplied by 1/2ε₀, as an effect of ε.

    As a context manager, a snapshot restores the state at the end of the block. Restoring also undoes
    the draws of other threads, so where these matter, call :meth:`restore` only if
    :meth:`changed_generators` is not empty.

    Args:
        model: a model whose own generators (attributes of its modules) are saved as well.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._global_states = _get_global_states()
        self._model_states = [(g, _get_state(g)) for g in _generators_of(model)]

    def changed_generators(self) -> set[str]:
        """Return which of "torch", "python", "numpy" and "model" have drawn since the snapshot."""
        changed = {
            name if name in ("python", "numpy") else "torch"
            for name, state in _get_global_states().items()
            if not _equal(self._global_states.get(name), state)
        }
        if any(not _equal(state, _get_state(g)) for g, state in self._model_states):
            changed.add("model")
        return changed

    @classmethod
    def after_seeding(
        cls, model: nn.Module, generator_for: Callable[[torch.device], torch.Generator]
    ) -> RngSnapshot:
        """Let the noise generator draw its seed from the global generator, then take a snapshot.

        In a snapshot from before, the seed would count as a random number of the model.
        """
        for parameter in islice(model.parameters(), 1):
            generator_for(parameter.device)
        return cls(model)

    def __enter__(self) -> RngSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the state of every generator that this machine has."""
        for name, generator in _global_generators().items():
            if name in self._global_states:
                generator.set_state(self._global_states[name])
        for model_generator, state in self._model_states:
            _set_state(model_generator, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        version, internal, gauss = self._global_states["python"]
        numpy = dict(zip(_NUMPY_STATE, self._global_states["numpy"], strict=True))
        return {
            "torch": self._global_states["torch"],
            "cuda": self._global_states.get("cuda", []),
            "mps": self._global_states.get("mps"),
            "other": self._global_states.get("other"),
            "python": {"version": version, "state": torch.tensor(internal), "gauss": gauss},
            "numpy": {**numpy, "keys": torch.from_numpy(numpy["keys"].astype(np.int64))},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RngSnapshot:
        """Rebuild a snapshot from its ``state_dict``."""
        snapshot = cls.__new__(cls)
        python = state["python"]
        numpy = {**state["numpy"], "keys": state["numpy"]["keys"].numpy().astype(np.uint32)}
        snapshot._global_states = {
            **{name: value for name, value in state.items() if value is not None},
            "python": (python["version"], tuple(python["state"].tolist()), python["gauss"]),
            "numpy": tuple(numpy[name] for name in _NUMPY_STATE),
        }
        snapshot._model_states = []
        return snapshot


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_current(seed: int) -> None:
    """Seed the global generators that exist so far, and no others: a snapshot can restore them."""
    for generator in _global_generators().values():
        generator.seed(seed)


def derive_seed(base: int, *purpose: str | int) -> int:
    """Return a seed for a purpose, independent of the seeds for all other purposes."""
    text = "/".join(str(part) for part in (base, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _generators_of(model: nn.Module | None) -> Iterator[Any]:
    """Yield every generator that is an attribute of a module, or in a list or dict of a module."""
    seen: set[int] = set()
    for module in () if model is None else model.modules():
        for attribute in vars(module).values():
            values = attribute.values() if isinstance(attribute, dict) else attribute
            for value in values if isinstance(attribute, dict | list | tuple) else [attribute]:
                if isinstance(value, _GENERATOR_TYPES) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _get_global_states() -> dict[str, Any]:
    return {name: generator.get_state() for name, generator in _global_generators().items()}


def _get_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states are equal; a state is numbers, tensors or arrays, also in containers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and any(isinstance(x, Tensor | np.ndarray) for x in a):
        return b is not None and len(a) == len(b) and all(map(_equal, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
