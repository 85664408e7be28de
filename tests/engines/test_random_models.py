"""Every engine and ``fraction`` on random models, against brute force in float64."""

import pytest

from random_checks import examine, wrong

FOUND = (2305, 3392, 3635, 3901, 5933)
"""Models with pairs among three examples, or with an output that is constant at first."""


@pytest.mark.parametrize("seed", [*range(50), *FOUND])
def test_no_engine_is_silently_wrong_on_a_random_model(seed):
    report = examine(seed)
    assert not wrong(report), report["model"]
    assert "right" in report["found"].values()
