"""Samples of gradient noise, of three kinds with zero mean.

- Dropout: (∇ℓ(F(x; 1, η₁)) - ∇ℓ(F(x; 1, η₂)))/√2 for two masks. It is the paper's ξ̃_drop (Section 3.1),
  scaled to the covariance of one gradient with dropout.
- Analytic: ξ_approx = ∇(∂ℓ/∂ε) (eq. 4.6).
- Mini-batching: (∇ℓ₁ - ∇ℓ₂)/√2 for two batches without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.diagnosis.measure.model import FixedNoise, MeasuredModel
from undrop.engines import dropout_masks
from undrop.errors import GradientsDisabledError
from undrop.intercept import Batch, Selection, SiteAction, keep_statistics
from undrop.losses import Coefficients
from undrop.objectives import Analytic, Objective


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return ⟨a, b⟩ of two lists of tensors, in float64."""
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def group_of(parameter: str) -> str:
    """Return the part of the model that a parameter belongs to.

    A part is a top-level module, or an element of a top-level list of modules.
    """
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise GradientsDisabledError(
            f"no parameter of {type(model).__name__} requires a gradient: set requires_grad_(True) on "
            "the parameters to train, or pass implicit=False."
        )
    return named


def trained_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that require a gradient; raise an error if there are none."""
    return [p for _, p in _named_parameters(model)]


class GradientNoise:
    """Draws samples of gradient noise.

    Args:
        subject: the model, its batches, and the generators of all noise.
        objective: the objective whose sites and engine the analytic noise uses; None is ``Analytic``.
            Dropout's noise is at the same sites, but without the objective's site weights.
        implicit_factor: the factor of ∂ℓ/∂ε in the analytic noise.
    """

    def __init__(
        self,
        subject: MeasuredModel,
        objective: Objective | None = None,
        implicit_factor: float = 1.0,
    ) -> None:
        self.subject = subject
        self.objective = objective or Analytic()
        self.objective.generators = subject.generators
        self._coefficients = Coefficients(loss=0.0, quadratic=0.0, directional=implicit_factor)
        weights = self.objective.selection.patterns.items()
        self._selection = Selection({pattern: float(weight > 0.0) for pattern, weight in weights})
        named = _named_parameters(subject.model)
        self.parameters = [p for _, p in named]
        self.groups = [group_of(name) for name, _ in named]

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.parameters)

    def sample_dropout(self, batch: Batch) -> list[Tensor]:
        """Return a sample of dropout's noise on a batch."""
        one, two = (
            self._gradient(batch, dropout_masks(self.subject.generators, self._selection))
            for _ in range(2)
        )
        return _scaled_difference(one, two)

    def sample_analytic(self, batch: Batch) -> list[Tensor]:
        """Return a sample of ξ_approx on a batch."""
        request = self.objective.request(batch, self._coefficients)
        with keep_statistics(batch.model):
            term = self.objective.engine.evaluate(request).total
        return gradients(term, self.parameters)

    def sample_batching(self, one: Batch, two: Batch) -> list[Tensor]:
        """Return a sample of the noise from the choice of the batch."""
        no_noise = FixedNoise({})
        return _scaled_difference(self._gradient(one, no_noise), self._gradient(two, no_noise))

    def _gradient(self, batch: Batch, action: SiteAction) -> list[Tensor]:
        logits = self.subject.run(batch, action)
        return gradients(self.subject.loss.value(logits, batch.targets), self.parameters)


def _scaled_difference(one: Sequence[Tensor], two: Sequence[Tensor]) -> list[Tensor]:
    """Return (one - two)/√2, which has the covariance of either if they are independent."""
    return [(a - b) * math.sqrt(0.5) for a, b in zip(one, two, strict=True)]


class Sketch:
    """A linear map of gradients to shorter vectors that approximately preserves inner products.

    It is a count sketch: it adds every coordinate, with a random sign, to a random entry of the sketch.
    Inner products of unit vectors then have an error of about 1/sqrt(width). If there are at most
    ``width`` coordinates, the map is the identity.

    Args:
        size: the number of coordinates.
        width: the largest number of entries of the sketch.
        device: the device of the gradients.
    """

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.is_identity = size <= width
        self.width = min(size, width)
        if not self.is_identity:
            generator = torch.Generator().manual_seed(size)
            # the entry to which a coordinate is added; from ``width`` on, it is subtracted instead
            index = torch.randint(2 * width, (size,), generator=generator, dtype=torch.int32)
            self._index = index.to(device)

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sketch of a gradient, on the CPU in double precision."""
        if self.is_identity:
            return torch.cat([part.detach().flatten() for part in parts]).double().cpu()
        signed = torch.zeros(2 * self.width, dtype=torch.float64, device=self._index.device)
        start = 0
        for part in parts:
            end = start + part.numel()
            signed.index_add_(0, self._index[start:end], part.detach().flatten().double())
            start = end
        return (signed[: self.width] - signed[self.width :]).cpu()
