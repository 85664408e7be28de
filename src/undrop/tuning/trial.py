"""A trial: two short branches of training, one with more noise or weight decay and one with less.

A branch needs no optimizer. In its first step, each tensor moves along its gradient by the mean length
of its updates in the run. The lengths then fall linearly towards 0, as a learning rate does at the end
of a run. With steps of constant length, the weights of a branch bounce around the values that they would
converge to with smaller steps. If the steps are large, the bouncing changes the validation loss by more
than dropout does, and a trial would compare where its branches happen to be after their last steps.
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
from undrop.tuning.moves import CLEAR_Z


class RecentSteps:
    """The batches of the run's last steps, and the mean length of each tensor's updates."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, Any]] = []
        self._last_weights: list[Tensor] = []
        self._distances: Tensor | None = None  # how far each tensor moved, summed over the updates
        self._updates = 0

    def add(self, weights: Sequence[Tensor], inputs: Any, targets: Any) -> None:
        """Record a batch before its step, and how far the weights moved since the last call.

        With gradient accumulation, the weights change only after some of the steps. A call that finds
        them unchanged does not count as an update.
        """
        now = [w.detach() for w in weights]
        if len(self._last_weights) == len(now):
            torch._foreach_sub_(self._last_weights, now)  # in place, which saves another copy
            moved = _norms(self._last_weights)
            torch._foreach_copy_(self._last_weights, now)
            if bool(moved.any()):
                self._distances = moved if self._distances is None else self._distances + moved
                self._updates += 1
        else:
            self._last_weights = [w.clone() for w in now]
        self.batches.append((inputs, targets))

    @property
    def update_lengths(self) -> Tensor | None:
        """The mean length of each tensor's updates; None if no tensor has moved."""
        return None if self._distances is None else self._distances / self._updates

    def state_dict(self) -> dict[str, Any]:
        """Return the batches, the last weights and the distances."""
        # These keys are in files that users have saved, so they keep their names.
        return {
            "batches": self.batches,
            "before": [w.clone() for w in self._last_weights],
            "path": self._distances,
            "moves": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.batches = [(inputs, targets) for inputs, targets in state["batches"]]
        self._last_weights = [w.clone() for w in state["before"]]
        self._distances, self._updates = state["path"], int(state["moves"])


class TrialResult(NamedTuple):
    """What a trial measures: the benefit of more noise or decay, and whether the model overfits."""

    benefit: Estimate
    """The validation loss with less noise or decay, minus that with more: positive if more helps."""
    gap: Estimate
    """The validation loss minus the training loss, in the branch with less noise or decay.

    It is NaN if there are no training batches or a branch diverged.
    """


def loss_gap(validation: Sequence[float], training: Sequence[float]) -> Estimate:
    """Return the mean validation loss minus the mean training loss, with Welch's interval."""
    difference = fmean(validation) - fmean(training)
    if min(len(validation), len(training)) < 2:
        return Estimate.of(difference, None)
    squared_errors = [(variance(x) / len(x), len(x) - 1.0) for x in (validation, training)]
    squared_error = sum(square for square, _ in squared_errors)
    denominator = sum(square * square / own_freedom for square, own_freedom in squared_errors)
    freedom = squared_error**2 / denominator if denominator else math.inf
    return Estimate.of(difference, math.sqrt(squared_error), freedom)


def run_trial(
    branches: Branches,
    lengths: Tensor,
    set_up_more: Callable[[], list[float]],
    set_up_less: Callable[[], list[float]],
    training_batches: Sequence[tuple[Any, Any]] = (),
) -> TrialResult:
    """Train both branches, and compare their validation losses.

    If one branch diverges, the other one wins with |z| = 2. If both diverge, the benefit is 0.

    Args:
        branches: the model, the batches, the weights and the seed that both branches share.
        lengths: how far each tensor moves in the first step of a branch.
        set_up_more: sets more noise or weight decay, and returns the share of each tensor that weight
            decay removes in the first step.
        set_up_less: sets less noise or weight decay, and returns the same shares.
        training_batches: the batches for the training loss in ``gap``, from the previous trial. The run
            has just trained on the batches of the present trial, which lowers their loss whether the
            model overfits or not.
    """
    validation_batches = branches.evaluation_batches
    with_more = _branch_losses(branches, lengths, set_up_more())
    branches = branches._replace(evaluation_batches=[*validation_batches, *training_batches])
    with_less = _branch_losses(branches, lengths, set_up_less())
    unknown = Estimate.of(math.nan, None)
    if with_more is None or with_less is None:
        # 1 if only the branch with less diverged, -1 if only the one with more, else 0
        sign = float(with_less is None) - float(with_more is None)
        return TrialResult(Estimate.of(sign, 1.0 / CLEAR_Z), unknown)
    n = len(validation_batches)
    validation, training = with_less[:n], with_less[n:]
    benefit = mean_difference([b - a for a, b in zip(with_more, validation, strict=True)])
    return TrialResult(benefit, loss_gap(validation, training) if training else unknown)


def _branch_losses(branches: Branches, lengths: Tensor, decays: list[float]) -> list[float] | None:
    """Train one branch, and return its loss on each evaluation batch; None if one is not finite."""
    n = len(branches.batches)
    factors = iter([1.0 - k / n for k in range(n)])

    def update(gradients: list[Tensor]) -> None:
        factor = next(factors)
        norms = _norms(gradients).clamp_min(torch.finfo(torch.float32).tiny)
        if any(decays):
            torch._foreach_mul_(branches.weights, [1.0 - factor * decay for decay in decays])
        torch._foreach_mul_(gradients, (factor * lengths / norms).tolist())
        torch._foreach_sub_(branches.weights, gradients)

    return branches.losses(update)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([n.float() for n in torch._foreach_norm(list(tensors))])
