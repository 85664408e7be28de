"""What the tests of experiments share."""

import pytest

from undrop.lab.reproduce.plan import Plan


@pytest.fixture
def plan():
    return Plan(["replace-dropout"], "smoke", seeds=2)
