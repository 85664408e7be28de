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
    """One generator per device: the user's own, or a new one when a device first needs it.

    A new generator takes its seed from torch's global generator, so ``torch.manual_seed`` determines the
    noise. The seed also depends on the rank: processes that set the same seed draw different noise for
    their different examples.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._user_generator = generator
        self._generators: dict[str, torch.Generator] = {}
        if generator is not None:
            self._generators[generator.device.type] = generator

    def __call__(self, device: torch.device) -> torch.Generator:
        """Return the generator for a device; raise an error if the user's own is for another device."""
        if device.type not in self._generators:
            if self._user_generator is not None:
                raise OptionError(
                    f"the generator is for {self._user_generator.device.type} but the model runs on "
                    f"{device.type}: pass torch.Generator({device.type!r})."
                )
            seed = int(torch.randint(2**62, ())) ^ _rank()
            self._generators[device.type] = torch.Generator(device).manual_seed(seed)
        return self._generators[device.type]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the states, because not every version of torch can pickle a generator."""
        states = {device: g.get_state() for device, g in self._generators.items()}
        return {"given": self._user_generator is not None, "states": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make generators with the saved states."""
        self._generators = {}
        for device, value in state["states"].items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(value)
        self._user_generator = next(iter(self._generators.values())) if state["given"] else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of every generator, by device, and the rank of this process."""
        states = {device: g.get_state() for device, g in self._generators.items()}
        return {**states, _RANK: torch.tensor(_rank())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a saved state.

        Some trainers save the state of one process for all of them. A process that gets the state of
        another process derives different noise from it.
        """
        states = dict(state)
        saved_rank = int(states.pop(_RANK, _rank()))
        for device, value in states.items():
            generator = self._generators.setdefault(device, torch.Generator(device))
            generator.set_state(value)
            if saved_rank != _rank():
                generator.manual_seed(_draw_seed(generator) ^ _rank())


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))
