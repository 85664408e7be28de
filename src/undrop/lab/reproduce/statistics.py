"""Means over seeds with Student's intervals, paired ratios, and the seeds that a decision needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
POWER = 0.8
"""The probability of a decision that :func:`seeds_needed` aims at."""
_MOST = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate, its interval over ``seeds`` values, and their standard deviation (of logarithms)."""

    estimate: float
    low: float
    high: float
    seeds: int
    spread: float = 0.0


def student(quantile: float, values: int) -> float:
    """Return a quantile of Student's t for the mean of this number of values."""
    from scipy import stats

    return float(stats.t.ppf(quantile, values - 1))


def geometric(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, with Student's 95 % interval.

    Perplexities and times are compared by ratios, so their logarithms are averaged. The interval of one
    value is that value. With an infinite value (a quality that was never reached) the mean is infinite,
    and with a 0 (its reciprocal) it is 0; the interval then goes from the least value to the greatest.
    """
    if math.inf in values or 0.0 in values:
        mean = math.inf if 0.0 not in values else 0.0 if math.inf not in values else math.nan
        return Interval(mean, min(values), max(values), len(values), math.inf)
    interval = mean_interval([math.log(value) for value in values])
    mean, low, high = (math.exp(end) for end in (interval.estimate, interval.low, interval.high))
    return Interval(mean, low, high, interval.seeds, interval.spread)


def mean_interval(values: Sequence[float], *, comparisons: int = 1) -> Interval:
    """Return the mean with Student's interval.

    Args:
        values: one for each seed.
        comparisons: the number of intervals that must hold together with 95 % (Bonferroni).
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    spread = float(np.std(values, ddof=1))
    tail = (1.0 - LEVEL) / (2.0 * comparisons)
    reach = student(1.0 - tail, n) * spread / math.sqrt(n) if spread else 0.0
    return Interval(mean, mean - reach, mean + reach, n, spread)


def seeds_needed(interval: Interval, above: float, below: float) -> int | None:
    """Return how many seeds decide whether a ratio lies in a range, with a probability of 80 %.

    It assumes that the measured ratio and spread are the true ones: the interval of that many seeds
    does not reach the nearest end of the range. None if the spread is unknown, or 10,000 seeds are not
    enough.
    """
    if interval.seeds < 2 or not 0.0 < interval.estimate < math.inf:
        return None
    at = math.log(interval.estimate)
    ends = [math.log(end) for end in (above, below) if 0.0 < end < math.inf]
    distance = min((abs(at - end) for end in ends), default=0.0)
    if distance == 0.0:
        return None
    tail = (1.0 - LEVEL) / 2.0
    for n in _counts():
        reach = student(1.0 - tail, n) + student(POWER, n)
        if reach * interval.spread / math.sqrt(n) <= distance:
            return n
    return None


def _counts() -> list[int]:
    """Every number up to 100, then in steps of 2 %."""
    counts = list(range(2, 101))
    while counts[-1] < _MOST:
        counts.append(math.ceil(counts[-1] * 1.02))
    return counts


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
