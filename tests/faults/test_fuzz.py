"""Bad bytes, the quick part; ``make faults`` tries many more cases."""

from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults.fuzz import KINDS, HungError, Kind, fuzz, kinds

QUICK = settings(
    max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        patch.setenv("UNDROP_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield kinds(folder)


@pytest.mark.parametrize("name", KINDS)
def test_bad_bytes_raise_only_undrops_errors(all_kinds, name):
    assert tuple(all_kinds) == KINDS
    kind = all_kinds[name]

    @hypothesis.seed(1)
    @QUICK
    @given(st.randoms(use_true_random=False))
    def check_case(draw):
        kind.check(kind.case(draw))

    check_case()


def test_a_failing_case_is_named_with_the_seed_that_reproduces_it():
    def check(number):
        assert number != 7

    kind = Kind(lambda draw: draw.randrange(10), check)
    first = next(number for number in range(100) if Random(f"3/{number}").randrange(10) == 7)
    with pytest.raises(AssertionError, match=f"numbers, seed 3, case {first}: 7"):
        fuzz("numbers", kind, cases=100, seed=3)


def test_a_hanging_case_is_stopped(monkeypatch):
    monkeypatch.setattr("faults.fuzz.TIME_LIMIT", 0.05)

    def hang(_):
        while True:
            pass

    with pytest.raises(AssertionError, match="endless, seed 1, case 0") as raised:
        fuzz("endless", Kind(lambda draw: None, hang), cases=1, seed=1)
    assert isinstance(raised.value.__cause__, HungError)
