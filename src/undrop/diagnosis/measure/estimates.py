"""Figures with standard errors and 95 % intervals, from samples over masks within batches.

A figure is a mean over batches (weighted by their terms) of means over masks. Its variance is
estimated in two ways: from the spread of the batches' means, which contains the noise of the masks as
well, and from the spread of the masks within each batch. Each way gives an interval with Student's t
for its own degrees of freedom. The wider interval is used, because with few batches the first can be
small by chance. The interval of a ratio is Fieller's, which is valid even if the denominator is
uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

S = TypeVar("S")


@cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The nodes and weights of Gauss-Legendre quadrature on [-1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    return nodes, weights


@lru_cache(maxsize=4096)
def t95(freedom: float) -> float:
    """Student's t with P(|T| ≤ t) = 0.95, by bisection; 1.96 for infinitely many degrees of freedom.

    With T = √n·tan φ the probability is ∫ cosⁿ⁻¹φ dφ up to arctan(t/√n), divided by the same integral
    up to π/2.
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
    whole = 0.5 * math.sqrt(math.pi) * math.exp(logs)
    low, high = 0.0, 0.5 * math.pi
    for _ in range(60):
        midpoint = 0.5 * (low + high)
        low, high = (midpoint, high) if integral(midpoint) < 0.95 * whole else (low, midpoint)
    return math.sqrt(freedom) * math.tan(0.5 * (low + high))


class Estimate(NamedTuple):
    """A measured figure."""

    value: float
    stderr: float | None
    """One standard error; 0 for an exact figure, None if the samples do not determine it."""
    low: float = -math.inf
    """The lower end of the 95 % interval; -∞ if the error is unknown."""
    high: float = math.inf
    """The upper end of the 95 % interval; ∞ if the error is unknown."""

    @classmethod
    def of(cls, value: float, stderr: float | None, freedom: float = math.inf) -> Estimate:
        """The estimate with Student's interval for ``freedom`` degrees of freedom."""
        if stderr is None or math.isnan(stderr):
            return cls(value, None)
        half = t95(freedom) * stderr if stderr else 0.0
        return cls(value, stderr, value - half, value + half)

    @property
    def includes_zero(self) -> bool:
        """Whether 0 lies in the interval, so not even the sign is known."""
        return not (self.low > 0.0 or self.high < 0.0)

    @property
    def z(self) -> float | None:
        """The value in standard errors; None without an error."""
        return self.value / self.stderr if self.stderr else None

    def scaled(self, factor: float) -> Estimate:
        """The estimate times a number."""
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

    The text is a dash if the share is NaN or its interval is unbounded.
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
    places = 1 - int(f"{stderr:.1e}"[4:]) if math.isfinite(stderr) else 0
    if not -4 <= places <= 6:
        return f"{value:.3g}" if abs(value) > stderr else f"{value:.2g}"
    return f"{round(value, places) + 0.0:.{max(places, 0)}f}"  # + 0.0: no minus before zero


class BatchMoments(NamedTuple):
    """The number of samples of some figures in one batch, their means and covariances."""

    weight: float
    size: int
    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    """With the divisor size - 1; zero for one sample."""


class _Spread(NamedTuple):
    """One way to estimate the covariance of the weighted means."""

    covariance: NDArray[np.float64]
    freedom: Callable[[NDArray[np.float64]], float]
    """The degrees of freedom of the variance along given coefficients."""


def linear(batches: Sequence[BatchMoments], coefficients: Sequence[float]) -> Estimate:
    """The weighted mean of Σ coefficient · figure; NaN without samples."""
    if not batches:
        return Estimate(math.nan, None)
    c = np.asarray(coefficients, dtype=float)
    value = float(c @ _mean(batches))
    found = [_student(value, spread, c) for spread in _spreads(batches)]
    error = max((e.stderr or 0.0 for e in found), default=0.0)
    if not found or (error == 0.0 and value):  # equal by chance, as with few masks and a small p
        return Estimate(value, None)
    return Estimate(value, error, min(e.low for e in found), max(e.high for e in found))


def _student(value: float, spread: _Spread, c: NDArray[np.float64]) -> Estimate:
    variance = max(float(c @ spread.covariance @ c), 0.0)
    return Estimate.of(value, math.sqrt(variance), spread.freedom(c))


def ratio(batches: Sequence[BatchMoments]) -> Estimate:
    """The ratio of the means of two figures, with Fieller's interval."""
    if not batches:
        return Estimate(math.nan, None)
    a, b = map(float, _mean(batches))
    if b == 0.0:
        return Estimate(math.nan, None)
    value = a / b
    # the delta method: R̂ - R ≈ mean(a - R·b)/b
    error = linear(batches, (1.0 / b, -value / b)).stderr
    ends, spreads = [], _spreads(batches)
    for spread in spreads:
        t = t95(spread.freedom(np.array([1.0, -value])))
        (v_aa, v_ab), (_, v_bb) = spread.covariance
        ends.append(_fieller(a, b, t * t * v_aa, t * t * v_ab, t * t * v_bb))
    if error is None or not any(s.covariance.any() for s in spreads):
        return Estimate(value, None)
    return Estimate(value, error, min(low for low, _ in ends), max(high for _, high in ends))


