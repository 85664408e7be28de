"""Figures with standard errors and 95 % intervals, from samples over masks within batches.

A figure is a mean over batches of means over masks; the number of terms in a batch's loss is the weight
of the batch. The variance of a figure is estimated in two ways: from the spread of the batches' means,
which also contains the noise of the masks, and from the spread of the masks within each batch. Each
variance gives an interval by Student's t, with its degrees of freedom. The wider interval is used,
because with few batches the first one can be narrow by chance. The interval of a ratio is Fieller's,
which is valid even if the denominator is uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

S = TypeVar("S")

_ROUNDING = 1e-7  # a standard error smaller than this part of its terms is 0 but for rounding


@cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    return nodes, weights


@lru_cache(maxsize=4096)
def t95(freedom: float) -> float:
    """Return the t with P(|T| ≤ t) = 0.95 for Student's T, by bisection.

    With n degrees of freedom and T = √n·tan φ, the probability is ∫ cosⁿ⁻¹φ dφ from 0 to arctan(t/√n),
    divided by the same integral from 0 to π/2. As n → ∞, t approaches 1.96.
    """
    if freedom > 1e5:
        return 1.959963985
    if freedom <= 0.0:
        return math.inf
    nodes, weights = _quadrature()

    def integral(end: float) -> float:
        angles = 0.5 * end * (nodes + 1.0)
        return float(0.5 * end * (weights @ np.cos(angles) ** (freedom - 1.0)))

    logs = math.lgamma(0.5 * freedom) - math.lgamma(0.5 * (freedom + 1.0))
    integral_to_half_pi = 0.5 * math.sqrt(math.pi) * math.exp(logs)
    low, high = 0.0, 0.5 * math.pi
    for _ in range(60):
        midpoint = 0.5 * (low + high)
        if integral(midpoint) < 0.95 * integral_to_half_pi:
            low = midpoint
        else:
            high = midpoint
    return math.sqrt(freedom) * math.tan(0.5 * (low + high))


class Estimate(NamedTuple):
    """A measured figure."""

    value: float
    stderr: float | None
    """One standard error; 0 if the figure is exact, None if the samples can't determine the error."""
    low: float = -math.inf
    """The lower end of the 95 % interval; -∞ if the error is unknown."""
    high: float = math.inf
    """The upper end of the 95 % interval; ∞ if the error is unknown."""

    @classmethod
    def of(cls, value: float, stderr: float | None, freedom: float = math.inf) -> Estimate:
        """Return an estimate with Student's interval for ``freedom`` degrees of freedom."""
        if stderr is None or math.isnan(stderr):
            return cls(value, None)
        half = t95(freedom) * stderr if stderr else 0.0
        return cls(value, stderr, value - half, value + half)

    @property
    def includes_zero(self) -> bool:
        """Whether 0 lies in the interval: then even the sign is unknown."""
        return not (self.low > 0.0 or self.high < 0.0)

    @property
    def z(self) -> float | None:
        """The value divided by its standard error; None if that is 0 or unknown."""
        return self.value / self.stderr if self.stderr else None

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate times a number."""
        low, high = sorted((factor * self.low, factor * self.high)) if factor else (0.0, 0.0)
        error = None if self.stderr is None else abs(factor) * self.stderr
        return Estimate(factor * self.value, error, low, high)

    @property
    def interval(self) -> str:
        """The 95 % interval as text; empty if the error is unknown."""
        if self.stderr is None or math.isinf(self.low) or math.isinf(self.high):
            return ""
        error = self.stderr or max(abs(self.low), abs(self.high)) or 1.0
        return f"{_rounded(self.low, error)} to {_rounded(self.high, error)}"

    def __str__(self) -> str:
        if self.stderr is None:
            return f"{self.value:.3g} ± ?"
        if self.stderr == 0.0:
            return f"{self.value:.6g} (exact)"
        return f"{_rounded(self.value, self.stderr)} ± {_rounded(self.stderr, self.stderr)}"


def percent(share: Estimate, *, interval: bool = False) -> str:
    """Return a share as text, with its standard error or its interval.

    If the share is NaN or its interval is unbounded, the text is a dash.
    """
    if math.isnan(share.value):
        return "–"
    if share.stderr is None:
        return f"{100.0 * share.value:.1f} % ± ?"
    if math.isinf(share.low) or math.isinf(share.high):
        return "–"
    if share.stderr == 0.0:
        return f"{100.0 * share.value:.1f} %"
    if interval:
        digits = 0 if share.stderr >= 0.01 else 1
        value, low, high = (f"{100.0 * x:.{digits}f}" for x in (share.value, share.low, share.high))
        return f"{value} % ({low} to {high})"
    return str(share.scaled(100.0)).replace(" ±", " % ±") + " %"


def _rounded(value: float, stderr: float) -> str:
    """Round a value to the second digit of its error, so that both have the same number of decimals."""
    decimals = 1 - int(f"{stderr:.1e}"[4:]) if math.isfinite(stderr) else 0
    if not -4 <= decimals <= 6:
        return f"{value:.3g}" if abs(value) > stderr else f"{value:.2g}"
    return f"{round(value, decimals) + 0.0:.{max(decimals, 0)}f}"  # + 0.0 turns -0.0 into 0.0


class BatchMoments(NamedTuple):
    """Means and covariances of some figures over the samples of one batch."""

    weight: float
    size: int
    """The number of samples."""
    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """With the divisor size - 1; zero for one sample."""


class _MeanCovariance(NamedTuple):
    """One estimate of the covariance of the weighted means."""

    matrix: NDArray[np.float64]
    freedom: Callable[[NDArray[np.float64]], float]
    """Returns the degrees of freedom of the variance of Σ coefficient · figure."""

    def stderr(self, coefficients: NDArray[np.float64]) -> float:
        """Return the standard error of Σ coefficient · figure."""
        return math.sqrt(max(float(coefficients @ self.matrix @ coefficients), 0.0))


def linear_combination(batches: Sequence[BatchMoments], coefficients: Sequence[float]) -> Estimate:
    """Return the weighted mean of Σ coefficient · figure; NaN without samples."""
    if not batches:
        return Estimate(math.nan, None)
    c = np.asarray(coefficients, dtype=float)
    value = float(c @ _weighted_mean(batches))
    estimates = [Estimate.of(value, v.stderr(c), v.freedom(c)) for v in _mean_covariances(batches)]
    error = max((e.stderr or 0.0 for e in estimates), default=0.0)
    # Few masks with a small p can give equal samples by chance, which say nothing about the error.
    if not estimates or (error == 0.0 and value):
        return Estimate(value, None)
    return Estimate(value, error, min(e.low for e in estimates), max(e.high for e in estimates))


def ratio_of_means(batches: Sequence[BatchMoments]) -> Estimate:
    """Return the ratio of the means of two figures, with Fieller's interval."""
    if not batches:
        return Estimate(math.nan, None)
    a, b = map(float, _weighted_mean(batches))
    if b == 0.0:
        return Estimate(math.nan, None)
    value = a / b
    covariances = _mean_covariances(batches)
    if not any(v.matrix.any() for v in covariances):
        return Estimate(value, None)
    c = np.array([1.0, -value]) / b  # the delta method: the error is about mean(a - value·b)/b
    error = max(v.stderr(c) for v in covariances)
    if error <= _ROUNDING * max(float(abs(c) @ np.sqrt(v.matrix.diagonal())) for v in covariances):
        return Estimate.of(value, 0.0)  # all samples have the same ratio
    intervals = []
    for covariance in covariances:
        t = t95(covariance.freedom(c))
        (v_aa, v_ab), (_, v_bb) = t * t * covariance.matrix
        intervals.append(_fieller(a, b, v_aa, v_ab, v_bb))
    lows, highs = zip(*intervals, strict=True)
    return Estimate(value, error, min(lows), max(highs))


