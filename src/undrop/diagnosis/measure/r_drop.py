"""R_drop and ½uᵀHu: the one estimator behind ``diagnose``, ``check`` and the Taylor probe.

    R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)) = ½E[uᵀHu] + ½E[Dℓ·∂²F/∂ε²] + rest

One mask η gives a sample of every part. The sample of R_drop is ℓ(F(x; 1, η)) - ℓ(F(x)) - ∂ℓ/∂ε, where
∂ℓ/∂ε has zero mean and most of the variance. The second-order terms along the same η are samples of the
other parts.

With z the relative noise at every site (h becomes h ⊙ (1 + z)), v = σ·η, u = ∂F/∂z·v and y = Dℓ[F],

    ℓ(F(ε)) = ℓ + ε·yᵀu + ε²·(½uᵀHu + ½ vᵀ∇²_z(yᵀF)v) + …

The scalar c(y, z) = vᵀ∇_z(yᵀF) contains all of these terms: c itself is ∂ℓ/∂ε, its gradient in y is u,
and its gradient in z, times v, is the part from the model's own curvature. So a batch needs one gradient
with a graph, and every η one more backward pass through it. Torch never differentiates the loss twice:
the loss computes uᵀHu itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.diagnosis.measure.estimates import Estimate, Samples
from undrop.diagnosis.measure.model import FixedNoise, MeasuredModel, SiteNoise, collect
from undrop.engines import Draw, ZeroLeaves
from undrop.engines.reverse import TWICE_DIFFERENTIABLE
from undrop.errors import NoDropoutError, NonFiniteError
from undrop.intercept import Batch, Selection
from undrop.losses import Loss

_EPSILON = 0.02  # ε of finite differences: truncation is O(ε²), rounding of the second one O(1/ε²)
_TOLERANCE = 0.1  # between u and its finite difference; a wrong second derivative is far off


class SecondOrder(NamedTuple):
    """What noise adds to the loss, up to second order; means over the loss's terms."""

    directional: float
    """∂ℓ/∂ε = Dℓ·u, which has zero mean."""
    half_quadratic: float
    """½uᵀHu."""
    curvature: float
    """½Dℓ·∂²F/∂ε², from the model's own curvature; the paper omits it, because it can be negative."""


class Terms(NamedTuple):
    """The expansion along one η."""

    total: SecondOrder
    sites: Mapping[str, SecondOrder]
    """Each site's part. Their sum is the total, at least in expectation."""
    u: Tensor
    """The output tangent ∂F/∂ε."""


class Expansion(ABC):
    """The expansion of a batch at ε = 0, with a leaf z in the shape of every η."""

    def __init__(self, measured: MeasuredModel, batch: Batch) -> None:
        self.measured, self.batch = measured, batch
        zeros = ZeroLeaves(Draw("dropout", "as-declared", Selection(), measured.generators))
        self.logits = measured.run(batch, zeros, TWICE_DIFFERENTIABLE)
        if not zeros.leaves:
            raise NoDropoutError(f"no active dropout runs in batch {batch.number}.")
        self.found = list(zip(zeros.sites, zeros.leaves, strict=True))
        """The sites that a pass uses, each with a tensor of the shape of its η."""
        self.output = self.logits.detach().requires_grad_()
        self.count = float(measured.loss.count(self.output, batch.targets))
        self.base = measured.loss_value(batch, {})
        """ℓ(F(x))."""

    def quadratic(self, u: Tensor) -> Tensor:
        """The mean of uᵀHu."""
        return self.measured.loss.derivatives(self.output, u, self.batch.targets).quadratic

    @abstractmethod
    def directional(self, noise: SiteNoise) -> float:
        """∂ℓ/∂ε along the noise."""

    @abstractmethod
    def along(self, noise: SiteNoise) -> Terms:
        """All terms along the noise."""


