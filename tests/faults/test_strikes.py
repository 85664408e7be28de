"""Each fault once or twice; ``make faults`` strikes a hundred times."""

import pytest

from faults.__main__ import FAULTS, run

SLOW = {"kill-sweep", "kill-in-record", "kill-torchrun-worker", "kill-ray-worker", "marathon"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", "set by the campaign")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS]
)
def test_no_run_loses_anything_to_a_fault(name, monkeypatch):
    monkeypatch.setattr("faults.marathon.STEPS", 2000)
    line = run(name, times=2, seed=7)
    if "skipped" in line:
        pytest.skip(str(line["skipped"]))
    assert line["tried"] >= 2
    assert line["lost"] == 0
