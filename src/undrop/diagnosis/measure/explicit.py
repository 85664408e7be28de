"""The explicit effect: R_drop and its parts for all sites together, by site, by class, and for other p.

For other p, the second-order terms follow from those at the model's p, because the part of a site is
proportional to its σ² = q/(1-q). Only R_drop needs new samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrop.diagnosis.measure.estimates import BatchMoments, Estimate, Samples, ratio_of_means
from undrop.diagnosis.measure.model import MeasuredModel
from undrop.diagnosis.measure.r_drop import (
    Expander,
    Expansion,
    MaskSample,
    Parts,
    TaylorTerms,
    parts_of,
    sample_parts,
)
from undrop.diagnosis.measure.timing import Budget
from undrop.intercept import Batch, Site
from undrop.losses import ByClass
from undrop.noise import sigma

TOP = 10
"""The number of classes to show."""
_CURVE = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # values of the largest p on the curve
_NEAR = 0.1  # a value is left out if it differs from the model's largest p by less than 10 % of it
_MASKS_PER_VISIT = 2  # masks of a batch for each expansion of its loss
_EXTRA_PASSES = 8  # passes per mask for single sites and for other p


class ClassShare(NamedTuple):
    """The share of uᵀHu that comes from one class."""

    number: int
    name: str
    share: Estimate
    """The share of uᵀHu."""
    weight: float
    """The share of Σ p(1 - p), the diagonal of H. It equals ``share`` if all u_c have the same size."""


class _ClassSums:
    """Sums of X, X² and XT over the masks of one batch: X is uᵀHu by class, then their sum T."""

    def __init__(self, weight: float, classes: int) -> None:
        self.weight, self.n = weight, 0
        self.sums = np.zeros((3, classes + 1))

    def add(self, x: NDArray[np.float64]) -> None:
        x = np.append(x, x.sum())
        self.n += 1
        self.sums += np.stack([x, x * x, x * x[-1]])

    def moments(self, c: int) -> BatchMoments:
        """Return the means and covariance of X_c and T."""
        n = self.n
        mean, (xx, _), (xt, tt) = self.sums[:, [c, -1]] / n
        covariance = (np.array([[xx, xt], [xt, tt]]) - np.outer(mean, mean)) * n / max(n - 1, 1)
        return BatchMoments(self.weight, n, mean, covariance)


class ClassShares:
    """Collects uᵀHu by class over masks and batches; ``names`` are the names of the classes."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._batches: dict[int, _ClassSums] = {}
        self._diagonal: NDArray[np.float64] | None = None

    def add(self, batch: int, count: float, by_class: ByClass) -> None:
        """Add uᵀHu of one mask; ``count`` is the number of terms in the loss of the batch."""
        x = (by_class.quadratic / count).cpu().numpy()
        if batch not in self._batches:
            self._batches[batch] = _ClassSums(count, len(x))
            diagonal = by_class.diagonal.cpu().numpy()
            self._diagonal = diagonal if self._diagonal is None else self._diagonal + diagonal
        self._batches[batch].add(x)

    def top(self, count: int = TOP) -> list[ClassShare]:
        """Return the classes with the largest shares; an empty list if the loss has no classes."""
        batches = list(self._batches.values())
        x = np.sum([b.weight * b.sums[0] / b.n for b in batches], axis=0)
        if self._diagonal is None or not x[-1]:
            return []
        weight = self._diagonal / self._diagonal.sum()
        order = np.argsort(-x[:-1])[:count]
        return [
            ClassShare(
                int(c),
                str(c) if self._names is None else self._names[c],
                ratio_of_means([b.moments(int(c)) for b in batches]),
                float(weight[c]),
            )
            for c in order
        ]


class SiteEffect(NamedTuple):
    """The effect of one site."""

    p: float
    kind: str
    share: Estimate
    """The site's share of ½E[uᵀHu]. The shares of all sites add up to 1."""
    parts: Parts
    """R_drop and its parts with dropout at this site alone."""


class Point(NamedTuple):
    """The effect if every site's p is multiplied by ``factor``."""

    factor: float
    p: float
    """The largest p of a site, times the factor."""
    parts: Parts


@dataclass(frozen=True)
class Explicit:
    """The explicit effect of a model's dropout."""

    parts: Parts
    quadratic_share: Estimate
    """½E[uᵀHu] / R_drop."""
    second_order_share: Estimate
    """(½E[uᵀHu] + curvature) / R_drop: all of second order."""
    sites: dict[str, SiteEffect]
    curve: list[Point]
    classes: list[ClassShare]
    batches: int
    """The number of batches that were measured."""
    batches_given: int
    masks: int
    differences: str | None
    """Why second derivatives are computed as finite differences; None if autograd computes them."""


