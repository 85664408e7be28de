"""Short training runs from the same weights, compared by their validation loss.

Branches start from a model's current weights, train on the same batches with the same random numbers,
and differ in one thing: the noise of one site or of all sites, or weight decay. So most of the noise of
training cancels in the difference of their validation losses. What is left is the effect of both parts
of dropout, explicit and implicit, at any p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.errors import NonFiniteError
from undrop.intercept import keep_buffers, no_noise, uncompiled
from undrop.objectives import Objective
from undrop.rng_snapshot import RngSnapshot, seed_current

Move = Callable[[list[Tensor]], None]
"""Moves the weights by one step, given their gradients."""


def loss_without_noise(objective: Objective, model: nn.Module, inputs: Any, targets: Any) -> float:
    """Return the objective's loss on a batch, with every dropout off."""
    batch = objective.loss.prepare(uncompiled(model), inputs, targets)
    with torch.no_grad():
        return float(objective.forward_and_loss(batch, no_noise)[1])


class Branches(NamedTuple):
    """What the branches of one comparison share."""

    objective: Objective
    model: nn.Module
    weights: list[Tensor]
    """The weights that training changes."""
    batches: Sequence[tuple[Any, Any]]
    """The batches that a branch trains on, one step each."""
    held: Sequence[tuple[Any, Any]]
    """The batches on which the losses are computed after the last step, usually validation batches."""
    seed: int
    """The seed of the random numbers that every branch draws."""

    def losses(self, move: Move) -> list[float] | None:
        """Train one branch, and return its losses without noise; None if they are not finite.

        The weights, the buffers, the random state and the objective's state are restored.
        """
        with self._unchanged():
            try:
                for inputs, targets in self.batches:
                    step = self.objective(self.model, inputs, targets)
                    found = gradients(step.total, self.weights)
                    with torch.no_grad():
                        move(found)
                held = [
                    loss_without_noise(self.objective, self.model, *batch) for batch in self.held
                ]
            except NonFiniteError:
                return None
        return held if all(map(math.isfinite, held)) else None

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        weights = [w.detach().clone() for w in self.weights]
        state = self.objective.state_dict()
        with RngSnapshot(self.model), keep_buffers(uncompiled(self.model)):
            seed_current(self.seed)
            try:
                yield
            finally:
                with torch.no_grad():
                    torch._foreach_copy_(self.weights, weights)
                self.objective.load_state_dict(state)
