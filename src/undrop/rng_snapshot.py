"""What a model draws on its own account, the same in every pass of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor, nn

__all__ = ["RngSnapshot"]


class RngSnapshot:
    """The state of torch's global random generators, for several passes to begin with.

    A model may draw random numbers that are no dropout: stochastic depth, sampled activations. Passes
    whose difference is taken must have the same ones. In u ≈ (F₊ - F₋)/2ε₀ they would else be taken for
    the effect of ε, and 1/2ε₀ times their own size. Other threads draw from the same generators, so
    the state is put back only after a pass that ``drew`` (see ``Interception``).

    As a context manager it puts the state back in the end.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda: list[Tensor] = []
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()
        self._mps: Tensor | None = None
        if torch.backends.mps.is_available():
            self._mps = torch.mps.get_rng_state()

    @classmethod
    def of(cls, model: nn.Module, noise: Callable[[torch.device], torch.Generator]) -> RngSnapshot:
        """The state, after the generator of dropout's noise has taken its seed from it, if it will."""
        for parameter in islice(model.parameters(), 1):
            noise(parameter.device)
        return cls()

    def __enter__(self) -> RngSnapshot:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Put the state back."""
        self.restart()

    def restart(self) -> None:
        """Let the next pass draw what the first one after this state drew."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
