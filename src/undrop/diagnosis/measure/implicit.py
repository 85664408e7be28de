"""The implicit effect: dropout's gradient noise, compared with ξ_approx and with mini-batching.

Covariances are compared through the inner products of samples (m, D) alone. Standard errors come from
the jackknife over blocks of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undrop.diagnosis.measure.estimates import Estimate, Samples, ratio_of_independent
from undrop.diagnosis.measure.gradients import GradientNoise, Sketch
from undrop.diagnosis.measure.model import MeasuredModel
from undrop.diagnosis.measure.timing import Budget

_BLOCKS = 16  # of samples, in the jackknife
_MOST = 256  # samples for eigenspaces, whose cost grows as their cube


def cosine(a: Tensor, b: Tensor) -> Estimate:
    """Return the cosine of E[a] and E[b], for samples that come in pairs.

    It uses only products of different samples. Products of a sample with itself would make the norms
    too large and the cosine too small, above all with few samples.
    """
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(kept: Tensor) -> float:
        cross, *norms = (
            float(gram[kept][:, kept].sum() - gram[kept, kept].sum()) for gram in (ab, aa, bb)
        )
        product = norms[0] * norms[1]
        return cross / math.sqrt(product) if product > 0.0 else math.nan

    found = _jackknife(statistic, len(a))
    return found._replace(value=max(-1.0, min(1.0, found.value)))


def _jackknife(statistic: Callable[[Tensor], float], n: int) -> Estimate:
    """Return a statistic of n samples, with its error from leaving out one block at a time.

    Each block has an even number of samples.
    """
    every = torch.arange(n)
    size = 2 * math.ceil(n / (2 * _BLOCKS))
    blocks = every.split(size)
    k, value = len(blocks), statistic(every)
    without = []
    if n > 2 * size:
        without = [statistic(torch.cat([*blocks[:i], *blocks[i + 1 :]])) for i in range(k)]
    if len(without) < 2 or not all(map(math.isfinite, without)):
        return Estimate(value, None)
    mean = math.fsum(without) / k
    spread = math.fsum((x - mean) ** 2 for x in without)
    return Estimate.of(value, math.sqrt((k - 1) / k * spread), k - 1.0)


def _shared(aa: Tensor, ab: Tensor, bb: Tensor, k: int) -> float:
    """Return ‖U_aᵀU_b‖²_F / k for the leading k directions of two sets of samples."""
    sides = []
    for gram in (aa, bb):
        values, vectors = torch.linalg.eigh(gram)
        top = values[-k:].clamp_min(1e-30)
        sides.append(vectors[:, -k:] / top.sqrt())
    return float((sides[0].T @ ab @ sides[1]).square().sum() / k)


def overlap(a: Tensor, b: Tensor, k: int) -> Estimate:
    """Return how much the leading k directions of two covariances agree, each from half its samples."""
    a, b = a[:_MOST], b[:_MOST]
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(kept: Tensor) -> float:
        even, odd = kept[::2], kept[1::2]
        return 0.5 * sum(
            _shared(aa[i][:, i], ab[i][:, j], bb[j][:, j], k) for i, j in ((even, odd), (odd, even))
        )

    return _jackknife(statistic, len(a))


def trace_of_means(samples: Tensor, k: int) -> Estimate:
    """Return k times the trace of the covariance of the mean of k samples."""
    groups = [group.mean(0) for group in samples.split(k) if len(group) == k]
    values = torch.stack([k * group.square().sum() for group in groups])
    n = len(groups)
    stderr = float(values.std() / math.sqrt(n)) if n > 1 else None
    return Estimate.of(float(values.mean()), stderr, n - 1.0)


PLACES = 1 << 16
"""The size of the sketch in which gradients are kept; gradients of smaller models are kept whole."""
_KS = (1, 2, 4, 8)
_DIRECTIONS = 5  # of the leading eigenspace
_LEAST = 4  # samples of each kind
_KEPT = 256  # sketches of each kind; traces use all samples


class Group(NamedTuple):
    """The traces of one part of the model."""

    trace_dropout: Estimate
    trace_analytic: Estimate
    trace_batch: Estimate | None
    parameters: int


class Overlap(NamedTuple):
    """How well two leading eigenspaces agree: ‖U₁ᵀU₂‖²_F / k, from samples."""

    value: Estimate
    """The overlap of dropout's and ξ_approx's, from half of the samples each."""
    ceiling: Estimate
    """The overlap of dropout's with itself, from two halves of its samples: the most that this number
    of samples can show."""
    chance: float
    """The overlap of two random spaces."""
    directions: int
    """k."""


class Shrinking(NamedTuple):
    """k times the trace of the mean of k samples of noise: constant if the trace falls as 1/k."""

    k: int
    dropout: Estimate
    analytic: Estimate


@dataclass(frozen=True)
class Implicit:
    """The implicit effect of a model's dropout: covariances of gradient noise."""

    trace_dropout: Estimate
    trace_analytic: Estimate
    trace_batch: Estimate | None
    """None with fewer than two batches."""
    analytic_ratio: Estimate
    """trace_analytic / trace_dropout."""
    batch_ratio: Estimate | None
    """trace_dropout / trace_batch."""
    cosine: Estimate
    """The cosine between the diagonals of dropout's and of ξ_approx's covariance."""
    overlap: Overlap
    groups: dict[str, Group]
    shrinking: list[Shrinking]
    samples: int
    parameters: int
    kept: int
    """How many numbers are kept of each gradient: fewer than ``parameters`` if it is sketched."""


