"""Intervals against Student's table and a simulation, paired ratios, and the number of seeds needed."""

import math

import numpy as np
import pytest

from undrop.lab.reproduce.results import (
    Interval,
    geometric_mean,
    mean_interval,
    paired_ratio,
    seeds_needed,
)


def test_the_interval_of_three_values_is_students():
    # The 97.5 % quantile of Student's t with 2 degrees of freedom is 4.303.
    interval = geometric_mean([2.0, 4.0, 8.0])
    assert interval.estimate == pytest.approx(4.0)
    reach = 4.303 * math.log(2.0) / math.sqrt(3.0)
    assert math.log(interval.high / 4.0) == pytest.approx(reach, rel=1e-3)
    assert math.log(4.0 / interval.low) == pytest.approx(reach, rel=1e-3)
    assert (interval.seeds, interval.spread) == (3, pytest.approx(math.log(2.0)))


def test_a_95_percent_interval_covers_the_true_mean_95_percent_of_the_time():
    draws = np.random.default_rng(1).normal(0.3, 1.0, (1000, 4))
    intervals = [mean_interval(row.tolist()) for row in draws]
    covered = np.mean([i.low < 0.3 < i.high for i in intervals])
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 1000))


def test_several_comparisons_widen_the_interval():
    values = [1.0, 1.2, 0.9, 1.1, 1.3]
    one, ten = mean_interval(values), mean_interval(values, comparisons=10)
    # Student's t with 4 degrees of freedom: 2.776 at 97.5 %, 5.598 at 99.75 %.
    assert (ten.high - ten.low) / (one.high - one.low) == pytest.approx(5.598 / 2.776, rel=1e-3)


def test_the_interval_of_one_value_is_that_value():
    assert mean_interval([3.0]) == Interval(3.0, 3.0, 3.0, 1)


def test_the_computed_number_of_seeds_decides_with_a_probability_of_80_percent():
    measured = Interval(math.exp(0.5), 0.0, 9.0, 3, spread=1.0)
    n = seeds_needed(measured, above=1.0, below=math.inf)
    assert n == 34  # the number in tables of power for half a standard deviation
    draws = np.random.default_rng(2).normal(0.5, 1.0, (2000, n))
    decided = np.mean([mean_interval(row.tolist()).low > 0.0 for row in draws])
    assert decided == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 2000))


def test_the_number_of_seeds_to_decide_is_unknown_without_a_spread_or_at_the_end_of_the_range():
    assert seeds_needed(Interval(2.0, 2.0, 2.0, 1), 1.0, math.inf) is None
    assert seeds_needed(Interval(1.0, 0.5, 2.0, 3, 0.5), 1.0, math.inf) is None
    assert seeds_needed(Interval(1.0 + 1e-9, 0.5, 2.0, 3, 0.5), 1.0, math.inf) is None


def test_the_mean_with_an_infinite_value_is_infinite():
    interval = geometric_mean([3.0, math.inf, 5.0])
    assert interval.estimate == math.inf
    assert interval.low == pytest.approx(3.0)
    assert geometric_mean([0.0, 2.0]) == Interval(0.0, 0.0, 2.0, 2, math.inf)


def test_a_paired_ratio_cancels_differences_between_seeds():
    hard = {1: 100.0, 2: 200.0, 3: 50.0}
    easy = {seed: value / 1.1 for seed, value in hard.items()}
    interval = paired_ratio([hard], [easy])
    assert interval.low == pytest.approx(1.1)
    assert interval.high == pytest.approx(1.1)


def test_a_paired_ratio_uses_only_shared_seeds():
    interval = paired_ratio([{1: 2.0, 2: 3.0}], [{2: 1.0, 3: 9.0}])
    assert (interval.estimate, interval.seeds) == (pytest.approx(3.0), 1)
    assert paired_ratio([{1: 2.0}], [{2: 1.0}]) is None


def test_a_paired_ratio_divides_products_seed_by_seed():
    a, b, c, d = ({1: value} for value in (6.0, 2.0, 3.0, 4.0))
    assert paired_ratio([a, b], [c, d]).estimate == pytest.approx(1.0)
    assert paired_ratio([a], []).estimate == pytest.approx(6.0)
