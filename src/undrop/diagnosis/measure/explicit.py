"""The explicit effect: R_drop and its parts, over all sites, by site, and for other p.

For other p the second-order terms follow from those at the model's own p, since they grow as
σ² = q/(1-q) site by site; only R_drop needs new samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import fsum
from typing import NamedTuple

from undrop.diagnosis.measure.classes import ClassShare, ClassShares
from undrop.diagnosis.measure.enumeration import Masks, enumerable, expected_loss
from undrop.diagnosis.measure.estimates import Estimate, SampleKind, Samples
from undrop.diagnosis.measure.model import MeasuredModel, NumberedBatch
from undrop.diagnosis.measure.r_drop import (
    Expanded,
    Expander,
    MaskSample,
    Parts,
    parts_of,
    sample_mask,
)
from undrop.diagnosis.measure.timing import Budget
from undrop.intercept import Site
from undrop.losses import ByClass
from undrop.noise import sigma

_GRID = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # the largest p of the model, for the curve
_NEAR = 0.1  # a point of the grid this close to the model's own p adds nothing
_VISIT = 2  # masks per batch each time it is expanded
_EXTRAS = 8  # passes for single sites and other p that go with one mask
_CURVE_LIMIT = 12  # mask entries up to which the curve is enumerated as well


class SiteEffect(NamedTuple):
    """The effect of one site."""

    p: float
    kind: str
    share: Estimate
    """Of ½E[uᵀHu]; the shares of all sites add up to 1."""
    parts: Parts
    """With dropout at this site alone."""


class Point(NamedTuple):
    """The effect with every site's p times ``factor``; ``p`` is the largest p then."""

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
    """The same with the model's curvature: all of second order."""
    sites: dict[str, SiteEffect]
    curve: list[Point]
    classes: list[ClassShare]
    exact: bool
    """Whether every mask was enumerated: then only batches contribute to errors."""
    batches: int
    """The number of batches that were measured."""
    batches_given: int
    masks: int
    differences: str | None
    """Why second derivatives are differences; None if they are not."""


class _Sample(NamedTuple):
    """One mask on a batch, or the expectation over masks."""

    every: MaskSample
    """With all sites."""
    sites: Mapping[str, MaskSample]
    """Each site's part of the second-order terms; R_drop is NaN here."""
    alone: Mapping[str, float]
    """R_drop with dropout at one site alone, for some sites."""
    scaled: Mapping[float, float]
    """R_drop with every p times a factor, for some factors."""

    def site_alone(self, name: str) -> MaskSample | None:
        """The parts of one site alone, if its R_drop was sampled."""
        if name not in self.alone or name not in self.sites:
            return None
        return self.sites[name]._replace(r_drop=self.alone[name])

    def rescaled(self, factor: float, growth: Mapping[str, float]) -> MaskSample | None:
        """The parts with every p times a factor; ``growth`` is that of σ² at each site."""
        if factor not in self.scaled:
            return None
        half, curvature = (
            fsum(growth[name] * part[place] for name, part in self.sites.items())
            for place in (1, 2)
        )
        return MaskSample(self.scaled[factor], half, curvature)


def measure_explicit(
    measured: MeasuredModel,
    budget: Budget,
    *,
    draws: int | None = None,
    names: Sequence[str] | None = None,
) -> Explicit:
    """Measure the explicit effect until the time or the draws are used up.

    Args:
        measured: the model.
        budget: the time; at least two masks of the first batch are drawn.
        draws: the largest number of masks per batch; None uses all the time.
        names: the names of the classes.
    """
    expander = Expander(measured)
    first = expander(measured.batches[0])
    if enumerable(measured, measured.batches[0], first) is not None:
        found = _Enumerated(measured, expander, names).run(budget, draws)
        if found is not None:
            return found
    return _Sampled(measured, expander, names).run(budget, draws)


class _Study:
    """What sampling and enumeration share: the samples, and the result from them."""

    exact: bool

    def __init__(
        self, measured: MeasuredModel, expander: Expander, names: Sequence[str] | None
    ) -> None:
        self.measured, self.expander = measured, expander
        only = len(measured.batches) == 1
        kind: SampleKind = "sampled" if not self.exact else "complete" if only else "enumerated"
        self.samples: Samples[_Sample] = Samples(kind)
        self.curve = self.samples
        self.classes = ClassShares(names, kind)
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
            exact=self.exact,
            batches=samples.batches,
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
        parts = parts_of(self.curve, lambda s: s.rescaled(factor, growth))
        return Point(factor, factor * self.largest, parts)


