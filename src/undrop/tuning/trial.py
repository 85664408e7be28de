"""What more or less of something does: the last steps of the run again, twice, and the validation loss.

Both branches of a trial begin at the weights of the run, train on the same batches with the same random
numbers, and differ in one thing: the noise of one site or of all sites, or weight decay. So most of the
noise of training cancels in the difference of their validation losses, and what is left has both parts
of dropout, explicit and implicit, at any p. No optimizer is asked for: each tensor moves along its
gradient by as much as a step of the run moved it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.errors import NonFiniteError
from undrop.intercept import Batch, keep_buffers, no_noise, unwrapped
from undrop.objectives import Objective
from undrop.rng_snapshot import RngSnapshot, seed_current


class Window:
    """The last steps of the run: their batches, and how far each tensor moved in a step."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, Any]] = []
        self._before: list[Tensor] = []
        self._path: Tensor | None = None
        self._moves = 0

    def add(self, weights: Sequence[Tensor], inputs: Any, targets: Any) -> None:
        """Take in one step, before it happens.

        Gradients may add up over several steps of the objective: only those after which the weights
        have changed count as moves.
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
        """How far each tensor moved in one step, on average; None if none has moved."""
        return None if self._path is None else self._path / self._moves

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "batches": self.batches,
            "before": self._before,
            "path": self._path,
            "moves": self._moves,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.batches = [(inputs, targets) for inputs, targets in state["batches"]]
        self._before, self._path = list(state["before"]), state["path"]
        self._moves = int(state["moves"])


class Trial(NamedTuple):
    """The two branches of one comparison."""

    objective: Objective
    model: nn.Module
    weights: list[Tensor]
    lengths: Tensor
    """How far each tensor moves in one step."""
    batches: Sequence[tuple[Any, Any]]
    """What both branches train on."""
    held: Sequence[tuple[Any, Any]]
    """What they are compared on."""
    seed: int
    """Of the random numbers that both draw."""

    def difference(self, more: Callable[[], list[float]], less: Callable[[], list[float]]) -> float:
        """L_val with less minus L_val with more: positive where more helps.

        Args:
            more: sets the objective for one branch, and returns how much of each tensor weight decay
                takes off in a step.
            less: the same for the other branch.
        """
        with_more, with_less = (self._loss(setting()) for setting in (more, less))
        if math.isfinite(with_more) and math.isfinite(with_less):
            return with_less - with_more
        return 0.0 if with_more == with_less else math.copysign(1.0, with_less - with_more)

    def _loss(self, decays: list[float]) -> float:
        """The validation loss at the end of one branch; all is as before then."""
        with self._unchanged():
            try:
                for inputs, targets in self.batches:
                    self._move(inputs, targets, decays)
                loss = sum(self._validation(*batch) for batch in self.held) / len(self.held)
            except NonFiniteError:
                return math.inf
        return loss if math.isfinite(loss) else math.inf

    def _move(self, inputs: Any, targets: Any, decays: list[float]) -> None:
        total = self.objective(self.model, inputs, targets).total
        found = torch.autograd.grad(total, self.weights, allow_unused=True, materialize_grads=True)
        gradients = list(found)
        factors = self.lengths / _norms(gradients).clamp_min(torch.finfo(torch.float32).tiny)
        with torch.no_grad():
            if any(decays):
                torch._foreach_mul_(self.weights, [1.0 - decay for decay in decays])
            torch._foreach_mul_(gradients, factors.tolist())
            torch._foreach_sub_(self.weights, gradients)

    def _validation(self, inputs: Any, targets: Any) -> float:
        """The loss without dropout."""
        bare = unwrapped(self.model)
        _, inputs, targets = self.objective.loss.prepare(bare, inputs, targets)
        batch = Batch(bare, inputs, targets, False)
        with torch.no_grad():
            return float(self.objective.forward_and_loss(batch, no_noise)[1])

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore weights, buffers, random states and the objective's counts at the end."""
        weights = [w.detach().clone() for w in self.weights]
        state = self.objective.state_dict()
        with RngSnapshot(self.model), keep_buffers(unwrapped(self.model)):
            seed_current(self.seed)
            try:
                yield
            finally:
                with torch.no_grad():
                    torch._foreach_copy_(self.weights, weights)
                self.objective.load_state_dict(state)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([n.float() for n in torch._foreach_norm(list(tensors))])