def ratio_of_independent(a: Estimate, b: Estimate) -> Estimate:
    """Return the ratio of two independent estimates, with Fieller's interval."""
    if b.value == 0.0 or math.isnan(b.value):
        return Estimate(math.nan, None)
    value = a.value / b.value
    if a.stderr is None or b.stderr is None:
        return Estimate(value, None)
    error = math.hypot(a.stderr, value * b.stderr) / abs(b.value)
    v_aa, v_bb = ((0.5 * (e.high - e.low)) ** 2 for e in (a, b))
    return Estimate(value, error, *_fieller(a.value, b.value, v_aa, 0.0, v_bb))


def _fieller(a: float, b: float, v_aa: float, v_ab: float, v_bb: float) -> tuple[float, float]:
    """Return the interval of all R with (a - R·b)² ≤ v_aa - 2R·v_ab + R²·v_bb.

    The v are t² times the variances and the covariance. If b may be 0, the interval is unbounded.
    """
    square, middle, constant = b * b - v_bb, a * b - v_ab, a * a - v_aa
    if not square > 0.0:
        return -math.inf, math.inf
    root = math.sqrt(max(middle * middle - square * constant, 0.0))
    return (middle - root) / square, (middle + root) / square


def _normalized_weights(batches: Sequence[BatchMoments]) -> NDArray[np.float64]:
    weights = np.array([batch.weight for batch in batches])
    return np.asarray(weights / weights.sum())


