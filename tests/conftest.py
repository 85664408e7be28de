"""What every test has: one thread, so that timings and sums do not depend on the machine."""

from collections.abc import Callable

import pytest
import torch

import launching


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """Starts a program in several processes; tests that ask for it take turns."""
    return launching.launch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that launch processes to one worker: two launches at once crowd two cores."""
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("launch"))
