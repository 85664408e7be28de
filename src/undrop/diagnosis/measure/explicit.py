"""The explicit effect: R_drop and its parts, over all sites, by site, by class, and for other p.

For other p, the second-order terms follow from those at the model's own p, because each site's part
grows as its σ² = q/(1-q). Only R_drop needs new samples.
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
    SecondOrder,
    parts_of,
    sample_mask,
)
from undrop.diagnosis.measure.timing import Budget
from undrop.intercept import Batch, Site
from undrop.losses import ByClass
from undrop.noise import sigma

TOP = 10
"""The number of classes to show."""


class ClassShare(NamedTuple):
    """The share of one class."""

    number: int
    name: str
    share: Estimate
    """Its share of uᵀHu."""
    weight: float
    """Its share of Σ p(1 - p), the diagonal of H: its share of uᵀHu if all u_c were equal in size."""


class _Sums:
    """Sums over the masks of one batch: of X (by class), X², XT, T and T², with T = Σ X."""

    def __init__(self, weight: float, classes: int) -> None:
        self.weight = weight
        self.n = 0
        self.x, self.xx, self.xt = (np.zeros(classes) for _ in range(3))
        self.t = self.tt = 0.0

    def add(self, x: NDArray[np.float64]) -> None:
        total = float(x.sum())
        self.n += 1
        self.x, self.xx, self.xt = self.x + x, self.xx + x * x, self.xt + x * total
        self.t, self.tt = self.t + total, self.tt + total * total

    def moments(self, c: int) -> BatchMoments:
        """The means and covariance of X_c and T."""
        n = self.n
        mean = np.array([self.x[c], self.t]) / n
        square = np.array([[self.xx[c], self.xt[c]], [self.xt[c], self.tt]]) / n
        covariance = (square - np.outer(mean, mean)) * n / max(n - 1, 1)
        return BatchMoments(self.weight, n, mean, covariance)


class ClassShares:
    """Collects the shares of the classes, by name or number, over masks and batches."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._batches: dict[int, _Sums] = {}
        self._diagonal: NDArray[np.float64] | None = None

    def add(self, batch: int, terms: float, found: ByClass) -> None:
        """Add one mask of a batch with that many terms."""
        x = (found.quadratic / terms).cpu().numpy()
        if batch not in self._batches:
            self._batches[batch] = _Sums(terms, len(x))
            diagonal = found.diagonal.cpu().numpy()
            self._diagonal = diagonal if self._diagonal is None else self._diagonal + diagonal
        self._batches[batch].add(x)

    def top(self, count: int = TOP) -> list[ClassShare]:
        """The classes with the largest shares; none if nothing was added."""
        batches = list(self._batches.values())
        if self._diagonal is None or not sum(b.t for b in batches):
            return []
        weight = self._diagonal / self._diagonal.sum()
        order = np.argsort(-np.sum([b.weight * b.x / b.n for b in batches], axis=0))[:count]
        return [
            ClassShare(
                int(c),
                str(c) if self._names is None else self._names[c],
                ratio_of_means([b.moments(int(c)) for b in batches]),
                float(weight[c]),
            )
            for c in order
        ]


_GRID = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # values of the largest p of the model, for the curve
_NEAR = 0.1  # a value this close to the model's own p, relative to it, is left out
_VISIT = 2  # masks per batch each time it is expanded
_EXTRAS = 8  # passes per mask for single sites and other p


class SiteEffect(NamedTuple):
    """The effect of one site."""

    p: float
    kind: str
    share: Estimate
    """Its share of ½E[uᵀHu]; the shares of all sites add up to 1."""
    parts: Parts
    """R_drop and its parts with dropout at this site alone."""


class Point(NamedTuple):
    """The effect with every site's p times ``factor``; ``p`` is the largest of these p."""

    factor: float
    p: float
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
    """Why second derivatives are computed as differences; None if they are not."""


class _Sample(NamedTuple):
    """One mask on a batch."""

    every: MaskSample
    """With all sites."""
    sites: Mapping[str, SecondOrder]
    """Each site's part of the second-order terms."""
    alone: Mapping[str, float]
    """R_drop with dropout at one site alone, for some sites."""
    scaled: Mapping[float, float]
    """R_drop with every p times a factor, for some factors."""

    def site_alone(self, name: str) -> MaskSample | None:
        """The parts of one site alone, if its R_drop was sampled."""
        if name not in self.alone or name not in self.sites:
            return None
        order = self.sites[name]
        return MaskSample(self.alone[name], order.half_quadratic, order.curvature)

    def rescaled(self, factor: float, growth: Mapping[str, float]) -> MaskSample | None:
        """The parts with every p times a factor, which multiplies σ² by ``growth`` at each site."""
        if factor not in self.scaled:
            return None
        half = fsum(growth[name] * part.half_quadratic for name, part in self.sites.items())
        curvature = fsum(growth[name] * part.curvature for name, part in self.sites.items())
        return MaskSample(self.scaled[factor], half, curvature)


