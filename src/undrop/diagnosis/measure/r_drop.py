"""Estimate R_drop and its parts, for ``diagnose``, ``check`` and the probes of experiments.

    R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)) = ½E[uᵀHu] + ½E[Dℓ·∂²F/∂ε²] + rest

One mask η gives a sample of every part. The sample of R_drop is ℓ(F(x; 1, η)) - ℓ(F(x)) - ∂ℓ/∂ε:
subtracting ∂ℓ/∂ε, which has zero mean, removes most of the variance. The second-order terms along the
same η are the samples of the other parts.

Let z be the relative noise at every site (h becomes h ⊙ (1 + z)), v = σ·η, u = ∂F/∂z·v and y = Dℓ[F].
Then

    ℓ(F(ε)) = ℓ + ε·yᵀu + ε²·(½uᵀHu + ½ vᵀ∇²_z(yᵀF)v) + …

All of these terms follow from the scalar c(y, z) = vᵀ∇_z(yᵀF): c itself is ∂ℓ/∂ε, its gradient in y is
u, and its gradient in z, times v, is vᵀ∇²_z(yᵀF)v. So a batch needs one gradient with a graph, and every
η one more backward pass through that graph. Torch never differentiates the loss twice: the loss computes
uᵀHu itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.diagnosis.measure.estimates import Estimate, Samples
from undrop.diagnosis.measure.model import FixedNoise, MeasuredModel, SiteNoise, collect
from undrop.engines import Draw, ZeroLeaves
from undrop.engines.reverse import TWICE_DIFFERENTIABLE
from undrop.errors import NoDropoutError
from undrop.intercept import Batch, Selection
from undrop.losses import Loss

S = TypeVar("S")

_EPSILON = 0.02
"""ε of the differences: their truncation error grows as ε², a second difference's rounding as 1/ε²."""
_TOLERANCE = 0.1  # how far u may be from its finite difference, relative to u; a wrong u is farther


class TaylorTerms(NamedTuple):
    """The first- and second-order terms that noise adds to the mean loss."""

    directional: float
    """∂ℓ/∂ε = Dℓ·u, which has zero mean."""
    half_quadratic: float
    """½uᵀHu."""
    curvature: float
    """½Dℓ·∂²F/∂ε², from the model's own curvature. The paper omits it, because it can be negative."""


class Terms(NamedTuple):
    """The terms of the expansion along one η."""

    total: TaylorTerms
    sites: Mapping[str, TaylorTerms]
    """The part of each site. The parts add up to the total, at least in expectation."""
    u: Tensor
    """The output tangent ∂F/∂ε."""


class Expansion(ABC):
    """The expansion of the loss of one batch around z = 0; z is the relative noise at the sites."""

    def __init__(self, subject: MeasuredModel, batch: Batch) -> None:
        self.subject, self.batch = subject, batch
        zeros = ZeroLeaves(Draw("dropout", "as-declared", Selection(), subject.generators))
        self.logits = subject.run(batch, zeros, TWICE_DIFFERENTIABLE)
        if not zeros.leaves:
            raise NoDropoutError(f"no active dropout runs in batch {batch.number}.")
        self.sites_and_leaves = list(zip(zeros.sites, zeros.leaves, strict=True))
        """The sites that a pass reaches, each with its z: a tensor of zeros in the shape of η."""
        self.output = self.logits.detach().requires_grad_()
        self.count = float(subject.loss.count(self.output, batch.targets))
        """The number of terms in the loss."""
        self.base = subject.loss_value(batch, {})
        """ℓ(F(x))."""

    def quadratic(self, u: Tensor) -> Tensor:
        """Return the mean of uᵀHu."""
        return self.subject.loss.derivatives(self.output, u, self.batch.targets).quadratic

    @abstractmethod
    def directional(self, noise: SiteNoise) -> float:
        """Return ∂ℓ/∂ε along the noise."""

    @abstractmethod
    def terms_along(self, noise: SiteNoise) -> Terms:
        """Return all terms along the noise."""