class _ExplicitSample(NamedTuple):
    """The figures from one mask on a batch."""

    all_sites: MaskSample
    """R_drop and its parts with dropout at all sites."""
    sites: Mapping[str, TaylorTerms]
    """The terms of each site."""
    r_drop_alone: Mapping[str, float]
    """R_drop with dropout at one site alone, for some sites."""
    r_drop_scaled: Mapping[float, float]
    """R_drop with every p times a factor, for some factors."""

    def site_alone(self, name: str) -> MaskSample | None:
        """Return the sample for one site alone; None if R_drop of this site was not sampled."""
        if name not in self.r_drop_alone or name not in self.sites:
            return None
        terms = self.sites[name]
        return MaskSample(self.r_drop_alone[name], terms.half_quadratic, terms.curvature)

    def scaled(self, factor: float, growth: Mapping[str, float]) -> MaskSample | None:
        """Return the sample for every p times a factor; None if R_drop was not sampled for it.

        ``growth`` is σ² of each site at the new p, divided by σ² at the model's p.
        """
        if factor not in self.r_drop_scaled:
            return None
        half = fsum(growth[name] * terms.half_quadratic for name, terms in self.sites.items())
        curvature = fsum(growth[name] * terms.curvature for name, terms in self.sites.items())
        return MaskSample(self.r_drop_scaled[factor], half, curvature)


def measure_explicit(
    subject: MeasuredModel,
    budget: Budget,
    *,
    draws: int | None = None,
    names: Sequence[str] | None = None,
) -> Explicit:
    """Measure the explicit effect until the time is up, or ``draws`` masks of every batch are drawn.

    At least two masks of the first batch are drawn. ``names`` are the names of the classes.
    """
    study = _ExplicitStudy(subject, names)
    study.run(budget, draws)
    return study.result()


class _ExplicitStudy:
    """Collects samples of the explicit effect."""

    def __init__(self, subject: MeasuredModel, names: Sequence[str] | None = None) -> None:
        self.subject, self.expander = subject, Expander(subject)
        self.samples: Samples[_ExplicitSample] = Samples()
        self.classes = ClassShares(names)
        largest = self.largest_p = max(site.p for site in subject.sites)
        self.factors = [p / largest for p in _CURVE if abs(p - largest) > _NEAR * largest]

    def run(self, budget: Budget, draws: int | None) -> None:
        """Visit the batches in turn, and draw two masks each time."""
        extras: Iterator[str | float] = cycle([*self.subject.sites.names, *self.factors])
        rounds = None if draws is None else max(1, draws // _MASKS_PER_VISIT)
        for batch in budget.visits(self.subject.batches, rounds):
            self._visit(batch, extras)

    def _visit(self, batch: Batch, extras: Iterator[str | float]) -> None:
        """Sample two masks of a batch, each with the next few extras: single sites and factors of p.

        On the first visit, each mask has all extras, so that every figure gets two samples.
        """
        expansion = self.expander(batch)
        count = len(self.subject.sites) + len(self.factors)
        if self.samples.count > 0:
            count = min(count, _EXTRA_PASSES)
        for _ in range(_MASKS_PER_VISIT):
            sample = self._sample(expansion, list(islice(extras, count)))
            self.samples.add(batch.number, expansion.count, sample)

    def _sample(self, expansion: Expansion, extras: Sequence[str | float]) -> _ExplicitSample:
        batch, base = expansion.batch, expansion.base
        noise = self.subject.draw_masks(expansion.sites_and_leaves)
        all_sites, terms = sample_parts(expansion, noise)
        alone, scaled = {}, {}
        for extra in extras:
            if isinstance(extra, float):
                scaled_noise = self.subject.draw_masks(expansion.sites_and_leaves, extra)
                loss = self.subject.loss_value(batch, scaled_noise)
                scaled[extra] = loss - base - expansion.directional(scaled_noise)
            elif extra in noise:
                loss = self.subject.loss_value(batch, {extra: noise[extra]})
                alone[extra] = loss - base - terms.sites[extra].directional
        by_class = self.subject.loss.by_class(expansion.output, terms.u, batch.targets)
        if by_class is not None:
            self.classes.add(batch.number, expansion.count, by_class)
        return _ExplicitSample(all_sites, terms.sites, alone, scaled)

    def result(self) -> Explicit:
        """Compute the result from the samples."""
        samples = self.samples

        def share(part: str) -> Estimate:
            return samples.ratio(lambda s: getattr(s.all_sites, part), lambda s: s.all_sites.r_drop)

        return Explicit(
            parts=parts_of(samples, lambda s: s.all_sites),
            quadratic_share=share("half_quadratic"),
            second_order_share=share("second_order"),
            sites={site.name: self._site_effect(site) for site in self.subject.sites},
            curve=[self._point(factor) for factor in sorted([*self.factors, 1.0])],
            classes=self.classes.top(),
            batches=samples.batch_count,
            batches_given=len(self.subject.batches),
            masks=samples.count,
            differences=self.expander.differences,
        )

    def _site_effect(self, site: Site) -> SiteEffect:
        name = site.name
        share = self.samples.ratio(
            lambda s: s.sites[name].half_quadratic if name in s.sites else 0.0,
            lambda s: fsum(terms.half_quadratic for terms in s.sites.values()),
        )
        alone = parts_of(self.samples, lambda s: s.site_alone(name))
        return SiteEffect(site.p, site.kind, share, alone)

    def _point(self, factor: float) -> Point:
        if factor == 1.0:
            return Point(factor, self.largest_p, parts_of(self.samples, lambda s: s.all_sites))
        growth = {s.name: (sigma(s.p * factor) / s.sigma) ** 2 for s in self.subject.sites}
        parts = parts_of(self.samples, lambda s: s.scaled(factor, growth))
        return Point(factor, factor * self.largest_p, parts)
