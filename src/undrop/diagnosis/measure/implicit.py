"""The implicit effect: dropout's gradient noise, compared with ξ_approx and with mini-batching.

Covariances are never formed: all comparisons use the inner products of samples, which are small
matrices. Standard errors come from the jackknife over blocks of samples.
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

SKETCH_WIDTH = 1 << 16
"""The size of the sketch of a gradient. Smaller gradients are kept as they are."""
_MIN_SAMPLES = 4  # of each kind
_MAX_SKETCHES = 256  # of each kind; traces use all samples
_MAX_EIGEN_SAMPLES = 256  # for eigenspaces, whose cost is cubic in the number of samples
_JACKKNIFE_BLOCKS = 16
_DIRECTIONS = 5  # of a leading eigenspace
_KS = (1, 2, 4, 8)


def cosine(a: Tensor, b: Tensor) -> Estimate:
    """Return the cosine of E[a] and E[b]; row i of a and row i of b are a pair of samples.

    It uses only products of different rows. Products of a sample with itself would make the norms
    too large and the cosine too small, above all with few samples.
    """
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(rows: Tensor) -> float:
        sums = (float(gram[rows][:, rows].sum() - gram[rows, rows].sum()) for gram in (ab, aa, bb))
        ab_sum, aa_sum, bb_sum = sums
        square = aa_sum * bb_sum
        return ab_sum / math.sqrt(square) if square > 0.0 else math.nan

    estimate = _jackknife(statistic, len(a))
    return estimate._replace(value=max(-1.0, min(1.0, estimate.value)))


def _jackknife(statistic: Callable[[Tensor], float], n: int) -> Estimate:
    """Return a statistic of n samples, with the error from leaving out one block of samples at a time.

    ``statistic`` receives the indices of the samples to use. Blocks have an even size, because the
    statistic may split the samples into halves.
    """
    indices = torch.arange(n)
    size = 2 * math.ceil(n / (2 * _JACKKNIFE_BLOCKS))
    blocks = indices.split(size)
    k, value = len(blocks), statistic(indices)
    if n <= 2 * size:
        return Estimate(value, None)
    values = [statistic(torch.cat([*blocks[:i], *blocks[i + 1 :]])) for i in range(k)]
    if not all(map(math.isfinite, values)):
        return Estimate(value, None)
    mean = math.fsum(values) / k
    squares = math.fsum((x - mean) ** 2 for x in values)
    return Estimate.of(value, math.sqrt((k - 1) / k * squares), k - 1.0)


def _subspace_overlap(aa: Tensor, ab: Tensor, bb: Tensor, k: int) -> float:
    """Return ‖U_aᵀU_b‖²_F / k, where U_a and U_b are the leading k directions of two sets of samples.

    The arguments are the inner products within and between the sets.
    """
    directions = []
    for gram in (aa, bb):
        values, vectors = torch.linalg.eigh(gram)
        directions.append(vectors[:, -k:] / values[-k:].clamp_min(1e-30).sqrt())
    return float((directions[0].T @ ab @ directions[1]).square().sum() / k)


def eigenspace_overlap(a: Tensor, b: Tensor, k: int) -> Estimate:
    """Return the overlap of the leading k directions of two covariances: 1 if they are the same space.

    One covariance is estimated from the even samples and the other one from the odd samples, so ``a``
    can also be compared with itself.
    """
    a, b = a[:_MAX_EIGEN_SAMPLES], b[:_MAX_EIGEN_SAMPLES]
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(rows: Tensor) -> float:
        even, odd = rows[::2], rows[1::2]
        return 0.5 * sum(
            _subspace_overlap(aa[i][:, i], ab[i][:, j], bb[j][:, j], k)
            for i, j in ((even, odd), (odd, even))
        )

    return _jackknife(statistic, len(a))


def trace_of_means(samples: Tensor, k: int) -> Estimate:
    """Return k times the trace of the covariance of the mean of k samples."""
    groups = [group.mean(0) for group in samples.split(k) if len(group) == k]
    values = torch.stack([k * group.square().sum() for group in groups])
    n = len(groups)
    stderr = float(values.std() / math.sqrt(n)) if n > 1 else None
    return Estimate.of(float(values.mean()), stderr, n - 1.0)


class Group(NamedTuple):
    """The traces of gradient noise in one part of the model."""

    trace_dropout: Estimate
    trace_analytic: Estimate
    trace_batch: Estimate | None
    parameters: int


class Overlap(NamedTuple):
    """The overlap ‖U₁ᵀU₂‖²_F / k of leading eigenspaces U of covariances."""

    value: Estimate
    """The overlap of dropout's covariance with that of ξ_approx."""
    ceiling: Estimate
    """The overlap of dropout's covariance with itself, from two halves of its samples: the largest
    overlap that this number of samples can show."""
    chance: float
    """The overlap of two random spaces."""
    directions: int
    """k, the dimension of the eigenspaces."""


class Shrinking(NamedTuple):
    """k times the trace of the mean of k samples: the same for every k if the trace falls as 1/k."""

    k: int
    dropout: Estimate
    analytic: Estimate


