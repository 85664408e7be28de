"""The output side: which classes carry uᵀHu.

With p = softmax(F) and v = u - Σ_k p_k u_k, class c carries p_c v_c² of uᵀHu = Σ p v²: dropout asks
for stability where the model gives some probability and is not certain (the paper's p(1 - p)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undrop.diagnosis.measure.estimates import Estimate
from undrop.losses import ByClass

__all__ = ["ClassShare", "ClassShares"]

TOP = 10
"""The number of classes that are shown."""


class ClassShare(NamedTuple):
    """What one class carries."""

    number: int
    name: str
    share: Estimate
    """Of uᵀHu."""
    weight: float
    """Its share of Σ p(1 - p), the diagonal of H: what it would carry if all u_c were alike."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "index": self.number,
            "name": self.name,
            "share": self.share.to_json(),
            "weight": self.weight,
        }


class _Moments:
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

    def linearised(
        self, share: NDArray[np.float64], over: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance over masks of (X - share·T)/over."""
        mean = (self.x - share * self.t) / (self.n * over)
        square = (self.xx - 2.0 * share * self.xt + share**2 * self.tt) / (self.n * over**2)
        spread = np.maximum(square - mean**2, 0.0)
        return mean, spread * self.n / (self.n - 1) if self.n > 1 else spread


class ClassShares:
    """Gathers what the classes carry over masks and batches.

    Args:
        names: what the classes are called; their numbers where None.
        exact: whether what is added is an expectation over the masks already.
    """

    def __init__(self, names: Sequence[str] | None = None, *, exact: bool = False) -> None:
        self._names = names
        self._exact = exact
        self._batches: dict[int, _Moments] = {}
        self._weight: NDArray[np.float64] | float = 0.0

    def add(self, batch: int, terms: float, found: ByClass) -> None:
        """Take in what one mask (or the expectation over masks) of a batch says."""
        x = (found.quadratic / terms).cpu().numpy()
        if batch not in self._batches:
            self._batches[batch] = _Moments(terms, len(x))
            self._weight = self._weight + found.diagonal.cpu().numpy()
        self._batches[batch].add(x)

    def top(self, count: int = TOP) -> list[ClassShare]:
        """The classes that carry most, with their shares; none where nothing was added."""
        batches = list(self._batches.values())
        over = sum(b.weight * b.t / b.n for b in batches)
        if not over:
            return []
        share = np.sum([b.weight * b.x / b.n for b in batches], axis=0) / over
        errors = self._errors(batches, share)
        assert isinstance(self._weight, np.ndarray)
        weight = self._weight / self._weight.sum()
        order = np.argsort(-share)[:count]
        return [
            ClassShare(
                int(c),
                self._names[c] if self._names is not None else str(c),
                Estimate(float(share[c]), None if errors is None else float(errors[c])),
                float(weight[c]),
            )
            for c in order
        ]

    def _errors(
        self, batches: list[_Moments], share: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """The larger of the errors over batches and over masks, as for every figure."""
        terms = np.array([b.weight for b in batches])
        weights = terms / terms.sum()
        over = float(sum(w * b.t / b.n for w, b in zip(weights, batches, strict=True)))
        parts = [b.linearised(share, over) for b in batches]
        variances = []
        if (n := len(batches)) > 1:
            means = np.stack([mean for mean, _ in parts])
            variances.append(n / (n - 1) * (weights**2 @ means**2))
        if self._exact:
            variances.append(np.zeros_like(share))
        elif all(b.n > 1 for b in batches):
            within = [spread / b.n for (_, spread), b in zip(parts, batches, strict=True)]
            variances.append(weights**2 @ np.stack(within))
        return np.sqrt(np.max(variances, axis=0)) if variances else None
