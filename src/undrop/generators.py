"""The random generators of an objective's noise, whose state can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undrop.errors import OptionError

_RANK = "rank"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Generators:
    """One generator per device: the user's own, or one that is made when it is first needed.

    A generator made here is seeded from torch's global one, so ``torch.manual_seed`` determines it. With
    several processes, each gets its own noise even if all set the same seed, because their examples
    differ too.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._given = generator
        self._generators: dict[str, torch.Generator] = {}
        if generator is not None:
            self._generators[generator.device.type] = generator

    def __call__(self, device: torch.device) -> torch.Generator:
        """Return the generator for a device; refuse a user's generator for another device."""
        if device.type not in self._generators:
            if self._given is not None:
                raise OptionError(
                    f"the generator is for {self._given.device.type} but the model runs on "
                    f"{device.type}: pass torch.Generator({device.type!r})."
                )
            seed = int(torch.randint(2**62, ())) ^ _rank()
            self._generators[device.type] = torch.Generator(device).manual_seed(seed)
        return self._generators[device.type]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the states, because not every version of torch can pickle a generator."""
        states = {device: g.get_state() for device, g in self._generators.items()}
        return {"given": self._given is not None, "states": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make generators with the saved states."""
        self._generators = {}
        for device, value in state["states"].items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(value)
        self._given = next(iter(self._generators.values())) if state["given"] else None

    def state_dict(self) -> dict[str, Tensor]:
        """The state of every generator, by device, and the number of this process."""
        states = {device: g.get_state() for device, g in self._generators.items()}
        return {**states, _RANK: torch.tensor(_rank())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a saved state.

        Some trainers save the state of one process for all of them. A process that gets the state of
        another one derives its own noise from it.
        """
        foreign = int(state.get(_RANK, torch.tensor(_rank()))) != _rank()
        for device, value in state.items():
            if device == _RANK:
                continue
            generator = self._generators.setdefault(device, torch.Generator(device))
            generator.set_state(value)
            if foreign:
                generator.manual_seed(_drawn(generator) ^ _rank())


def _drawn(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))
