"""Measures that are computed from records."""

import math

import pytest

from fake_records import fake_record
from undrop.errors import UnknownNameError
from undrop.lab.reproduce.results import MEASURES


@pytest.fixture
def pair(worklist):
    runs = [worklist.cells[f"ptb:{name}"].run(0, 1) for name in ("drop-1", "analytic")]
    dropout = fake_record(runs[0], [130.0, 110.0, 100.0, 105.0], seconds=4.0)
    slow = fake_record(runs[1], [120.0, 100.5, 90.0, 91.0], seconds=8.0)
    return slow, dropout


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_valid_ppl", 90.0),
        ("epochs_to_quality", 2.0),  # 100.5 is within 1 % of 100
        ("time_used", 2.0),
        ("seconds_per_step", 0.6),
    ],
)
def test_a_measure_is_computed_from_the_records_of_a_method_and_dropout(pair, name, value):
    assert MEASURES[name].compute(*pair) == pytest.approx(value)


def test_the_training_seconds_of_a_record_leave_out_evaluation(pair):
    assert pair[0].training_seconds == pytest.approx([6.0, 12.0, 18.0, 24.0])


def test_a_quality_that_is_never_reached_takes_infinitely_many_epochs(pair):
    slow, dropout = pair
    better = dropout.model_copy(update={"best_valid_ppl": 50.0})
    assert MEASURES["epochs_to_quality"].compute(slow, better) == math.inf


def test_an_unknown_measure_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="unknown measure 'best_valid': did you mean"):
        MEASURES["best_valid"]
