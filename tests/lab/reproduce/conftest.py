"""Fixtures of the tests of experiments."""

import pytest

from undrop.lab.reproduce.worklist import Worklist


@pytest.fixture
def worklist():
    return Worklist(["replace-dropout"], "smoke", seeds=2)