def _weighted_mean(batches: Sequence[BatchMoments]) -> NDArray[np.float64]:
    return np.asarray(_normalized_weights(batches) @ np.stack([batch.mean for batch in batches]))


def _mean_covariances(batches: Sequence[BatchMoments]) -> list[_MeanCovariance]:
    """Estimate the covariance of the means between batches, and from the masks within each batch."""
    estimates, n, weights = [], len(batches), _normalized_weights(batches)
    if n > 1:
        centered = np.stack([batch.mean for batch in batches]) - _weighted_mean(batches)
        between = n / (n - 1) * np.einsum("k,ki,kj->ij", weights**2, centered, centered)
        estimates.append(_MeanCovariance(between, lambda c: n - 1.0))
    if all(batch.size > 1 for batch in batches):
        parts = [w**2 * b.covariance / b.size for w, b in zip(weights, batches, strict=True)]
        sizes = [batch.size for batch in batches]
        within = np.sum(parts, axis=0)
        estimates.append(_MeanCovariance(within, lambda c: _satterthwaite(parts, sizes, c)))
    return estimates


def _satterthwaite(
    parts: Sequence[NDArray[np.float64]], sizes: Sequence[int], c: NDArray[np.float64]
) -> float:
    """Return the degrees of freedom of a sum of variances, estimated from samples of these sizes."""
    variances = [max(float(c @ part @ c), 0.0) for part in parts]
    denominator = math.fsum(v * v / (n - 1) for v, n in zip(variances, sizes, strict=True))
    return math.fsum(variances) ** 2 / denominator if denominator > 0.0 else math.inf


class Samples(Generic[S]):
    """Samples, usually one per mask, grouped by batch.

    A figure is a function of a sample. If the function returns None for a sample, the figure is computed
    from the other samples.
    """

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self._samples: dict[int, list[S]] = {}

    def add(self, batch: int, weight: float, sample: S) -> None:
        """Add a sample; ``weight`` is the number of terms in the loss of its batch."""
        self._weights[batch] = weight
        self._samples.setdefault(batch, []).append(sample)

    @property
    def batch_count(self) -> int:
        """The number of batches with samples."""
        return len(self._samples)

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(map(len, self._samples.values()))

    def __iter__(self) -> Iterator[S]:
        return (sample for samples in self._samples.values() for sample in samples)

    def mean(self, figure: Callable[[S], float | None]) -> Estimate:
        """Return the mean of a figure."""
        return linear_combination(self._moments(figure), (1.0,))

    def ratio(
        self, numerator: Callable[[S], float | None], denominator: Callable[[S], float | None]
    ) -> Estimate:
        """Return the ratio of the means of two figures, over the samples that have both."""
        return ratio_of_means(self._moments(numerator, denominator))

    def _moments(self, *figures: Callable[[S], float | None]) -> list[BatchMoments]:
        moments = []
        for batch, samples in self._samples.items():
            rows = [[figure(sample) for figure in figures] for sample in samples]
            complete = np.array([row for row in rows if None not in row], dtype=float)
            size = len(complete)
            if size == 0:
                continue
            covariance = np.zeros((len(figures), len(figures)))
            if size > 1:
                covariance = np.atleast_2d(np.cov(complete.T, ddof=1))
            moments.append(BatchMoments(self._weights[batch], size, complete.mean(0), covariance))
        return moments