Traces = Mapping[str, float]
"""The squared norm of a sample of noise by part of the model: a sample of its covariance's trace."""


class _Pair(NamedTuple):
    """One sample of each kind on a batch."""

    dropout: Traces
    analytic: Traces


def measure_implicit(
    measured: MeasuredModel, budget: Budget, *, draws: int | None = None
) -> Implicit:
    """Measure the implicit effect until the time, or the draws of each kind per batch, are used up.

    At least four samples are drawn.
    """
    study = _NoiseStudy(measured)
    study.between_batches(budget)
    study.within_batches(budget, draws)
    return study.result()


class _NoiseStudy:
    """Collects samples of the gradient noise: the trace of each, and a sketch of some."""

    def __init__(self, measured: MeasuredModel) -> None:
        self.measured = measured
        self.noise = GradientNoise(measured)
        device = next(measured.model.parameters()).device
        self.sketch = Sketch(self.noise.size, PLACES, device)
        self.pairs: Samples[_Pair] = Samples()
        self.between: Samples[Traces] = Samples()
        self.directions: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.squares: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.sizes: dict[str, int] = {}
        for group, parameter in zip(self.noise.groups, self.noise.parameters, strict=True):
            self.sizes[group] = self.sizes.get(group, 0) + parameter.numel()

    def between_batches(self, budget: Budget) -> None:
        """Sample disjoint pairs of batches, in at most a fifth of the time."""
        batches = self.measured.batches
        for pair, (one, two) in enumerate(zip(batches[::2], batches[1::2], strict=False)):
            if pair > 1 and budget.elapsed > 0.2:
                return
            self.between.add(pair, 1.0, self._traces(self.noise.between(one, two)))

    def within_batches(self, budget: Budget, draws: int | None) -> None:
        """Visit the batches in turn, one sample of dropout's noise and one of ξ_approx each time."""
        batches = self.measured.batches
        rounds = None if draws is None else max(draws, math.ceil(_LEAST / len(batches)))
        for batch in budget.visits(batches, rounds, least=_LEAST):
            samples = (self.noise.dropout(batch), self.noise.analytic(batch))
            if self.pairs.count < _KEPT:
                for kind, sample in enumerate(samples):
                    self.directions[kind].append(self.sketch(sample))
                    self.squares[kind].append(self.sketch([part.square() for part in sample]))
            self.pairs.add(batch.number, 1.0, _Pair(*map(self._traces, samples)))

    def _traces(self, sample: list[Tensor]) -> Traces:
        traces = dict.fromkeys(self.sizes, 0.0)
        for group, part in zip(self.noise.groups, sample, strict=True):
            traces[group] += float(part.double().square().sum())
        return traces

    def result(self) -> Implicit:
        """Compare the covariances."""
        drop, analytic = (torch.stack(kept) for kept in self.directions)
        trace_dropout = self.pairs.mean(lambda s: math.fsum(s.dropout.values()))
        trace_batch = None
        if self.between.batch_count:
            trace_batch = self.between.mean(lambda s: math.fsum(s.values()))
        return Implicit(
            trace_dropout=trace_dropout,
            trace_analytic=self.pairs.mean(lambda s: math.fsum(s.analytic.values())),
            trace_batch=trace_batch,
            analytic_ratio=self.pairs.ratio(
                lambda s: math.fsum(s.analytic.values()), lambda s: math.fsum(s.dropout.values())
            ),
            batch_ratio=None
            if trace_batch is None
            else ratio_of_independent(trace_dropout, trace_batch),
            cosine=cosine(*(torch.stack(kept) for kept in self.squares)),
            overlap=_overlap(drop, analytic, self.sketch.places),
            groups={group: self._group(group) for group in self.sizes},
            shrinking=[
                Shrinking(k, trace_of_means(drop, k), trace_of_means(analytic, k))
                for k in _KS
                if len(drop) >= 2 * k
            ],
            samples=self.pairs.count,
            parameters=self.noise.size,
            kept=self.sketch.places,
        )

    def _group(self, group: str) -> Group:
        has_batches = self.between.batch_count > 0
        return Group(
            self.pairs.mean(lambda s: s.dropout[group]),
            self.pairs.mean(lambda s: s.analytic[group]),
            self.between.mean(lambda s: s[group]) if has_batches else None,
            self.sizes[group],
        )


def _overlap(drop: Tensor, analytic: Tensor, places: int) -> Overlap:
    k = max(1, min(_DIRECTIONS, len(drop) // 4))
    return Overlap(overlap(drop, analytic, k), overlap(drop, drop, k), min(1.0, k / places), k)
