"""Training without dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from undrop.engines import Evaluation
from undrop.errors import OptionError
from undrop.intercept import Batch
from undrop.losses import Loss
from undrop.objectives.base import Objective
from undrop.options import as_float


class NoRegularization(Objective):
    """The loss alone, with every dropout of the model switched off (ε = 0)."""

    needs_dropout = False

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise."""
        yield self.plain(batch)


class L2(NoRegularization):
    """The loss plus ``weight · Σ ‖W‖²`` over all trainable parameters, without dropout.

    Args:
        weight: λ ≥ 0.
        loss: as for every objective.
    """

    def __init__(
        self, weight: float, *, loss: Loss | Callable[[Tensor, Any], Tensor] | None = None
    ) -> None:
        super().__init__(loss=loss)
        if not 0.0 <= as_float(weight) < float("inf"):
            raise OptionError(f"the L2 weight must be finite and not negative, got {weight!r}.")
        self.weight = weight

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise, and the squared norm."""
        plain = self.plain(batch)
        squares = (p.square().sum() for p in self.trainable_parameters(batch.model))
        penalty = self.weight * sum(squares, torch.zeros_like(plain.total))
        parts = {**plain.parts, "l2": penalty.detach()}
        yield Evaluation(plain.total + penalty, parts, plain.make_output)
