"""Each fault once or twice; ``make faults`` strikes a hundred times."""

import pytest

from faults.__main__ import run
from faults.strikes import STRIKES

SLOW = set(STRIKES) - {"kill-in-write", "out-of-memory"}  # they start processes, or mount a disk


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", "set by the campaign")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STRIKES],
)
def test_nothing_is_lost(name):
    line = run(name, times=2, seed=7)
    if "skipped" in line:
        pytest.skip(str(line["skipped"]))
    assert line["tried"] == 2
    assert line["lost"] == 0


@pytest.mark.slow
def test_nothing_is_lost_of_a_sweep():
    line = run("kill-sweep", times=2, seed=7)
    assert line["tried"] == 2
    assert line["lost"] == 0