def ratio_of(a: Estimate, b: Estimate) -> Estimate:
    """The ratio of two independent estimates, with Fieller's interval."""
    if b.value == 0.0 or math.isnan(b.value):
        return Estimate(math.nan, None)
    value = a.value / b.value
    if a.stderr is None or b.stderr is None:
        return Estimate(value, None)
    error = math.hypot(a.stderr, value * b.stderr) / abs(b.value)
    halves = [(0.5 * (e.high - e.low)) ** 2 for e in (a, b)]
    return Estimate(value, error, *_fieller(a.value, b.value, halves[0], 0.0, halves[1]))


def _fieller(a: float, b: float, aa: float, ab: float, bb: float) -> tuple[float, float]:
    """All R with (a - R·b)² ≤ aa - 2R·ab + R²·bb; unbounded if b may be 0."""
    square, middle, constant = b * b - bb, a * b - ab, a * a - aa
    if not square > 0.0:
        return -math.inf, math.inf
    root = math.sqrt(max(middle * middle - square * constant, 0.0))
    return (middle - root) / square, (middle + root) / square


def _weights(batches: Sequence[BatchMoments]) -> NDArray[np.float64]:
    weights = np.array([batch.weight for batch in batches])
    return np.asarray(weights / weights.sum())


def _mean(batches: Sequence[BatchMoments]) -> NDArray[np.float64]:
    return np.asarray(_weights(batches) @ np.stack([batch.mean for batch in batches]))


def _spreads(batches: Sequence[BatchMoments]) -> list[_Spread]:
    """The covariance from the batches' means, and from the masks within each batch."""
    found, n, weights = [], len(batches), _weights(batches)
    if n > 1:
        centered = np.stack([batch.mean for batch in batches]) - _mean(batches)
        between = n / (n - 1) * np.einsum("k,ki,kj->ij", weights**2, centered, centered)
        found.append(_Spread(between, lambda c: n - 1.0))
    if all(batch.size > 1 for batch in batches):
        parts = [w**2 * b.covariance / b.size for w, b in zip(weights, batches, strict=True)]
        counts = [batch.size for batch in batches]
        found.append(_Spread(np.sum(parts, axis=0), lambda c: _satterthwaite(parts, counts, c)))
    return found


def _satterthwaite(
    parts: Sequence[NDArray[np.float64]], counts: Sequence[int], c: NDArray[np.float64]
) -> float:
    """The degrees of freedom of a sum of variances, each from its own samples."""
    variances = [max(float(c @ part @ c), 0.0) for part in parts]
    below = math.fsum(v * v / (n - 1) for v, n in zip(variances, counts, strict=True))
    return math.fsum(variances) ** 2 / below if below > 0.0 else math.inf


class Samples(Generic[S]):
    """Samples, one per mask, grouped by batch. A figure is a function of a sample.

    A sample for which the function returns None is left out.
    """

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self._samples: dict[int, list[S]] = {}

    def add(self, batch: int, weight: float, sample: S) -> None:
        """Add a sample; ``weight`` is the number of terms in the loss of its batch."""
        self._weights[batch] = weight
        self._samples.setdefault(batch, []).append(sample)

    @property
    def batches(self) -> int:
        """The number of batches with samples."""
        return len(self._samples)

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(map(len, self._samples.values()))

    def __iter__(self) -> Iterator[S]:
        return (sample for samples in self._samples.values() for sample in samples)

    def mean(self, figure: Callable[[S], float | None]) -> Estimate:
        """The mean of one figure."""
        return linear(self._moments(figure), (1.0,))

    def ratio(
        self, numerator: Callable[[S], float | None], denominator: Callable[[S], float | None]
    ) -> Estimate:
        """The ratio of the means of two figures, over the samples that have both."""
        return ratio(self._moments(numerator, denominator))

    def _moments(self, *figures: Callable[[S], float | None]) -> list[BatchMoments]:
        found = []
        for batch, samples in self._samples.items():
            rows = [[figure(sample) for figure in figures] for sample in samples]
            kept = np.array([row for row in rows if None not in row], dtype=float)
            if len(kept):
                square = np.zeros((len(figures), len(figures)))
                if len(kept) > 1:
                    square = np.atleast_2d(np.cov(kept.T, ddof=1))
                found.append(BatchMoments(self._weights[batch], len(kept), kept.mean(0), square))
        return found
