"""What every test has: one thread, so that timings and sums do not depend on the machine."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import nn

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


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    """A backend of torch.compile that works here."""
    if request.param == "inductor":
        request.getfixturevalue("inductor")
    return request.param


@pytest.fixture(scope="session")
def inductor() -> Iterator[None]:
    """Torch's own compiler, with a new cache of kernels; skip if torch alone can't use it here.

    With a cache that lasts, torch takes kernels for AVX-512 on a CPU without it.
    """
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        plain = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1))
        try:
            torch.compile(plain)(torch.ones(4, 2)).sum().backward()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            pytest.skip(f"torch can't compile a plain model on this machine: {reason}")
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests that launch processes to one worker: two launches at once overload two cores."""
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("launch"))
