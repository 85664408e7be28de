"""Samples of gradient noise, of three kinds, each with zero mean.

- dropout: (∇ℓ(F(x; 1, η₁)) - ∇ℓ(F(x; 1, η₂)))/√2, the paper's ξ̃_drop scaled to the covariance of one
  dropout gradient around its mean (Section 3.1);
- analytic: ξ_approx = ∇(∂ℓ/∂ε) (eq. 4.6);
- batch: the same difference between two batches without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from undrop.diagnosis.measure.model import Batch, Subject
from undrop.engines import Draw, Engine, Request, ScaledNoise, Weights, engine_named
from undrop.errors import GradientsDisabledError
from undrop.intercept import Field, Selection, keep_statistics, silent

__all__ = ["GradientNoise", "Sketch", "Xi", "group_of"]


def group_of(parameter: str) -> str:
    """The part of a model that a parameter counts to: its top-level module, of a list the element."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


@dataclass(frozen=True)
class Xi:
    """How ξ_approx is made: by which engine, at which sites, and how strongly."""

    engine: Engine = field(default_factory=lambda: engine_named("auto"))
    mask: str = "as-declared"
    selection: Selection = field(default_factory=Selection)
    factor: float = 1.0
    """That of ∂ℓ/∂ε in the objective."""
    fraction: float = 1.0
    batch_dim: int = 0


class GradientNoise:
    """Draws gradient noise of a model.

    Args:
        subject: the model under study.
        xi: how the analytic noise is made. Dropout's is that of the same sites, at its own strength.
    """

    def __init__(self, subject: Subject, xi: Xi | None = None) -> None:
        self.subject = subject
        self.xi = xi or Xi()
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
        xi = self.xi
        request = Request(
            self.subject.model,
            batch.inputs,
            batch.targets,
            self.subject.loss,
            "hessian",
            Weights(loss=0.0, explicit=0.0, implicit=xi.factor),
            Draw("sign", xi.mask, xi.selection, self.subject.randomness),
            xi.fraction,
            xi.batch_dim,
        )
        with keep_statistics(self.subject.model):
            return self._of(xi.engine.evaluate(request).total)

    def between(self, one: Batch, two: Batch) -> list[Tensor]:
        """A sample of the noise of the choice of batch."""
        return _difference(self._gradient(one, silent), self._gradient(two, silent))

    def _masks(self) -> Draw:
        sites = self.xi.selection.evenly()
        return Draw("dropout", "as-declared", sites, self.subject.randomness)

    def _gradient(self, batch: Batch, field: Field) -> list[Tensor]:
        logits = self.subject.run(batch, field)
        return self._of(self.subject.loss.value(logits, batch.targets))

    def _of(self, scalar: Tensor) -> list[Tensor]:
        return list(
            torch.autograd.grad(scalar, self.parameters, allow_unused=True, materialize_grads=True)
        )


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