class ReverseExpansion(Expansion):
    """The expansion by reverse mode applied twice: exact, for every op that has a double backward."""

    def __init__(self, measured: MeasuredModel, batch: Batch) -> None:
        super().__init__(measured, batch)
        self._names = [site.name for site, _ in self.found]
        self._leaves = [leaf for _, leaf in self.found]
        loss = measured.loss.value(self.output, batch.targets)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(measured.not_finite(batch, _number(loss), "without"))
        self._y = torch.autograd.grad(loss, self.output)[0].detach().requires_grad_()
        self._gradients = self._pulled_back(self._y, create_graph=True)

    def _pulled_back(self, y: Tensor, *, create_graph: bool) -> list[Tensor]:
        """Jᵀy at every leaf."""
        y = y.to(self.logits.dtype)
        how = {"retain_graph": True, "create_graph": create_graph}
        return gradients(self.logits, self._leaves, y, **how)

    def _products(self, found: list[Tensor], noise: SiteNoise) -> dict[str, Tensor]:
        """⟨gradient, v⟩ of every site that the noise has."""
        pairs = zip(self._names, found, strict=True)
        return {name: (g * noise[name]).sum() for name, g in pairs if name in noise}

    @torch.no_grad()
    def directional(self, noise: SiteNoise) -> float:
        """∂ℓ/∂ε = ⟨∇_z ℓ, v⟩."""
        return float(sum(self._products(self._gradients, noise).values()))

    def along(self, noise: SiteNoise) -> Terms:
        """Compute all terms: a backward pass for u and ∂²F/∂ε², another for uᵀHu by site."""
        slopes = self._products(self._gradients, noise)
        c = torch.stack(list(slopes.values())).sum()
        u, *curved = gradients(c, [self._y, *self._leaves], retain_graph=True)
        u = u.detach().requires_grad_()
        quadratic = self.quadratic(u)
        (pushed,) = gradients(quadratic, [u])  # 2Hu over the number of terms
        halves = self._products(self._pulled_back(pushed, create_graph=False), noise)
        curvatures = self._products(curved, noise)
        sites = {
            name: SecondOrder(
                _number(slope), 0.25 * _number(halves[name]), 0.5 * _number(curvatures[name])
            )
            for name, slope in slopes.items()
        }
        curvature = sum(order.curvature for order in sites.values())
        total = SecondOrder(_number(c), 0.5 * _number(quadratic), curvature)
        return Terms(total, sites, u.detach())


class DifferenceExpansion(Expansion):
    """The expansion by finite differences in ε, for models with ops that have no double backward."""

    def __init__(self, measured: MeasuredModel, batch: Batch) -> None:
        with torch.no_grad():
            super().__init__(measured, batch)

    def directional(self, noise: SiteNoise) -> float:
        """(ℓ₊ - ℓ₋)/2ε."""
        up, down = (self.measured.loss_value(self.batch, _scaled(noise, s)) for s in (1.0, -1.0))
        return (up - down) / (2.0 * _EPSILON)

    @torch.no_grad()
    def tangent(self, noise: SiteNoise) -> Tensor:
        """u ≈ (F₊ - F₋)/2ε."""
        plus, minus = self._both(noise)
        return (plus - minus) / (2.0 * _EPSILON)

    def _both(self, noise: SiteNoise) -> tuple[Tensor, Tensor]:
        up, down = (FixedNoise(_scaled(noise, sign)) for sign in (1.0, -1.0))
        return self.measured.run(self.batch, up), self.measured.run(self.batch, down)

    @torch.no_grad()
    def _order(self, noise: SiteNoise) -> tuple[SecondOrder, Tensor]:
        targets, loss = self.batch.targets, self.measured.loss
        plus, minus = self._both(noise)
        up, down = (float(loss.value(x, targets).double()) for x in (plus, minus))
        u = (plus - minus) / (2.0 * _EPSILON)
        with torch.enable_grad():
            half = 0.5 * _number(self.quadratic(u))
        second = 0.5 * (up - 2.0 * self.base + down) / _EPSILON**2
        return SecondOrder((up - down) / (2.0 * _EPSILON), half, second - half), u

    def along(self, noise: SiteNoise) -> Terms:
        """Compute all terms by two passes for the noise and two for each site alone."""
        total, u = self._order(noise)
        sites = {name: self._order({name: noise[name]})[0] for name in noise}
        return Terms(total, sites, u)


def _number(x: Tensor) -> float:
    return float(x.detach())


def _scaled(noise: SiteNoise, sign: float) -> dict[str, Tensor]:
    return {name: value * (sign * _EPSILON) for name, value in noise.items()}


