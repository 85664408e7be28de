"""Short training runs from the same weights, compared by their validation loss.

Branches start from a model's present weights, train on the same batches with the same random numbers,
and differ in one thing: the noise of one site or of all sites, or weight decay. So most of the noise of
training cancels in the difference of their validation losses. The difference shows the explicit and the
implicit effect of dropout together, at any p.
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
    """The model, data and random numbers that the branches of one comparison share."""

    objective: Objective
    model: nn.Module
    weights: list[Tensor]
    """The weights that training changes."""
    batches: Sequence[tuple[Any, Any]]
    """The training batches of a branch, one for each step."""
    evaluation_batches: Sequence[tuple[Any, Any]]
    """The batches on which the losses are computed after the last step, usually validation batches."""
    seed: int
    """The seed of the random numbers of every branch."""

    def losses(self, move: Move) -> list[float] | None:
        """Train one branch, and return its loss without noise on each batch; None if one is not finite.

        The weights, the buffers, the random state and the objective's state are restored.
        """
        with self._preserve_state():
            try:
                for inputs, targets in self.batches:
                    step = self.objective(self.model, inputs, targets)
                    step_gradients = gradients(step.total, self.weights)
                    with torch.no_grad():
                        move(step_gradients)
                losses = [
                    loss_without_noise(self.objective, self.model, *batch)
                    for batch in self.evaluation_batches
                ]
            except NonFiniteError:
                return None
        return losses if all(map(math.isfinite, losses)) else None

    @contextmanager
    def _preserve_state(self) -> Iterator[None]:
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
