"""Conditions under which figures could be silently wrong: little time, and other random numbers."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure import explicit as explicit_module
from undrop.diagnosis.measure.model import MeasuredModel, collect


def batch(n=8, seed=0):
    generator = new_generator(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def test_one_of_three_batches_is_measured_if_the_time_ends(monkeypatch):
    """The time ends after two masks of the first batch."""

    class Over(explicit_module.Budget):
        def is_over(self, done=0.0):
            return True

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    subject = MeasuredModel(model, collect([batch(seed=s) for s in range(3)], 3))
    with subject.preserve():
        found = explicit_module.measure_explicit(subject, Over(1.0))
    assert found.batches == 1
    assert found.batches_given == 3
    assert found.masks == 2
    assert "(exact)" not in str(found.parts.r_drop)


class OwnRandomness(nn.Module):
    """Dropout, and other random numbers that the model draws itself."""

    def __init__(self, own):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self.own = own

    def forward(self, x):
        return self.b(self.drop(torch.tanh(self.a(x)) * self.own()))


def test_random_numbers_of_numpy_and_python_are_the_same_in_every_pass():
    """If the numbers differed between passes, R_drop would be about 1."""
    sources = {
        "numpy": lambda: float(np.random.rand()) * 3.0,
        "python": lambda: random.random() * 3.0,
        "torch": lambda: torch.rand(()).double() * 3.0,
    }
    for own in sources.values():
        torch.manual_seed(0)
        found = undrop.diagnose(
            OwnRandomness(own).double(),
            [batch()],
            seconds=1e3,
            draws=8,
            implicit=False,
            progress=False,
        ).explicit.parts
        assert abs(found.r_drop.value) < 0.1
        assert found.half_quadratic.value > 0.0


def test_a_loss_that_draws_random_numbers_is_refused():
    def varying(output, target):
        return nn.functional.cross_entropy(output, target) * (1.0 + torch.rand(()))

    model = OwnRandomness(lambda: 1.0).double()
    with pytest.raises(undrop.errors.OutputError, match="two calls of the loss on the same output"):
        undrop.diagnose(model, [batch()], loss=varying, progress=False)


def test_random_numbers_that_differ_between_passes_are_refused():
    count = iter(range(10**6))
    model = OwnRandomness(lambda: float(next(count))).double()
    with pytest.raises(
        undrop.errors.UndropError, match="two passes of OwnRandomness without dropout"
    ):
        undrop.diagnose(model, [batch()], seconds=1, progress=False)


def test_masks_stay_random_with_torchs_own_generator():
    """Passes restart the global generator; masks seeded from it must still differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, 3)).double()
    found = undrop.diagnose(
        model,
        [batch()],
        seconds=1e3,
        draws=6,
        implicit=False,
        generator=torch.default_generator,
        progress=False,
    )
    assert found.explicit.parts.r_drop.stderr > 0.0


def test_a_diagnosis_uses_all_of_its_seconds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, 3))
    x, y = batch()
    began = time.monotonic()
    found = undrop.diagnose(model, [(x.float(), y)] * 2, seconds=2.0, progress=False)
    assert 1.8 < time.monotonic() - began < 10.0
    assert found.seconds > 1.8
