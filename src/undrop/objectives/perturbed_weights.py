"""Objectives whose gradient is taken at perturbed weights: SAM and noise on the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from undrop.autodiff import gradients
from undrop.engines import Evaluation, dropout_masks
from undrop.intercept import Batch, keep_statistics, no_noise
from undrop.objectives.base import OBJECTIVES, LossLike, Objective
from undrop.options import check_not_negative


@OBJECTIVES.register(
    "sam",
    about="Sharpness-aware minimization, on top of dropout (Foret et al. 2021)",
)
class SAM(Objective):
    """Sharpness-aware minimization (Foret et al. 2021), on top of the model's dropout.

    The gradient is ∇ℓ at W + radius·g/‖g‖, where g = ∇ℓ(W), with the same dropout mask for both.
    ``step.total`` is linear in W and has this gradient, so training needs no second step, no closure and
    no special optimizer.

    Args:
        radius: ρ ≥ 0.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        radius: float = 0.05,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.radius = check_not_negative("radius", radius)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation: two passes with a backward pass each."""
        mask = dropout_masks(self.generators, self.selection)
        weights = self.trainable_parameters(batch.model)
        output, loss = self.forward_and_loss(batch, mask)
        ascent = gradients(loss, weights)
        norm = torch.stack([g.norm() for g in ascent]).norm()
        factor = self.radius / (norm + 1e-12)
        with _moved(weights, [g * factor for g in ascent]), keep_statistics(batch.model):
            _, perturbed = self.forward_and_loss(batch, mask)
            gradient = gradients(perturbed, weights)
        value = perturbed.detach()
        yield Evaluation(_with_gradient(value, weights, gradient), {"loss": value}, lambda: output)


@OBJECTIVES.register(
    "weight-noise",
    about="The mean loss at weights W + noise and W - noise, without dropout (Zhang et al. 2024)",
)
class WeightNoise(Objective):
    """Noise on the weights in both directions, without dropout (NSO: Zhang, Li & Ju 2024).

    The gradient is ½[∇ℓ(W + U) + ∇ℓ(W - U)] with U drawn from N(0, scale²) for every weight. In
    expectation it is the gradient of ℓ + ½·scale²·tr ∇²ℓ to second order; the two directions cancel the
    first order in every draw.

    Args:
        scale: σ ≥ 0, the standard deviation of U.
        loss: as for every objective.
        generator: as for every objective.
    """

    needs_dropout = False

    def __init__(
        self,
        scale: float = 0.01,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.scale = check_not_negative("scale", scale)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation: two passes with a backward pass each; the output is the one at W + U."""
        weights = self.trainable_parameters(batch.model)
        noise = [self._draw(w) for w in weights]
        with _moved(weights, noise):
            output, plus = self.forward_and_loss(batch, no_noise)
            at_plus = gradients(plus, weights)
        with _moved(weights, [-u for u in noise]), keep_statistics(batch.model):
            _, minus = self.forward_and_loss(batch, no_noise)
            at_minus = gradients(minus, weights)
        gradient = [0.5 * (one + two) for one, two in zip(at_plus, at_minus, strict=True)]
        value = 0.5 * (plus.detach() + minus.detach())
        yield Evaluation(_with_gradient(value, weights, gradient), {"loss": value}, lambda: output)

    def _draw(self, weight: Tensor) -> Tensor:
        noise = torch.empty_like(weight, requires_grad=False)
        return noise.normal_(0.0, self.scale, generator=self.generators(weight.device))


def _with_gradient(value: Tensor, weights: Sequence[Tensor], gradient: Sequence[Tensor]) -> Tensor:
    """Return a scalar with this value and this gradient; it is linear in the weights."""
    products = ((w * g).sum() for w, g in zip(weights, gradient, strict=True))
    linear = sum(products, value.new_zeros(()))
    return value + (linear - linear.detach())


@contextmanager
def _moved(weights: Sequence[Tensor], by: Sequence[Tensor]) -> Iterator[None]:
    """Move the weights within a block, and restore them bit for bit afterwards."""
    kept = [w.detach().clone() for w in weights]
    with torch.no_grad():
        torch._foreach_add_(list(weights), list(by))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(weights), kept)