class ReverseExpansion(Expansion):
    """The expansion by two reverse passes: exact, but every op needs a double backward."""

    def __init__(self, subject: MeasuredModel, batch: Batch) -> None:
        super().__init__(subject, batch)
        self._names = [site.name for site, _ in self.sites_and_leaves]
        self._leaves = [leaf for _, leaf in self.sites_and_leaves]
        loss = subject.loss.value(self.output, batch.targets)
        subject.check_finite(batch, loss, noisy=False)
        self._y = torch.autograd.grad(loss, self.output)[0].detach().requires_grad_()
        self._gradients = self._gradients_at_leaves(self._y, create_graph=True)

    def _gradients_at_leaves(self, y: Tensor, *, create_graph: bool) -> list[Tensor]:
        """Return Jᵀy for J = ∂F/∂z, at every leaf z."""
        y = y.to(self.logits.dtype)
        return gradients(self.logits, self._leaves, y, retain_graph=True, create_graph=create_graph)

    def _products_by_site(
        self, gradients_at_leaves: Sequence[Tensor], noise: SiteNoise
    ) -> dict[str, Tensor]:
        """Return ⟨gradient, v⟩ for every site in ``noise``."""
        pairs = zip(self._names, gradients_at_leaves, strict=True)
        return {name: (g * noise[name]).sum() for name, g in pairs if name in noise}

    @torch.no_grad()
    def directional(self, noise: SiteNoise) -> float:
        """Return ∂ℓ/∂ε = ⟨∇_z ℓ, v⟩."""
        return float(sum(self._products_by_site(self._gradients, noise).values()))

    def terms_along(self, noise: SiteNoise) -> Terms:
        """Return all terms, by a backward pass for u and ∂²F/∂ε² and another one for uᵀHu by site."""
        directional = self._products_by_site(self._gradients, noise)
        c = torch.stack(list(directional.values())).sum()
        u, *c_gradients = gradients(c, [self._y, *self._leaves], retain_graph=True)
        u = u.detach().requires_grad_()
        quadratic = self.quadratic(u)
        (gradient,) = gradients(quadratic, [u])  # 2Hu, divided by the number of terms
        at_leaves = self._gradients_at_leaves(gradient, create_graph=False)
        quadratic_by_site = self._products_by_site(at_leaves, noise)
        curvature_by_site = self._products_by_site(c_gradients, noise)
        sites = {
            name: TaylorTerms(
                _as_float(value),
                0.25 * _as_float(quadratic_by_site[name]),
                0.5 * _as_float(curvature_by_site[name]),
            )
            for name, value in directional.items()
        }
        curvature = sum(terms.curvature for terms in sites.values())
        total = TaylorTerms(_as_float(c), 0.5 * _as_float(quadratic), curvature)
        return Terms(total, sites, u.detach())


class DifferenceExpansion(Expansion):
    """The expansion by finite differences in ε, for models with ops that have no double backward."""

    def __init__(self, subject: MeasuredModel, batch: Batch) -> None:
        with torch.no_grad():
            super().__init__(subject, batch)

    def directional(self, noise: SiteNoise) -> float:
        """Return (ℓ₊ - ℓ₋)/2ε."""
        plus = self.subject.loss_value(self.batch, noise, _EPSILON)
        minus = self.subject.loss_value(self.batch, noise, -_EPSILON)
        return (plus - minus) / (2.0 * _EPSILON)

    @torch.no_grad()
    def terms_and_tangent(self, noise: SiteNoise) -> tuple[TaylorTerms, Tensor]:
        """Return the terms along the noise, and u ≈ (F₊ - F₋)/2ε."""
        batch, run, loss = self.batch, self.subject.run, self.subject.loss
        outputs = [run(batch, FixedNoise(noise, epsilon)) for epsilon in (_EPSILON, -_EPSILON)]
        plus, minus = (float(loss.value(output, batch.targets).double()) for output in outputs)
        u = (outputs[0] - outputs[1]) / (2.0 * _EPSILON)
        with torch.enable_grad():
            half_quadratic = 0.5 * _as_float(self.quadratic(u))
        both = 0.5 * (plus - 2.0 * self.base + minus) / _EPSILON**2  # ½uᵀHu + curvature
        directional = (plus - minus) / (2.0 * _EPSILON)
        return TaylorTerms(directional, half_quadratic, both - half_quadratic), u

    def terms_along(self, noise: SiteNoise) -> Terms:
        """Return all terms, by two passes with all of the noise and two passes for each site alone."""
        total, u = self.terms_and_tangent(noise)
        sites = {name: self.terms_and_tangent({name: noise[name]})[0] for name in noise}
        return Terms(total, sites, u)


def _as_float(x: Tensor) -> float:
    return float(x.detach())


