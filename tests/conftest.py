"""What every test has: one thread, so that timings and sums do not depend on the machine."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

import launching
from device import DEVICE, OnDevice

NEEDS = {
    "integrations/test_accelerate.py": "accelerate",
    "integrations/test_lightning.py": "lightning",
    "integrations/test_transformers.py": "transformers",
    "losses/test_heads.py": "transformers",
}
"""Files that test an integration, and the package that each of them needs."""

if DEVICE.type != "cpu":
    OnDevice().__enter__()  # from here on: test files make tensors when they are imported, too

absent = {path: package for path, package in NEEDS.items() if find_spec(package) is None}
collect_ignore = list(absent)


def pytest_report_header() -> list[str]:
    return [f"left out: tests/{path} ({package} is absent)" for path, package in absent.items()]


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
    """Give all tests that launch processes to one worker: two launches at once overload two cores."""
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("launch"))
