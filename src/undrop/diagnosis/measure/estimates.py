"""Figures with standard errors, from samples over masks within batches.

A figure is a mean over batches (weighted by their terms) of means over masks. Its variance is had in
two ways: from the spread of the batches' means, which holds the noise of the masks as well, and from
the spread of the masks within each batch. The standard error is the larger of the two, since with few
batches the first can be small by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "Estimate", "percent"]


class Estimate(NamedTuple):
    """A measured figure."""

    value: float
    stderr: float | None
    """One standard error; 0 for an exact figure, None where one sample does not tell."""

    def to_json(self) -> dict[str, float | None]:
        """For programs."""
        return {"value": _finite(self.value), "stderr": _finite(self.stderr)}

    @property
    def low(self) -> float:
        """The value less two standard errors; -∞ where the error is unknown."""
        return -math.inf if self.stderr is None else self.value - 2.0 * self.stderr

    @property
    def high(self) -> float:
        """The value and two standard errors; ∞ where the error is unknown."""
        return math.inf if self.stderr is None else self.value + 2.0 * self.stderr

    @property
    def vanishes(self) -> bool:
        """Whether two standard errors do not tell it from 0, so that no share of it means anything."""
        return not (self.low > 0.0 or self.high < 0.0)

    def __str__(self) -> str:
        if self.stderr is None:
            return f"{self.value:.3g} ± ?"
        if self.stderr == 0.0:
            return f"{self.value:.6g} (exact)"
        return f"{_rounded(self.value, self.stderr)} ± {self.stderr:.2g}"


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def percent(estimate: Estimate, of: Estimate | None = None) -> str:
    """A share with its error, as a person reads it; a dash where there is nothing to have a share of.

    Args:
        estimate: the share.
        of: what it is a share of, if that may be 0.
    """
    if math.isnan(estimate.value) or (of is not None and of.vanishes):
        return "–"
    if estimate.stderr is None:
        return f"{100.0 * estimate.value:.1f} % ± ?"
    if estimate.stderr == 0.0:
        return f"{100.0 * estimate.value:.1f} %"
    digits = 0 if estimate.stderr >= 0.01 else 1
    return f"{100.0 * estimate.value:.{digits}f} % ± {100.0 * estimate.stderr:.2g} %"


def _rounded(value: float, stderr: float) -> str:
    """The value to the error's second digit."""
    places = 1 - math.floor(math.log10(stderr)) if math.isfinite(stderr) else 0
    return f"{value:.{places}f}" if 0 <= places <= 6 else f"{value:.3g}"


class Draws:
    """Samples of named figures: one row a mask, grouped by batch.

    A row need not have every figure; an estimate uses the rows that have all it is made of.

    Args:
        exact: whether each row is an expectation over the masks already.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._weights: dict[int, float] = {}
        self._rows: dict[int, list[Mapping[str, float]]] = {}

    def add(self, batch: int, weight: float, row: Mapping[str, float]) -> None:
        """Take one row in; ``weight`` is the number of terms of its batch."""
        self._weights[batch] = weight
        self._rows.setdefault(batch, []).append(row)

    @property
    def batches(self) -> int:
        """The number of batches with rows."""
        return len(self._rows)

    @property
    def masks(self) -> int:
        """The number of rows."""
        return sum(map(len, self._rows.values()))

    def __contains__(self, name: str) -> bool:
        return any(name in row for rows in self._rows.values() for row in rows)

    def mean(self, name: str) -> Estimate:
        """The mean of one figure."""
        return self.linear({name: 1.0})

    def linear(self, coefficients: Mapping[str, float]) -> Estimate:
        """The mean of Σ coefficient · figure; NaN where no row has all of them."""
        weights, samples = self._samples(coefficients)
        if not samples:
            return Estimate(math.nan, None)
        value = float(weights @ np.array([s.mean() for s in samples]))
        return Estimate(value, self._error(weights, samples, value))

    def ratio(self, numerator: Mapping[str, float], denominator: Mapping[str, float]) -> Estimate:
        """The ratio R of two means; its error is that of the mean of (a - R·b)/mean(b)."""
        names = dict.fromkeys([*numerator, *denominator])
        over = self._value(denominator, names)
        if over == 0.0:
            return Estimate(math.nan, None)
        value = self._value(numerator, names) / over
        linear = dict.fromkeys(names, 0.0)
        for name, a in numerator.items():
            linear[name] += a / over
        for name, b in denominator.items():
            linear[name] -= value * b / over
        return Estimate(value, self.linear(linear).stderr)

    def _value(self, coefficients: Mapping[str, float], names: Mapping[str, Any]) -> float:
        return self.linear({**dict.fromkeys(names, 0.0), **coefficients}).value

    def _samples(
        self, coefficients: Mapping[str, float]
    ) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
        """The weights of the batches that have all the figures, and their samples."""
        weights, samples = [], []
        for batch, rows in self._rows.items():
            values = [
                math.fsum(c * row[name] for name, c in coefficients.items())
                for row in rows
                if all(name in row for name in coefficients)
            ]
            if values:
                weights.append(self._weights[batch])
                samples.append(np.array(values))
        return np.array(weights) / max(math.fsum(weights), 1e-300), samples

    def _error(
        self, weights: NDArray[np.float64], samples: list[NDArray[np.float64]], value: float
    ) -> float | None:
        """The larger of the errors over batches and over masks."""
        variances = []
        if len(samples) > 1:
            n = len(samples)
            means = np.array([s.mean() for s in samples])
            variances.append(float(n / (n - 1) * (weights**2 @ (means - value) ** 2)))
        if self.exact:
            variances.append(0.0)
        elif all(len(s) > 1 for s in samples):
            within = np.array([s.var(ddof=1) / len(s) for s in samples])
            variances.append(float(weights**2 @ within))
        return math.sqrt(max(variances)) if variances else None
