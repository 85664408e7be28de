"""Memory does not grow, and one seed gives bit for bit one result, here and in another process."""

import gc
import hashlib
import mmap
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import undrop

STEPS = int(os.environ.get("UNDROP_LEAK_STEPS", "300"))  # 2,000 in the long form
SLACK = 1.0  # megabytes by which the allocator may vary

OBJECTIVES = {
    "none": undrop.NoRegularization,
    "l2": lambda: undrop.L2(0.1),
    "dropout": undrop.Dropout,
    "drop-k": lambda: undrop.Dropout(k=2),
    "analytic noise": lambda: undrop.Dropout(k=2, noise="analytic"),
    **{
        f"analytic, {engine}": partial(undrop.Analytic, engine=engine)
        for engine in ("auto", "tangent", "antithetic", "reverse", "exact")
    },
}


def steps_of(objective, steps):
    """Train a small net, yielding after each step."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(2, 3), torch.tensor([0, 3])
    for _ in range(steps):
        optimizer.zero_grad()
        objective(model, inputs, targets).backward()
        optimizer.step()
        yield model


def alive():
    """How many tensors there are."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident():
    """Megabytes of the process that are in memory; 0 where the system does not say."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * mmap.PAGESIZE / 2**20 if told.exists() else 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_memory_does_not_grow_over_steps(name):
    """No tensor outlives its step, and the process does not grow, not even by a kilobyte per step."""
    seen = [
        (alive(), resident())
        for step, _ in enumerate(steps_of(OBJECTIVES[name](), STEPS))
        if step % 99 == 9
    ]
    counts, sizes = zip(*seen[1:], strict=True)
    assert len(set(counts)) == 1, counts
    assert max(sizes) - sizes[0] < SLACK, sizes


def digest(name):
    """A hash of the weights after twenty steps."""
    *_, model = steps_of(OBJECTIVES[name](), 20)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def test_the_same_seed_gives_bit_for_bit_the_same_weights_in_every_process():
    here = [digest(name) for name in OBJECTIVES]
    assert [digest(name) for name in OBJECTIVES] == here
    assert len(set(here)) > 5  # the objectives do differ
    code = (
        "import torch; torch.set_num_threads({}); from faults.test_leaks import *; "
        "print(*[digest(name) for name in OBJECTIVES])"
    )
    tests = os.path.dirname(os.path.dirname(__file__))
    for threads in (1, 2):
        told = subprocess.check_output(
            [sys.executable, "-c", code.format(threads)],
            text=True,
            env={**os.environ, "PYTHONPATH": tests},
        )
        assert told.split() == here