@dataclass(frozen=True)
class Implicit:
    """The implicit effect of a model's dropout: how its gradient noise compares with other noise."""

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
"""The squared norm of a sample of noise in each part of the model; the trace is its mean."""


class _NoiseSample(NamedTuple):
    """The traces from one sample of dropout's noise and one of ξ_approx."""

    dropout: Traces
    analytic: Traces


def measure_implicit(subject: MeasuredModel, budget: Budget, draws: int | None = None) -> Implicit:
    """Measure the implicit effect until the time is up, or ``draws`` samples of every batch are drawn.

    A sample is one of dropout's noise and one of ξ_approx. At least four are drawn.
    """
    study = _NoiseStudy(subject)
    study.sample_batching(budget)
    study.sample_dropout_and_analytic(budget, draws)
    return study.result()


class _NoiseStudy:
    """Collects samples of gradient noise: the trace of each, and sketches of the first ones."""

    def __init__(self, subject: MeasuredModel) -> None:
        self.subject = subject
        self.noise = GradientNoise(subject)
        device = next(subject.model.parameters()).device
        self.sketch = Sketch(self.noise.size, SKETCH_WIDTH, device)
        self.samples: Samples[_NoiseSample] = Samples()
        self.batching: Samples[Traces] = Samples()
        # sketches of the samples and of their squares, for dropout and for ξ_approx
        self.sketches: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.squares: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.sizes: dict[str, int] = {}
        for group, parameter in zip(self.noise.groups, self.noise.parameters, strict=True):
            self.sizes[group] = self.sizes.get(group, 0) + parameter.numel()

    def sample_batching(self, budget: Budget) -> None:
        """Sample mini-batching's noise on disjoint pairs of batches, in about a fifth of the time."""
        batches = self.subject.batches
        for pair, (one, two) in enumerate(zip(batches[::2], batches[1::2], strict=False)):
            if pair > 1 and budget.elapsed > 0.2:
                return
            self.batching.add(pair, 1.0, self._traces(self.noise.sample_batching(one, two)))

    def sample_dropout_and_analytic(self, budget: Budget, draws: int | None) -> None:
        """Visit the batches in turn, and sample dropout's noise and ξ_approx once each time."""
        batches = self.subject.batches
        rounds = None if draws is None else max(draws, math.ceil(_MIN_SAMPLES / len(batches)))
        for batch in budget.visits(batches, rounds, minimum=_MIN_SAMPLES):
            samples = (self.noise.sample_dropout(batch), self.noise.sample_analytic(batch))
            if self.samples.count < _MAX_SKETCHES:
                for kind, sample in enumerate(samples):
                    self.sketches[kind].append(self.sketch(sample))
                    self.squares[kind].append(self.sketch([part.square() for part in sample]))
            self.samples.add(batch.number, 1.0, _NoiseSample(*map(self._traces, samples)))

    def _traces(self, sample: list[Tensor]) -> Traces:
        traces = dict.fromkeys(self.sizes, 0.0)
        for group, part in zip(self.noise.groups, sample, strict=True):
            traces[group] += float(part.double().square().sum())
        return traces

    def result(self) -> Implicit:
        """Compare the covariances."""
        dropout, analytic = (torch.stack(sketches) for sketches in self.sketches)
        whole = self._group(list(self.sizes))
        batch = whole.trace_batch
        ks = [k for k in _KS if len(dropout) >= 2 * k]
        return Implicit(
            trace_dropout=whole.trace_dropout,
            trace_analytic=whole.trace_analytic,
            trace_batch=batch,
            analytic_ratio=self.samples.ratio(
                lambda s: math.fsum(s.analytic.values()), lambda s: math.fsum(s.dropout.values())
            ),
            batch_ratio=None if batch is None else ratio_of_independent(whole.trace_dropout, batch),
            cosine=cosine(*map(torch.stack, self.squares)),
            overlap=_overlap(dropout, analytic),
            groups={name: self._group([name]) for name in self.sizes},
            shrinking=[
                Shrinking(k, trace_of_means(dropout, k), trace_of_means(analytic, k)) for k in ks
            ],
            samples=self.samples.count,
            parameters=whole.parameters,
            kept=self.sketch.width,
        )

    def _group(self, names: list[str]) -> Group:
        """Return the traces in the named parts of the model together."""

        def sum_over(traces: Traces) -> float:
            return math.fsum(traces[name] for name in names)

        return Group(
            self.samples.mean(lambda s: sum_over(s.dropout)),
            self.samples.mean(lambda s: sum_over(s.analytic)),
            self.batching.mean(sum_over) if self.batching.batch_count else None,
            sum(self.sizes[name] for name in names),
        )


def _overlap(dropout: Tensor, analytic: Tensor) -> Overlap:
    samples, size = dropout.shape
    k = max(1, min(_DIRECTIONS, samples // 4))
    return Overlap(
        value=eigenspace_overlap(dropout, analytic, k),
        ceiling=eigenspace_overlap(dropout, dropout, k),
        chance=min(1.0, k / size),
        directions=k,
    )
