"""Samples of gradient noise, of three kinds, each with zero mean.

- dropout: (∇ℓ(F(x; 1, η₁)) - ∇ℓ(F(x; 1, η₂)))/√2, the paper's ξ̃_drop scaled to the covariance of one
  dropout gradient around its mean (Section 3.1);
- analytic: ξ_approx = ∇(∂ℓ/∂ε) (eq. 4.6);
- batch: the same difference between two batches without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from undrop.diagnosis.measure.analytic import AnalyticNoise, analytic_term, gradient
from undrop.diagnosis.measure.model import Batch, Subject
from undrop.engines import Draw, ScaledNoise
from undrop.errors import GradientsDisabledError
from undrop.intercept import Field, silent

__all__ = ["GradientNoise", "Sketch", "group_of"]


def group_of(parameter: str) -> str:
    """The part of a model that a parameter counts to: its top-level module, of a list the element."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


class GradientNoise:
    """Draws gradient noise of a model.

    Args:
        subject: the model under study.
        made: how the analytic noise is made. Dropout's is that of the same sites, at its own strength.
        factor: of ∂ℓ/∂ε in the analytic noise.
    """

    def __init__(
        self, subject: Subject, made: AnalyticNoise | None = None, factor: float = 1.0
    ) -> None:
        self.subject = subject
        self.made = made or AnalyticNoise()
        self.factor = factor
        named = [(n, p) for n, p in subject.model.named_parameters() if p.requires_grad]
        if not named:
            raise GradientsDisabledError(
                f"no parameter of {subject.name} requires a gradient: set requires_grad_(True) on "
                "those that are trained, or leave the implicit effect out."
            )
        self.parameters = [p for _, p in named]
        self.groups = [group_of(name) for name, _ in named]

    @property
    def size(self) -> int:
        """The number of trained numbers."""
        return sum(p.numel() for p in self.parameters)

    def dropout(self, batch: Batch) -> list[Tensor]:
        """A sample of dropout's noise on a batch."""
        one, two = (self._gradient(batch, ScaledNoise(self._masks(), 1.0)) for _ in range(2))
        return _difference(one, two)

    def analytic(self, batch: Batch) -> list[Tensor]:
        """A sample of ξ_approx on a batch."""
        term = analytic_term(
            self.subject.model,
            batch.inputs,
            batch.targets,
            self.subject.loss,
            self.subject.randomness,
            self.made,
            implicit=self.factor,
        )
        return gradient(term, self.parameters)

    def between(self, one: Batch, two: Batch) -> list[Tensor]:
        """A sample of the noise of the choice of batch."""
        return _difference(self._gradient(one, silent), self._gradient(two, silent))

    def _masks(self) -> Draw:
        sites = self.made.selection.evenly()
        return Draw("dropout", "as-declared", sites, self.subject.randomness)

    def _gradient(self, batch: Batch, field: Field) -> list[Tensor]:
        logits = self.subject.run(batch, field)
        return gradient(self.subject.loss.value(logits, batch.targets), self.parameters)


def _difference(one: Sequence[Tensor], two: Sequence[Tensor]) -> list[Tensor]:
    return [(a - b) * math.sqrt(0.5) for a, b in zip(one, two, strict=True)]


class Sketch:
    """A linear map to few numbers that keeps inner products: the identity for small models.

    A count sketch: every coordinate goes to a random place with a random sign. An inner product of
    unit vectors comes out right but for an error of about 1/sqrt(places).

    Args:
        size: the number of coordinates.
        places: the most numbers to keep.
        device: where the gradients are.
    """

    def __init__(self, size: int, places: int, device: torch.device) -> None:
        self.identity = size <= places
        self.places = min(size, places)
        if not self.identity:
            generator = torch.Generator().manual_seed(size)
            place = torch.randint(2 * places, (size,), generator=generator, dtype=torch.int32)
            self._place = place.to(device)

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """The kept numbers, on the CPU in double precision."""
        if self.identity:
            return torch.cat([part.detach().flatten() for part in parts]).double().cpu()
        signed = torch.zeros(2 * self.places, dtype=torch.float64, device=self._place.device)
        start = 0
        for part in parts:
            end = start + part.numel()
            signed.index_add_(0, self._place[start:end], part.detach().flatten().double())
            start = end
        return (signed[: self.places] - signed[self.places :]).cpu()