class _Sampled(_Study):
    """By Monte Carlo over masks."""

    exact = False

    def run(self, budget: Budget, draws: int | None) -> Explicit:
        """Visit the batches in turn, two masks at a time."""
        kinds: list[str | float] = [*self.measured.sites.names, *self.factors]
        extras = cycle(kinds)
        rounds = None if draws is None else max(1, draws // _VISIT)
        for batch in budget.visits(self.measured.batches, rounds):
            self._visit(batch, extras, everything=self.samples.count == 0)
        return self.result()

    def _visit(
        self, batch: NumberedBatch, extras: Iterator[str | float], *, everything: bool
    ) -> None:
        expanded = self.expander(batch)
        base = self.measured.loss_value(batch, {})
        for _ in range(_VISIT):
            most = len(self.measured.sites) + len(self.factors)
            chosen = list(islice(extras, most if everything else min(most, _EXTRAS)))
            sample = self._sample(batch, expanded, base, chosen)
            self.samples.add(batch.number, expanded.count, sample)

    def _sample(
        self,
        batch: NumberedBatch,
        expanded: Expanded,
        base: float,
        extras: Sequence[str | float],
    ) -> _Sample:
        noise = self.measured.draw_masks(expanded.found)
        every, terms = sample_mask(self.measured, batch, expanded, base, noise)
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
        sites = {
            name: MaskSample(float("nan"), order.half_quadratic, order.curvature)
            for name, order in terms.sites.items()
        }
        return _Sample(every, sites, alone, scaled)


class _Enumerated(_Study):
    """By every possible mask; exact except for the choice of batches."""

    exact = True

    def run(self, budget: Budget, draws: int | None) -> Explicit | None:
        """Visit every batch once; None if one has too many masks."""
        for place, batch in enumerate(self.measured.batches):
            if place and budget.spent(place / len(self.measured.batches)):
                break
            expanded = self.expander(batch)
            masks = enumerable(self.measured, batch, expanded)
            if masks is None:
                return None
            self.samples.add(batch.number, expanded.count, self._sample(batch, expanded, masks))
        if any(factor not in sample.scaled for sample in self.samples for factor in self.factors):
            sampled = _Sampled(self.measured, self.expander, None)
            sampled.run(budget, draws)
            self.curve = sampled.samples
        return self.result()

    def _sample(self, batch: NumberedBatch, expanded: Expanded, masks: Masks) -> _Sample:
        measured, base = self.measured, self.measured.loss_value(batch, {})
        sites = self._second_order(batch, expanded, masks)
        alone = {name: expected_loss(measured, batch, masks.only(name)) - base for name in sites}
        factors = self.factors if masks.entries <= _CURVE_LIMIT else []
        scaled = {f: expected_loss(measured, batch, masks, f) - base for f in factors}
        every = MaskSample(
            expected_loss(measured, batch, masks) - base,
            fsum(part.half_quadratic for part in sites.values()),
            fsum(part.curvature for part in sites.values()),
        )
        return _Sample(every, sites, alone, scaled)

    def _second_order(
        self, batch: NumberedBatch, expanded: Expanded, masks: Masks
    ) -> dict[str, MaskSample]:
        """E[vᵀAv] = Σ σ_j² A_jj, entry by entry."""
        sites: dict[str, MaskSample] = {}
        whole: ByClass | None = None
        for site, noise in masks.units():
            terms = expanded.along(noise)
            before = sites.get(site.name, MaskSample(float("nan"), 0.0, 0.0))
            sites[site.name] = MaskSample(
                before.r_drop,
                before.half_quadratic + terms.total.half_quadratic,
                before.curvature + terms.total.curvature,
            )
            found = self.measured.loss.by_class(expanded.output, terms.u, batch.targets)
            if found is not None:
                sofar = 0.0 if whole is None else whole.quadratic
                whole = ByClass(found.quadratic + sofar, found.diagonal)
        if whole is not None:
            self.classes.add(batch.number, expanded.count, whole)
        return sites
