"""The explicit effect taken apart: R_drop = ½E[uᵀHu] + ½E[Dℓ·∂²F/∂ε²] + what Taylor misses.

One mask η serves all parts: ℓ(F(x; 1, η)) - ℓ(F(x)) less ∂ℓ/∂ε, which has zero mean and most of the
variance, is a sample of R_drop, and the second-order terms along the same η are samples of the rest.
For other p the second-order terms are known from those at the model's own p, since they go with
σ² = q/(1-q) site by site; only R_drop is sampled anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import fsum
from typing import Any, NamedTuple

from undrop.diagnosis.measure.classes import ClassShare, ClassShares
from undrop.diagnosis.measure.enumeration import Masks, enumerable, expected_loss
from undrop.diagnosis.measure.estimates import Draws, Estimate
from undrop.diagnosis.measure.expansion import Expanded, Expander
from undrop.diagnosis.measure.model import Batch, Subject
from undrop.diagnosis.measure.timing import Budget
from undrop.intercept import Site
from undrop.losses import ByClass
from undrop.noise import sigma

__all__ = ["Explicit", "Parts", "Point", "SiteEffect", "measure_explicit"]

_GRID = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)  # the largest p of the model, for the curve
_NEAR = 0.1  # a point of the grid this near to the model's own p tells nothing new
_VISIT = 2  # masks a batch each time it is expanded
_EXTRAS = 8  # passes for single sites and other p that go with one mask
_CURVE_LIMIT = 12  # mask entries up to which the curve is enumerated as well


class Parts(NamedTuple):
    """R_drop and what it is made of; ``r_drop = psd + non_psd + rest``."""

    r_drop: Estimate
    psd: Estimate
    non_psd: Estimate
    rest: Estimate

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: part.to_json() for name, part in self._asdict().items()}


class SiteEffect(NamedTuple):
    """What one site does."""

    site: Site
    share: Estimate
    """Of ½E[uᵀHu]; the shares of all sites add up to 1."""
    parts: Parts
    """With dropout at this site alone."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "share": self.share.to_json(),
            "p": self.site.p,
            "kind": self.site.kind,
            **self.parts.to_json(),
        }


class Point(NamedTuple):
    """The effect with every site's p times ``factor``; ``q`` is the largest p then."""

    factor: float
    q: float
    parts: Parts

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"factor": self.factor, "q": self.q, **self.parts.to_json()}