class Expander:
    """Expands the loss of a batch: in reverse mode, or by differences if a double backward fails."""

    def __init__(self, subject: MeasuredModel) -> None:
        self._subject = subject
        self._tried_reverse = False
        self.differences: str | None = None
        """Why derivatives are computed as differences; None if reverse mode computes them."""

    def __call__(self, batch: Batch) -> Expansion:
        """Return the expansion of a batch."""
        if not self._tried_reverse:
            self._tried_reverse = True
            try:
                expansion = ReverseExpansion(self._subject, batch)
                if self._agrees_with_differences(expansion):
                    return expansion
                self.differences = "an op of the model has no double backward, or a wrong one"
            except RuntimeError as error:
                message = str(error).partition("\n")[0]
                self.differences = f"an op of the model has no double backward ({message})"
        expansion_type = ReverseExpansion if self.differences is None else DifferenceExpansion
        return expansion_type(self._subject, batch)

    def _agrees_with_differences(self, expansion: ReverseExpansion) -> bool:
        """Compare u with its finite difference: torch's second derivative of some ops is wrongly 0."""
        if expansion.output.dtype not in (torch.float32, torch.float64):
            return True  # in half precision, a finite difference is mostly rounding
        noise = self._subject.draw_masks(expansion.sites_and_leaves)
        u = expansion.terms_along(noise).u
        differences = DifferenceExpansion(self._subject, expansion.batch)
        error = differences.terms_and_tangent(noise)[1] - u
        return float(error.norm()) <= _TOLERANCE * float(u.norm()) + 1e-6


class MaskSample(NamedTuple):
    """One mask's sample of R_drop and its parts on a batch."""

    r_drop: float
    half_quadratic: float
    """½uᵀHu."""
    curvature: float
    """½Dℓ·∂²F/∂ε²."""

    @property
    def second_order(self) -> float:
        """The sum of both second-order parts."""
        return self.half_quadratic + self.curvature

    @property
    def rest(self) -> float:
        """The part of R_drop that second order misses."""
        return self.r_drop - self.second_order


class Parts(NamedTuple):
    """R_drop and its parts: ``r_drop = half_quadratic + curvature + rest``."""

    r_drop: Estimate
    half_quadratic: Estimate
    curvature: Estimate
    rest: Estimate
    """The part of R_drop that second order misses."""


PART_LABELS = ("R_drop", "½E[uᵀHu]", "curvature", "rest")
"""The labels of the fields of ``Parts`` in tables and plots."""


def parts_of(samples: Samples[S], mask_sample: Callable[[S], MaskSample | None]) -> Parts:
    """Return R_drop and its parts, which add up because all of them are from the same samples.

    ``mask_sample`` returns the figures of a sample, or None if the sample lacks them.
    """

    def mean(part: str) -> Estimate:
        return samples.mean(lambda sample: getattr(mask_sample(sample), part, None))

    return Parts(*map(mean, Parts._fields))


def sample_parts(expansion: Expansion, noise: SiteNoise) -> tuple[MaskSample, Terms]:
    """Return a sample of R_drop and its parts along one mask, and the terms of the expansion.

    ``noise`` is σ·η at the sites that drop.
    """
    terms = expansion.terms_along(noise)
    total = terms.total
    noisy_loss = expansion.subject.loss_value(expansion.batch, noise)
    r_drop = noisy_loss - expansion.base - total.directional
    return MaskSample(r_drop, total.half_quadratic, total.curvature), terms


class RDropEstimate(NamedTuple):
    """R_drop, its parts, and the share that is quadratic."""

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
        model: any module with dropout; it does not change.
        batches: pairs (inputs, targets).
        loss: as for an objective.
        masks: the number of masks per batch.
        generator: seeds the masks.
        max_batches: the largest number of batches to take.
    """
    subject = MeasuredModel(model, collect(batches, max_batches), loss=loss, generator=generator)
    samples: Samples[MaskSample] = Samples()
    with subject.preserve():
        expander = Expander(subject)
        for batch in subject.batches:
            expansion = expander(batch)
            for _ in range(masks):
                noise = subject.draw_masks(expansion.sites_and_leaves)
                sample, _ = sample_parts(expansion, noise)
                samples.add(batch.number, expansion.count, sample)
    share = samples.ratio(lambda s: s.half_quadratic, lambda s: s.r_drop)
    return RDropEstimate(parts_of(samples, lambda s: s), share, samples.count)
