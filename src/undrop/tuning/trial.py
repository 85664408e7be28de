"""A trial of a tuner: it repeats the last steps of the run in two branches.

It needs no optimizer: each tensor moves along its gradient as far as a step of the run moved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from undrop.diagnosis.measure.branches import Branches
from undrop.tuning.history import Benefit
from undrop.tuning.rule import CLEAR


class Window:
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
        now = [w.detach().clone() for w in weights]
        if len(self._before) == len(now):
            moved = _norms(torch._foreach_sub(now, self._before))
            if bool(moved.any()):
                self._path = moved if self._path is None else self._path + moved
                self._moves += 1
        self._before = now
        self.batches.append((inputs, targets))

    @property
    def lengths(self) -> Tensor | None:
        """The mean distance that each tensor moved in a step; None if no tensor has moved."""
        return None if self._path is None else self._path / self._moves

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {
            "batches": self.batches,
            "before": self._before,
            "path": self._path,
            "moves": self._moves,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.batches = [(inputs, targets) for inputs, targets in state["batches"]]
        self._before, self._path = list(state["before"]), state["path"]
        self._moves = int(state["moves"])


def difference(
    branches: Branches,
    lengths: Tensor,
    more: Callable[[], list[float]],
    less: Callable[[], list[float]],
) -> Benefit:
    """Return L_val with less minus L_val with more, over the validation batches: positive if more helps.

    A branch that diverges loses clearly. If both diverge, the difference is 0.

    Args:
        branches: what both train on.
        lengths: how far each tensor moves in one step.
        more: sets up the objective for one branch, and returns the share of each tensor that weight
            decay removes in a step.
        less: does the same for the other branch.
    """

    def losses(setting: Callable[[], list[float]]) -> list[float] | None:
        decays = setting()

        def move(gradients: list[Tensor]) -> None:
            norms = _norms(gradients).clamp_min(torch.finfo(torch.float32).tiny)
            if any(decays):
                torch._foreach_mul_(branches.weights, [1.0 - decay for decay in decays])
            torch._foreach_mul_(gradients, (lengths / norms).tolist())
            torch._foreach_sub_(branches.weights, gradients)

        return branches.losses(move)

    with_more, with_less = losses(more), losses(less)
    if with_more is None or with_less is None:
        return Benefit(float(with_less is None) - float(with_more is None), 1.0 / CLEAR)
    return Benefit.of([b - a for a, b in zip(with_more, with_less, strict=True)])


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([n.float() for n in torch._foreach_norm(list(tensors))])
