"""Bootstrap intervals against closed forms, and pairing by seed."""

import math

import numpy as np
import pytest

from undrop.lab.reproduce.statistics import geometric, paired_ratio


def test_the_interval_of_three_values_is_their_range():
    # One of the 27 resamples of three values is three times the least: 1/27 > 2.5 %.
    interval = geometric([2.0, 4.0, 8.0])
    assert interval.estimate == pytest.approx(4.0)
    assert (interval.low, interval.high) == (pytest.approx(2.0), pytest.approx(8.0))
    assert interval.seeds == 3


def test_the_interval_of_many_values_is_the_normal_one():
    logs = np.random.default_rng(1).normal(0.0, 1.0, 400)
    interval = geometric(np.exp(logs).tolist())
    error = logs.std() / math.sqrt(400)
    # The bootstrap's own error of a 2.5 % quantile from 10,000 draws is about 0.027 standard errors.
    assert math.log(interval.low) == pytest.approx(logs.mean() - 1.96 * error, abs=0.15 * error)
    assert math.log(interval.high) == pytest.approx(logs.mean() + 1.96 * error, abs=0.15 * error)


def test_the_bootstrap_interval_is_reproducible():
    assert geometric([1.0, 1.1, 1.3, 0.9]) == geometric([1.0, 1.1, 1.3, 0.9])


def test_the_mean_with_an_infinite_value_is_infinite():
    interval = geometric([3.0, math.inf, 5.0])
    assert interval.estimate == math.inf
    assert interval.low == pytest.approx(3.0)


def test_pairing_by_seed_removes_what_seeds_share():
    hard = {1: 100.0, 2: 200.0, 3: 50.0}
    easy = {seed: value / 1.1 for seed, value in hard.items()}
    interval = paired_ratio([hard], [easy])
    assert interval.low == pytest.approx(1.1)
    assert interval.high == pytest.approx(1.1)


def test_a_paired_ratio_uses_only_shared_seeds():
    interval = paired_ratio([{1: 2.0, 2: 3.0}], [{2: 1.0, 3: 9.0}])
    assert (interval.estimate, interval.seeds) == (pytest.approx(3.0), 1)
    assert paired_ratio([{1: 2.0}], [{2: 1.0}]) is None


def test_a_paired_ratio_of_products():
    a, b, c, d = ({1: value} for value in (6.0, 2.0, 3.0, 4.0))
    assert paired_ratio([a, b], [c, d]).estimate == pytest.approx(1.0)
    assert paired_ratio([a], []).estimate == pytest.approx(6.0)