@dataclass(frozen=True)
class Explicit:
    """The explicit effect of a model's dropout."""

    parts: Parts
    quadratic_share: Estimate
    """½E[uᵀHu] / R_drop."""
    second_order_share: Estimate
    """The same with the non-PSD term: all that second order has."""
    sites: dict[str, SiteEffect]
    curve: list[Point]
    classes: list[ClassShare]
    exact: bool
    """Whether every mask was enumerated: then the errors are over batches alone."""
    batches: int
    masks: int
    differences: str | None
    """Why second derivatives were had by differences; None where they were not."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **self.parts.to_json(),
            "quadratic_share": self.quadratic_share.to_json(),
            "second_order_share": self.second_order_share.to_json(),
            "sites": {name: effect.to_json() for name, effect in self.sites.items()},
            "curve": [point.to_json() for point in self.curve],
            "classes": [found.to_json() for found in self.classes],
            "exact": self.exact,
            "batches": self.batches,
            "masks": self.masks,
            "differences": self.differences,
        }


def measure_explicit(
    subject: Subject, budget: Budget, *, draws: int, names: Sequence[str] | None = None
) -> Explicit:
    """Measure the explicit effect until the time or the draws are used up.

    Args:
        subject: the model under study.
        budget: the time there is; two masks of the first batch are taken in any case.
        draws: the most masks a batch.
        names: what the classes are called.
    """
    expander = Expander(subject)
    first = expander(subject.batches[0])
    if enumerable(subject, subject.batches[0], first) is not None:
        found = _Enumerated(subject, expander, names).run(budget, draws)
        if found is not None:
            return found
    return _Sampled(subject, expander, names).run(budget, draws)


class _Study:
    """What sampling and enumeration have in common: tables that fill, and how they are read."""

    exact: bool

    def __init__(self, subject: Subject, expander: Expander, names: Sequence[str] | None) -> None:
        self.subject, self.expander = subject, expander
        self.table = Draws(exact=self.exact)
        self.curve = self.table
        self.classes = ClassShares(names, exact=self.exact)
        self.largest = max(site.p for site in subject.sites)
        self.factors = [
            q / self.largest for q in _GRID if abs(q - self.largest) > _NEAR * self.largest
        ]

    def result(self) -> Explicit:
        """Read the tables."""
        sites = {site.name: site for site in self.subject.sites}
        psd = {f"psd {name}": 1.0 for name in sites}
        return Explicit(
            parts=_parts(self.table, {"r_drop": 1.0}, {"psd": 1.0}, {"non_psd": 1.0}),
            quadratic_share=self.table.ratio({"psd": 1.0}, {"r_drop": 1.0}),
            second_order_share=self.table.ratio({"psd": 1.0, "non_psd": 1.0}, {"r_drop": 1.0}),
            sites={
                name: SiteEffect(
                    site, self.table.ratio({f"psd {name}": 1.0}, psd), self._alone(name)
                )
                for name, site in sites.items()
            },
            curve=[self._point(factor) for factor in sorted([*self.factors, 1.0])],
            classes=self.classes.top(),
            exact=self.exact,
            batches=self.table.batches,
            masks=self.table.masks,
            differences=self.expander.blocked,
        )

    def _alone(self, name: str) -> Parts:
        columns = ({f"{part} {name}": 1.0} for part in ("r_drop", "psd", "non_psd"))
        return _parts(self.table, *columns)

    def _point(self, factor: float) -> Point:
        q = factor * self.largest
        if factor == 1.0:
            parts = _parts(self.table, {"r_drop": 1.0}, {"psd": 1.0}, {"non_psd": 1.0})
            return Point(factor, q, parts)
        grown = {s.name: (sigma(s.p * factor) / s.sigma) ** 2 for s in self.subject.sites}
        psd, non_psd = (
            {f"{part} {name}": growth for name, growth in grown.items()}
            for part in ("psd", "non_psd")
        )
        return Point(factor, q, _parts(self.curve, {f"r_drop @{factor}": 1.0}, psd, non_psd))


def _parts(
    table: Draws,
    r_drop: Mapping[str, float],
    psd: Mapping[str, float],
    non_psd: Mapping[str, float],
) -> Parts:
    """The parts; what Taylor misses is what is left, mask by mask."""
    left = {**r_drop, **{k: -v for k, v in psd.items()}, **{k: -v for k, v in non_psd.items()}}
    # All on the rows that have all of them, so that the parts add up.
    every = dict.fromkeys(left, 0.0)
    total, first, second = (table.linear({**every, **part}) for part in (r_drop, psd, non_psd))
    rest = total.value - first.value - second.value
    return Parts(total, first, second, Estimate(rest, table.linear(left).stderr))


class _Sampled(_Study):
    """By Monte Carlo over masks."""

    exact = False

    def run(self, budget: Budget, draws: int) -> Explicit:
        """Go round the batches, two masks at a time."""
        extras = self._extras()
        rounds = max(1, draws // _VISIT)
        for turn in range(rounds):
            for place, batch in enumerate(self.subject.batches):
                first = turn == place == 0
                done = (turn + place / len(self.subject.batches)) / rounds
                if not first and budget.spent(done):
                    return self.result()
                self._visit(batch, extras, everything=first)
        return self.result()

    def _extras(self) -> Iterator[str | float]:
        """Single sites (by name) and other p (by factor), over and over."""
        return cycle([*self.subject.sites.names, *self.factors])

    def _visit(self, batch: Batch, extras: Iterator[str | float], *, everything: bool) -> None:
        expanded = self.expander(batch)
        base = self.subject.value(batch, {})
        for _ in range(_VISIT):
            count = len(self.subject.sites) + len(self.factors)
            chosen = list(islice(extras, count if everything else min(count, _EXTRAS)))
            self.table.add(batch.number, expanded.count, self._row(batch, expanded, base, chosen))

    def _row(
        self, batch: Batch, expanded: Expanded, base: float, extras: Sequence[str | float]
    ) -> dict[str, float]:
        noise = self.subject.masks(expanded.found)
        terms = expanded.along(noise)
        row = {
            "r_drop": self.subject.value(batch, noise) - base - terms.total.first,
            "psd": terms.total.psd,
            "non_psd": terms.total.non_psd,
        }
        for name, order in terms.sites.items():
            row |= {f"psd {name}": order.psd, f"non_psd {name}": order.non_psd}
        for extra in extras:
            if isinstance(extra, str):
                if extra in noise:
                    value = self.subject.value(batch, {extra: noise[extra]})
                    row[f"r_drop {extra}"] = value - base - terms.sites[extra].first
            else:
                other = self.subject.masks(expanded.found, extra)
                value = self.subject.value(batch, other)
                row[f"r_drop @{extra}"] = value - base - expanded.first(other)
        share = self.subject.loss.by_class(expanded.output, terms.u, batch.targets)
        if share is not None:
            self.classes.add(batch.number, expanded.count, share)
        return row


class _Enumerated(_Study):
    """By every mask there is; exact but for the choice of batches."""

    exact = True

    def run(self, budget: Budget, draws: int) -> Explicit | None:
        """Go through the batches once; None where one has too many masks after all."""
        for place, batch in enumerate(self.subject.batches):
            if place and budget.spent(place / len(self.subject.batches)):
                break
            expanded = self.expander(batch)
            masks = enumerable(self.subject, batch, expanded)
            if masks is None:
                return None
            self.table.add(batch.number, expanded.count, self._row(batch, expanded, masks))
        if f"r_drop @{self.factors[0]}" not in self.table:
            sampled = _Sampled(self.subject, self.expander, None)
            sampled.run(budget, draws)
            self.curve = sampled.table
        return self.result()

    def _row(self, batch: Batch, expanded: Expanded, masks: Masks) -> dict[str, float]:
        base = self.subject.value(batch, {})
        names = [site.name for site in masks.shapes]
        row = {"r_drop": expected_loss(self.subject, batch, masks) - base}
        for name in names:
            alone = masks.only(name)
            row[f"r_drop {name}"] = expected_loss(self.subject, batch, alone) - base
        if masks.entries <= _CURVE_LIMIT:
            for factor in self.factors:
                moved = expected_loss(self.subject, batch, masks, factor)
                row[f"r_drop @{factor}"] = moved - base
        row |= self._second_order(batch, expanded, masks)
        for part in ("psd", "non_psd"):
            row[part] = fsum(row[f"{part} {name}"] for name in names)
        return row

    def _second_order(self, batch: Batch, expanded: Expanded, masks: Masks) -> dict[str, float]:
        """E[vᵀAv] = Σ σ_j² A_jj, entry by entry."""
        row: dict[str, float] = {}
        whole: ByClass | None = None
        for site, noise in masks.units():
            terms = expanded.along(noise)
            for part, value in (("psd", terms.total.psd), ("non_psd", terms.total.non_psd)):
                key = f"{part} {site.name}"
                row[key] = row.get(key, 0.0) + value
            found = self.subject.loss.by_class(expanded.output, terms.u, batch.targets)
            if found is not None:
                before = 0.0 if whole is None else whole.quadratic
                whole = ByClass(found.quadratic + before, found.diagonal)
        if whole is not None:
            self.classes.add(batch.number, expanded.count, whole)
        return row