def measure_explicit(
    measured: MeasuredModel,
    budget: Budget,
    *,
    draws: int | None = None,
    names: Sequence[str] | None = None,
) -> Explicit:
    """Measure the explicit effect until the time, or the draws per batch, are used up.

    At least two masks of the first batch are drawn. ``names`` are the names of the classes.
    """
    return _ExplicitStudy(measured, names).run(budget, draws)


class _ExplicitStudy:
    """Collects samples over masks, and computes the result."""

    def __init__(self, measured: MeasuredModel, names: Sequence[str] | None = None) -> None:
        self.measured, self.expander = measured, Expander(measured)
        self.samples: Samples[_Sample] = Samples()
        self.classes = ClassShares(names)
        self.largest = max(site.p for site in measured.sites)
        self.factors = [
            q / self.largest for q in _GRID if abs(q - self.largest) > _NEAR * self.largest
        ]

    def result(self) -> Explicit:
        """The result from the samples."""
        samples = self.samples
        return Explicit(
            parts=parts_of(samples, lambda s: s.every),
            quadratic_share=samples.ratio(
                lambda s: s.every.half_quadratic, lambda s: s.every.r_drop
            ),
            second_order_share=samples.ratio(
                lambda s: s.every.half_quadratic + s.every.curvature, lambda s: s.every.r_drop
            ),
            sites={site.name: self._site(site) for site in self.measured.sites},
            curve=[self._point(factor) for factor in sorted([*self.factors, 1.0])],
            classes=self.classes.top(),
            batches=samples.batch_count,
            batches_given=len(self.measured.batches),
            masks=samples.count,
            differences=self.expander.blocked,
        )

    def _site(self, site: Site) -> SiteEffect:
        name = site.name
        share = self.samples.ratio(
            lambda s: s.sites[name].half_quadratic if name in s.sites else 0.0,
            lambda s: fsum(part.half_quadratic for part in s.sites.values()),
        )
        alone = parts_of(self.samples, lambda s: s.site_alone(name))
        return SiteEffect(site.p, site.kind, share, alone)

    def _point(self, factor: float) -> Point:
        if factor == 1.0:
            return Point(factor, self.largest, parts_of(self.samples, lambda s: s.every))
        growth = {s.name: (sigma(s.p * factor) / s.sigma) ** 2 for s in self.measured.sites}
        parts = parts_of(self.samples, lambda s: s.rescaled(factor, growth))
        return Point(factor, factor * self.largest, parts)

    def run(self, budget: Budget, draws: int | None) -> Explicit:
        """Visit the batches in turn, two masks at a time."""
        kinds: list[str | float] = [*self.measured.sites.names, *self.factors]
        extras = cycle(kinds)
        rounds = None if draws is None else max(1, draws // _VISIT)
        for batch in budget.visits(self.measured.batches, rounds):
            self._visit(batch, extras, everything=self.samples.count == 0)
        return self.result()

    def _visit(self, batch: Batch, extras: Iterator[str | float], *, everything: bool) -> None:
        expanded = self.expander(batch)
        for _ in range(_VISIT):
            most = len(self.measured.sites) + len(self.factors)
            chosen = list(islice(extras, most if everything else min(most, _EXTRAS)))
            sample = self._sample(expanded, chosen)
            self.samples.add(batch.number, expanded.count, sample)

    def _sample(self, expanded: Expansion, extras: Sequence[str | float]) -> _Sample:
        batch, base = expanded.batch, expanded.base
        noise = self.measured.draw_masks(expanded.found)
        every, terms = sample_mask(expanded, noise)
        alone, scaled = {}, {}
        for extra in extras:
            if isinstance(extra, float):
                other = self.measured.draw_masks(expanded.found, extra)
                value = self.measured.loss_value(batch, other)
                scaled[extra] = value - base - expanded.directional(other)
            elif extra in noise:
                value = self.measured.loss_value(batch, {extra: noise[extra]})
                alone[extra] = value - base - terms.sites[extra].directional
        found = self.measured.loss.by_class(expanded.output, terms.u, batch.targets)
        if found is not None:
            self.classes.add(batch.number, expanded.count, found)
        return _Sample(every, terms.sites, alone, scaled)
