"""Memory does not grow over steps, and the same seed gives the same weights in every process."""

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

STEPS = int(os.environ.get("UNDROP_LEAK_STEPS", "300"))  # `make faults` takes 2,000
SLACK = 1.0  # megabytes by which the memory of the allocator may vary

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
    """Train a small network, and yield it after each step."""
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


def tensor_count():
    """Return the number of tensors in this process."""
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def resident_megabytes():
    """Return the resident memory of this process; 0 on systems without /proc."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * mmap.PAGESIZE / 2**20 if status.exists() else 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_memory_does_not_grow_over_steps(name):
    """No tensor outlives its step, and the process grows by less than a few kilobytes per step."""
    measured = [
        (tensor_count(), resident_megabytes())
        for step, _ in enumerate(steps_of(OBJECTIVES[name](), STEPS))
        if step % 99 == 9
    ]
    counts, sizes = zip(*measured[1:], strict=True)
    assert len(set(counts)) == 1, counts
    assert max(sizes) - sizes[0] < SLACK, sizes


def digest(name):
    """Return a hash of the weights after twenty steps."""
    *_, model = steps_of(OBJECTIVES[name](), 20)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def test_the_same_seed_gives_bit_for_bit_the_same_weights_in_every_process():
    digests = [digest(name) for name in OBJECTIVES]
    assert [digest(name) for name in OBJECTIVES] == digests
    assert len(set(digests)) > 5  # objectives differ from each other
    code = (
        "import torch; torch.set_num_threads({}); from faults.test_leaks import *; "
        "print(*[digest(name) for name in OBJECTIVES])"
    )
    tests = os.path.dirname(os.path.dirname(__file__))
    for threads in (1, 2):
        output = subprocess.check_output(
            [sys.executable, "-c", code.format(threads)],
            text=True,
            env={**os.environ, "PYTHONPATH": tests},
        )
        assert output.split() == digests
