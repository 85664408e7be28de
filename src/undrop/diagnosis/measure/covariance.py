"""Compare covariances of noise by the inner products of samples alone.

Every function takes samples (m, D); errors come from the jackknife over blocks of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from undrop.diagnosis.measure.estimates import Estimate

_BLOCKS = 16  # of samples, in the jackknife
_MOST = 256  # samples for eigenspaces, whose cost grows as their cube


def _jackknifed(value: float, without: list[float]) -> Estimate:
    """The error of a statistic from its values with one block left out at a time."""
    n = len(without)
    if n < 2 or not all(map(math.isfinite, without)):
        return Estimate(value, None)
    mean = math.fsum(without) / n
    spread = math.fsum((x - mean) ** 2 for x in without)
    return Estimate.of(value, math.sqrt((n - 1) / n * spread), n - 1.0)


def cosine(a: Tensor, b: Tensor) -> Estimate:
    """The cosine of E[a] and E[b], for samples that come in pairs.

    Products of different samples only: a sample's product with itself would make the norms too
    large and the cosine too small, the more so the fewer samples there are.
    """
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(kept: Tensor) -> float:
        cross, *norms = (
            float(gram[kept][:, kept].sum() - gram[kept, kept].sum()) for gram in (ab, aa, bb)
        )
        product = norms[0] * norms[1]
        return cross / math.sqrt(product) if product > 0.0 else math.nan

    found = _left_out(statistic, len(a))
    return found._replace(value=max(-1.0, min(1.0, found.value)))


def _left_out(statistic: Callable[[Tensor], float], n: int) -> Estimate:
    """A statistic of the samples with its error, leaving out one block of even size at a time."""
    every = torch.arange(n)
    size = 2 * math.ceil(n / (2 * _BLOCKS))
    blocks = every.split(size)
    enough = n > 2 * size
    without = [
        statistic(torch.cat([*blocks[:i], *blocks[i + 1 :]])) for i in range(len(blocks) * enough)
    ]
    return _jackknifed(statistic(every), without)


def _shared(aa: Tensor, ab: Tensor, bb: Tensor, k: int) -> float:
    """‖U_aᵀU_b‖²_F / k for the leading k directions of two sets of samples, from their products."""
    sides = []
    for gram in (aa, bb):
        values, vectors = torch.linalg.eigh(gram)
        top = values[-k:].clamp_min(1e-30)
        sides.append(vectors[:, -k:] / top.sqrt())
    return float((sides[0].T @ ab @ sides[1]).square().sum() / k)


def overlap(a: Tensor, b: Tensor, k: int) -> Estimate:
    """How much the leading k directions of two covariances agree, each from half of its samples."""
    a, b = a[:_MOST], b[:_MOST]
    aa, ab, bb = a @ a.T, a @ b.T, b @ b.T

    def statistic(kept: Tensor) -> float:
        even, odd = kept[::2], kept[1::2]
        return 0.5 * sum(
            _shared(aa[i][:, i], ab[i][:, j], bb[j][:, j], k) for i, j in ((even, odd), (odd, even))
        )

    return _left_out(statistic, len(a))


def trace_of_means(samples: Tensor, k: int) -> Estimate:
    """k times the trace of the covariance of the mean of k samples."""
    groups = [group.mean(0) for group in samples.split(k) if len(group) == k]
    values = torch.stack([k * group.square().sum() for group in groups])
    n = len(groups)
    stderr = float(values.std() / math.sqrt(n)) if n > 1 else None
    return Estimate.of(float(values.mean()), stderr, n - 1.0)