class Expander:
    """Expands batches, by finite differences if an op of the model has no double backward."""

    def __init__(self, measured: MeasuredModel) -> None:
        self._measured = measured
        self._tried = False
        self.blocked: str | None = None
        """Why derivatives are computed as differences; None if they are not."""

    def __call__(self, batch: Batch) -> Expansion:
        """Expand a batch."""
        if not self._tried:
            self._tried = True
            try:
                expansion = ReverseExpansion(self._measured, batch)
                if self._agrees(expansion, batch):
                    return expansion
                self.blocked = "torch's second derivative disagrees with finite differences"
            except RuntimeError as error:
                self.blocked = str(error).partition("\n")[0]
        if self.blocked is not None:
            return DifferenceExpansion(self._measured, batch)
        return ReverseExpansion(self._measured, batch)

    def _agrees(self, expansion: ReverseExpansion, batch: Batch) -> bool:
        """Return whether u agrees with its finite difference: some second derivatives are wrongly 0."""
        if expansion.output.dtype not in (torch.float32, torch.float64):
            return True  # in half precision, a finite difference is mostly rounding
        noise = self._measured.draw_masks(expansion.found)
        u = expansion.along(noise).u
        error = DifferenceExpansion(self._measured, batch).tangent(noise) - u
        return float(error.norm()) <= _TOLERANCE * float(u.norm()) + 1e-6


class MaskSample(NamedTuple):
    """One mask on a batch."""

    r_drop: float
    half_quadratic: float
    """½uᵀHu."""
    curvature: float
    """½Dℓ·∂²F/∂ε²."""


class Parts(NamedTuple):
    """R_drop and its parts: ``r_drop = half_quadratic + curvature + rest``."""

    r_drop: Estimate
    half_quadratic: Estimate
    curvature: Estimate
    rest: Estimate
    """What second order misses."""


def parts_of(samples: Samples[Any], read: Callable[[Any], MaskSample | None]) -> Parts:
    """Return the parts, from only the samples that have all of them, so that they add up."""

    def mean(figure: Callable[[MaskSample], float]) -> Estimate:
        def of(sample: Any) -> float | None:
            found = read(sample)
            return None if found is None else figure(found)

        return samples.mean(of)

    return Parts(
        mean(lambda s: s.r_drop),
        mean(lambda s: s.half_quadratic),
        mean(lambda s: s.curvature),
        mean(lambda s: s.r_drop - s.half_quadratic - s.curvature),
    )


def sample_mask(expanded: Expansion, noise: SiteNoise) -> tuple[MaskSample, Terms]:
    """Sample R_drop and its parts along one mask, σ·η at the sites that drop."""
    terms = expanded.along(noise)
    total = terms.total
    r_drop = expanded.measured.loss_value(expanded.batch, noise) - expanded.base - total.directional
    return MaskSample(r_drop, total.half_quadratic, total.curvature), terms


class RDropEstimate(NamedTuple):
    """R_drop, its parts, and how much of it is quadratic."""

    parts: Parts
    quadratic_share: Estimate
    """½E[uᵀHu] / R_drop."""
    masks: int


def measure_r_drop(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
    masks: int = 8,
    generator: torch.Generator | None = None,
    max_batches: int = 1000,
) -> RDropEstimate:
    """Measure R_drop and ½E[uᵀHu], with the same number of masks on every batch.

    Args:
        model: any module with dropout; it is left as it was.
        batches: pairs (inputs, targets).
        loss: as for an objective.
        masks: the number of masks per batch.
        generator: seeds the masks.
        max_batches: the largest number of batches to take.
    """
    measured = MeasuredModel(model, collect(batches, max_batches), loss=loss, generator=generator)
    samples: Samples[MaskSample] = Samples()
    with measured.preserved():
        expander = Expander(measured)
        for batch in measured.batches:
            expanded = expander(batch)
            for _ in range(masks):
                noise = measured.draw_masks(expanded.found)
                sample, _ = sample_mask(expanded, noise)
                samples.add(batch.number, expanded.count, sample)
    share = samples.ratio(lambda s: s.half_quadratic, lambda s: s.r_drop)
    return RDropEstimate(parts_of(samples, lambda s: s), share, samples.count)
