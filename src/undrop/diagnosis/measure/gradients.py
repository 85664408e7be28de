"""Samples of gradient noise, of three kinds.

Each kind has zero mean:

- dropout: (∇ℓ(F(x; 1, η₁)) - ∇ℓ(F(x; 1, η₂)))/√2, the paper's ξ̃_drop scaled to the covariance of one
  dropout gradient (Section 3.1);
- analytic: ξ_approx = ∇(∂ℓ/∂ε) (eq. 4.6);
- batch: the same difference between two batches without dropout.
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
    """⟨a, b⟩ over lists of tensors, in float64."""
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def group_of(parameter: str) -> str:
    """Return the part of a model that a parameter belongs to: a top-level module or list element."""
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
    """Return the parameters that require a gradient; raise an error if there is none."""
    return [p for _, p in _named_parameters(model)]


class GradientNoise:
    """Draws gradient noise of a model.

    The analytic noise is that of the objective (None is ``Analytic``), with ``implicit_factor`` as the
    factor of ∂ℓ/∂ε, drawn from the generators of ``measured``. Dropout's noise is at the same sites,
    with its own strength.
    """

    def __init__(
        self,
        measured: MeasuredModel,
        objective: Objective | None = None,
        implicit_factor: float = 1.0,
    ) -> None:
        self.measured = measured
        self.objective = Analytic() if objective is None else objective
        self.objective.generators = measured.generators
        self._noise = Coefficients(loss=0.0, quadratic=0.0, directional=implicit_factor)
        weights = self.objective.selection.patterns.items()
        self._sites = Selection({pattern: float(weight > 0.0) for pattern, weight in weights})
        named = _named_parameters(measured.model)
        self.parameters = [p for _, p in named]
        self.groups = [group_of(name) for name, _ in named]

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.parameters)

    def dropout(self, batch: Batch) -> list[Tensor]:
        """A sample of dropout's noise on a batch."""
        generators = self.measured.generators
        one, two = (self._gradient(batch, dropout_masks(generators, self._sites)) for _ in range(2))
        return _difference(one, two)

    def analytic(self, batch: Batch) -> list[Tensor]:
        """A sample of ξ_approx on a batch."""
        request = self.objective.request(batch, self._noise)
        with keep_statistics(batch.model):
            term = self.objective.engine.evaluate(request).total
        return gradients(term, self.parameters)

    def between(self, one: Batch, two: Batch) -> list[Tensor]:
        """A sample of the noise from the choice of batch."""
        return _difference(self._gradient(one, FixedNoise({})), self._gradient(two, FixedNoise({})))

    def _gradient(self, batch: Batch, action: SiteAction) -> list[Tensor]:
        logits = self.measured.run(batch, action)
        return gradients(self.measured.loss.value(logits, batch.targets), self.parameters)


def _difference(one: Sequence[Tensor], two: Sequence[Tensor]) -> list[Tensor]:
    return [(a - b) * math.sqrt(0.5) for a, b in zip(one, two, strict=True)]


class Sketch:
    """A linear map to a few numbers that preserves inner products; the identity for small models.

    It is a count sketch: every coordinate goes to a random place with a random sign. Inner products of
    unit vectors have an error of about 1/sqrt(places). ``size`` is the number of coordinates, and
    at most ``places`` numbers are kept.
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
