"""Which classes carry uᵀHu, over masks and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrop.diagnosis.measure.estimates import BatchMoments, Estimate, ratio
from undrop.losses import ByClass

TOP = 10
"""The number of classes to show."""


class ClassShare(NamedTuple):
    """The share of one class."""

    number: int
    name: str
    share: Estimate
    """Of uᵀHu."""
    weight: float
    """Its share of Σ p(1 - p), the diagonal of H: its share of uᵀHu if all u_c were alike."""


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
    """Collects the shares of the classes over masks and batches.

    Args:
        names: the names of the classes; None uses their numbers.
    """

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
                ratio([b.moments(int(c)) for b in batches]),
                float(weight[c]),
            )
            for c in order
        ]
