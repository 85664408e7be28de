"""R-Drop: two dropout masks, and the distance between their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from undrop.engines import Evaluation, dropout_masks
from undrop.intercept import Batch, Interception, keep_statistics, logits_of
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.options import check_not_negative


@OBJECTIVES.register(
    "r-drop",
    about="Dropout with two masks, plus the distance between their predictions (Liang et al. 2021)",
)
class RDrop(Objective):
    """R-Drop: dropout with two masks, and the distance between the two predictions (Liang et al. 2021).

    ½(ℓ₁ + ℓ₂) + (weight/4)·[KL(p₁‖p₂) + KL(p₂‖p₁)]. This is half of the total in that paper, whose α
    is ``weight``. For a loss whose gradient is p - y, the sum of both divergences is Dℓ[F₁]·u - Dℓ[F₂]·u
    with u = F₁ - F₂, which every loss can compute.

    Args:
        weight: α ≥ 0.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        weight: float = 1.0,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.weight = check_not_negative("weight", weight)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation of both passes, because their distance needs both graphs."""
        output = self._output(batch)
        with keep_statistics(batch.model):
            other = self._output(batch)
        one, two = logits_of(output), logits_of(other)
        u = one - two
        first, second = (batch.loss.derivatives(f, u, batch.targets) for f in (one, two))
        loss = 0.5 * (first.loss + second.loss)
        consistency = 0.25 * self.weight * (first.directional - second.directional)
        parts = {"loss": loss.detach(), "consistency": consistency.detach()}
        yield Evaluation(loss + consistency, parts, lambda: output)

    def _output(self, batch: Batch) -> Any:
        """Return the output under a new mask."""
        with Interception(batch.model, dropout_masks(self.generators, self.selection)):
            output = batch.forward()
        batch.loss.check(batch.loss.select(output), batch.targets)
        return output
