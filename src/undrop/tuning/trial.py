"""A trial of a tuner: it repeats the last steps of the run in two branches.

It needs no optimizer: each tensor moves along its gradient, in the first step as far as a step of the
run moved it. The steps then fall linearly to 0, as a learning rate does at the end of a run. With
steps of constant length, the weights of a branch bounce around the values that they converge to. If the
steps are large, this changes the validation loss by more than dropout does, and a trial would compare
where its branches happen to be after their last steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.diagnosis.measure.branches import Branches
from undrop.diagnosis.measure.estimates import Estimate
from undrop.tuning.history import mean_difference
from undrop.tuning.rule import CLEAR


class RecentSteps:
    """The last steps of the run: their batches, and how far each tensor moved in a step."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, Any]] = []
        self._before: list[Tensor] = []
        self._path: Tensor | None = None
        self._moves = 0

    def add(self, weights: Sequence[Tensor], inputs: Any, targets: Any) -> None:
        """Record one step before it is taken.

        With gradient accumulation, only steps of the objective after which the weights have changed
        count as moves.
        """
        now = [w.detach() for w in weights]
        if len(self._before) == len(now):
            torch._foreach_sub_(self._before, now)
            moved = _norms(self._before)
            torch._foreach_copy_(self._before, now)
            if bool(moved.any()):
                self._path = moved if self._path is None else self._path + moved
                self._moves += 1
        else:
            self._before = [w.clone() for w in now]
        self.batches.append((inputs, targets))

    @property
    def lengths(self) -> Tensor | None:
        """The mean distance that each tensor moved in a step; None if no tensor has moved."""
        return None if self._path is None else self._path / self._moves

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {
            "batches": self.batches,
            "before": [w.clone() for w in self._before],
            "path": self._path,
            "moves": self._moves,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.batches = [(inputs, targets) for inputs, targets in state["batches"]]
        self._before, self._path = [w.clone() for w in state["before"]], state["path"]
        self._moves = int(state["moves"])


class Outcome(NamedTuple):
    """The result of a trial."""

    benefit: Estimate
    """The validation loss with less noise or decay, minus that with more: positive if more helps."""
    gap: Estimate
    """How far the validation loss is above the loss on earlier training batches; NaN without them."""


def gap(held: Sequence[float], trained: Sequence[float]) -> Estimate:
    """Return how far the mean validation loss is above the training loss, by Welch's t."""
    value = fmean(held) - fmean(trained)
    if min(len(held), len(trained)) < 2:
        return Estimate.of(value, None)
    parts = [(variance(x) / len(x), len(x) - 1.0) for x in (held, trained)]
    total = sum(v for v, _ in parts)
    below = sum(v * v / n for v, n in parts)
    return Estimate.of(value, math.sqrt(total), total**2 / below if below else math.inf)


def compare(
    branches: Branches,
    lengths: Tensor,
    more: Callable[[], list[float]],
    less: Callable[[], list[float]],
    earlier: Sequence[tuple[Any, Any]] = (),
) -> Outcome:
    """Train both branches, and compare their losses.

    A branch that diverges loses clearly. If both diverge, the difference is 0.

    Args:
        branches: what both train on.
        lengths: how far each tensor moves in the first step.
        more: sets up the objective for one branch, and returns the share of each tensor that weight
            decay removes in the first step.
        less: does the same for the other branch.
        earlier: training batches for the gap. The run has just trained on those of the branches, which
            lowers their loss whether the model overfits or not.
    """

    def losses(branches: Branches, setting: Callable[[], list[float]]) -> list[float] | None:
        decays, n = setting(), len(branches.batches)
        factors = iter([1.0 - k / n for k in range(n)])

        def move(gradients: list[Tensor]) -> None:
            factor = next(factors)
            norms = _norms(gradients).clamp_min(torch.finfo(torch.float32).tiny)
            if any(decays):
                torch._foreach_mul_(branches.weights, [1.0 - factor * decay for decay in decays])
            torch._foreach_mul_(gradients, (factor * lengths / norms).tolist())
            torch._foreach_sub_(branches.weights, gradients)

        return branches.losses(move)

    n, held = len(branches.held), [*branches.held, *earlier]
    with_more, with_less = losses(branches, more), losses(branches._replace(held=held), less)
    if with_more is None or with_less is None:
        lost = float(with_less is None) - float(with_more is None)
        return Outcome(Estimate.of(lost, 1.0 / CLEAR), Estimate.of(math.nan, None))
    benefit = mean_difference([b - a for a, b in zip(with_more, with_less[:n], strict=True)])
    found = gap(with_less[:n], with_less[n:]) if earlier else Estimate.of(math.nan, None)
    return Outcome(benefit, found)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([n.float() for n in torch._foreach_norm(list(tensors))])
