"""Objectives without dropout: the loss alone, and the loss plus an L2 penalty."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from undrop.engines import Evaluation
from undrop.intercept import Batch
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.options import check_not_negative


@OBJECTIVES.register("none", about="The loss alone, with every dropout of the model switched off")
class NoRegularization(Objective):
    """The loss alone, with every dropout of the model switched off (ε = 0)."""

    needs_dropout = False

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise."""
        yield self.plain_loss(batch)


class L2(NoRegularization):
    """The loss plus ``weight · Σ ‖W‖²`` over all trainable parameters, without dropout.

    Args:
        weight: λ ≥ 0.
        loss: as for every objective.
    """

    def __init__(self, weight: float, *, loss: LossLike = None) -> None:
        super().__init__(loss=loss)
        self.weight = check_not_negative("the L2 weight", weight)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise, and the squared norm."""
        plain = self.plain_loss(batch)
        squares = (p.square().sum() for p in self.trainable_parameters(batch.model))
        penalty = self.weight * sum(squares, torch.zeros_like(plain.total))
        parts = {**plain.parts, "l2": penalty.detach()}
        yield Evaluation(plain.total + penalty, parts, plain.make_output)


OBJECTIVES.register(
    "l2", about="The loss plus weight · Σ ‖W‖² over all trainable parameters, without dropout"
)(partial(L2, weight=1e-5))
