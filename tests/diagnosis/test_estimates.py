"""Estimates: standard errors, Student's and Fieller's intervals, and how they are shown."""

import math

import numpy as np
import pytest

from undrop.diagnosis.measure.estimates import Estimate, Samples, percent, ratio_of_independent, t95


@pytest.mark.parametrize("freedom", [1, 1.7, 2, 3, 5.5, 10, 30, 100, 1000, 1e6])
def test_students_quantile_is_scipys(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert t95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


def samples_of(groups):
    samples = Samples()
    for batch, values in enumerate(groups):
        for value in values:
            samples.add(batch, 1.0, value)
    return samples


def test_the_standard_error_is_the_larger_of_between_and_within_batches():
    # no spread between the batches, some within the first
    found = samples_of([[1.0, 3.0], [2.0, 2.0]]).mean(lambda x: x)
    assert found.value == 2.0
    assert found.stderr == pytest.approx((0.25 * 2.0 / 2) ** 0.5)
    # no spread within the batches, some between them
    found = samples_of([[1.0, 1.0], [4.0, 4.0]]).mean(lambda x: x)
    assert found.value == 2.5
    assert found.stderr == pytest.approx(1.5)
    assert found.high - found.value == pytest.approx(t95(1) * 1.5)  # two batches


def test_samples_that_are_equal_by_chance_say_nothing_about_the_error():
    equal = samples_of([[2.0, 2.0, 2.0]])
    assert equal.mean(lambda x: x) == Estimate(2.0, None)
    assert equal.ratio(lambda x: x, lambda x: 2 * x) == Estimate(0.5, None)
    assert samples_of([[2.0], [2.0]]).mean(lambda x: x) == Estimate(2.0, None)
    # a figure of 0, and a ratio of 1, for every mask are no coincidence
    assert equal.mean(lambda x: 0.0) == Estimate(0.0, 0.0, 0.0, 0.0)
    assert samples_of([[1.0, 2.0]]).ratio(lambda x: x, lambda x: x).stderr == 0.0


def test_a_ratio_that_is_the_same_for_every_mask_is_exact():
    """Rounding must not turn the share of a model's only site into "100 % ± 2.7e-16 %"."""
    generator = np.random.default_rng(0)
    for batches in (1, 3):
        values = generator.normal(0.02, 0.005, size=(batches, 5)).tolist()
        found = samples_of(values).ratio(lambda x: x, lambda x: 3 * x)
        assert found == pytest.approx((1 / 3, 0.0, 1 / 3, 1 / 3), rel=1e-12)
        assert percent(found) == "33.3 %"


def test_a_figure_that_some_samples_lack_uses_the_others():
    samples = samples_of([[{"a": 1.0, "b": 1.0}, {"a": 3.0}]])
    assert samples.mean(lambda s: s["a"]).value == 2.0
    assert samples.mean(lambda s: s.get("b")) == Estimate(1.0, None)
    assert math.isnan(samples.mean(lambda s: s.get("c")).value)


def test_the_error_of_a_ratio_is_its_spread():
    generator = np.random.default_rng(0)
    found = []
    for _ in range(400):
        x = generator.normal(size=100)
        rows = list(zip(2.0 + x, 4.0 + 0.5 * x, strict=True))
        found.append(samples_of([rows]).ratio(lambda s: s[0], lambda s: s[1]))
    spread = np.std([e.value for e in found])
    assert np.mean([e.value for e in found]) == pytest.approx(0.5, abs=0.005)
    assert np.mean([e.stderr for e in found]) == pytest.approx(spread, rel=0.15)


def test_fiellers_interval_is_unbounded_if_the_denominator_may_be_zero():
    rows = [(1.0, 0.1), (1.2, -0.1), (0.9, 0.05), (1.1, -0.03)]
    found = samples_of([rows]).ratio(lambda s: s[0], lambda s: s[1])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert percent(found) == "–"
    assert ratio_of_independent(Estimate.of(1.0, 0.1), Estimate.of(0.1, 0.1)).high == math.inf


def test_fiellers_interval_equals_its_formula():
    """(a - R·b)² = t²(V_aa - 2R·V_ab + R²·V_bb) at both ends."""
    generator = np.random.default_rng(1)
    rows = [tuple(row) for row in generator.normal((2.0, 3.0), 0.5, size=(7, 2))]
    found = samples_of([rows]).ratio(lambda s: s[0], lambda s: s[1])
    a, b = np.mean(rows, axis=0)
    covariance = np.cov(np.array(rows).T) / len(rows)
    for end in (found.low, found.high):
        direction = np.array([1.0, -end])
        assert (a - end * b) ** 2 == pytest.approx(
            t95(6) ** 2 * direction @ covariance @ direction, rel=1e-6
        )
    assert found.low < found.value < found.high


def test_estimates_are_shown_with_their_error():
    assert str(Estimate.of(0.0531234, 0.00123)) == "0.0531 ± 0.0012"
    assert str(Estimate(12.3, None)) == "12.3 ± ?"
    assert str(Estimate.of(0.25, 0.0)) == "0.25 (exact)"
    assert str(Estimate.of(0.497, 0.0998)) == "0.50 ± 0.10"
    assert str(Estimate.of(-0.0000722, 0.0000471)) == "-0.000072 ± 0.000047"
    assert str(Estimate.of(-0.0000001, 0.00017)) == "0.00000 ± 0.00017"
    assert str(Estimate.of(3.21e-9, 1.2e-10)) == "3.21e-09 ± 1.2e-10"
    assert str(Estimate.of(12_345.6, 123.4)) == "12350 ± 120"
    assert percent(Estimate.of(0.834, 0.021)) == "83.4 % ± 2.1 %"
    assert percent(Estimate.of(0.07, 0.02)) == "7.0 % ± 2.0 %"
    assert percent(Estimate.of(0.834, 0.021), interval=True) == "83 % (79 to 88)"
    assert percent(Estimate(math.nan, None)) == "–"
    assert percent(Estimate(0.5, None)) == "50.0 % ± ?"


@pytest.mark.parametrize(
    ("estimate", "unknown"),
    [
        (Estimate.of(0.03, 0.01), False),
        (Estimate.of(-0.03, 0.01), False),
        (Estimate.of(0.03, 0.01, 2.0), True),  # t = 4.3
        (Estimate(0.03, None), True),
        (Estimate.of(0.0, 0.0), True),
    ],
)
def test_the_sign_is_known_if_the_interval_excludes_zero(estimate, unknown):
    assert estimate.includes_zero == unknown


def test_a_scaled_estimate_keeps_its_interval_in_order():
    found = Estimate.of(2.0, 0.5).scaled(-3.0)
    assert found.value == -6.0
    assert found.stderr == 1.5
    assert found.low < found.value < found.high
