"""Means over seeds with bootstrap intervals; comparisons are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "geometric", "paired_ratio"]

_RESAMPLES = 10_000
_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap 95 % interval over ``seeds`` values."""

    estimate: float
    low: float
    high: float
    seeds: int


def geometric(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, with its percentile bootstrap interval.

    Perplexities and times are compared by ratios, so their logarithms are averaged. The interval of
    three values is their range. An infinite value, a quality that was never reached, makes the mean
    infinite.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(np.asarray(values, dtype=np.float64))
    draws = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
    tail = (1.0 - _LEVEL) / 2.0
    low, high = np.quantile(logs[draws].mean(axis=1), [tail, 1.0 - tail], method="inverted_cdf")
    return Interval(_exp(logs.mean()), _exp(low), _exp(high), len(logs))


def _exp(value: float) -> float:
    return math.exp(value) if value < math.inf else math.inf


def paired_ratio(
    over: Iterable[Mapping[int, float]], under: Iterable[Mapping[int, float]]
) -> Interval | None:
    """Return Π over / Π under, paired by seed; None if they share no seed."""
    over, under = list(over), list(under)
    seeds = set.intersection(*(set(values) for values in [*over, *under]))
    if not seeds:
        return None
    ratios = [
        math.prod(values[seed] for values in over) / math.prod(values[seed] for values in under)
        for seed in sorted(seeds)
    ]
    return geometric(ratios)
