"""How often the 95 % intervals contain the truth, over repeated studies of nets with known answers.

A net with one hidden layer of six units has 64 masks, so the true value is a sum over them. For one
batch it is the mean over its examples, and for several batches the mean over 20,000 examples.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from device import new_generator
from undrop.diagnosis.measure.r_drop import measure_r_drop

UNITS, P, POPULATION = 6, 0.5, 20_000


def net(scale):
    torch.manual_seed(0)
    layers = [nn.Linear(4, UNITS), nn.Tanh(), nn.Dropout(P), nn.Linear(UNITS, 3)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[3].weight.mul_(scale)
    return model


def examples(n, generator):
    """Inputs of unequal size, so that examples differ in their effect."""
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    x = x * torch.rand(n, 1, generator=generator, dtype=torch.float64) * 3.0
    return x, torch.randint(3, (n,), generator=generator)


@torch.no_grad()
def truth(model, x, y):
    """Return R_drop and ½E[uᵀHu] from an enumeration of all masks."""
    h, out = torch.tanh(model[0](x)), model[3]
    plain = nn.functional.cross_entropy(out(h), y)
    expected = 0.0
    for mask in product((0.0, 1.0 / (1.0 - P)), repeat=UNITS):
        weight = math.prod(P if m == 0.0 else 1.0 - P for m in mask)
        noisy = out(h * torch.tensor(mask, dtype=torch.float64))
        expected = expected + weight * nn.functional.cross_entropy(noisy, y)
    p = torch.softmax(out(h), -1)
    half = 0.0
    for unit in range(UNITS):
        u = math.sqrt(P / (1.0 - P)) * h[:, unit, None] * out.weight[:, unit]
        half = half + 0.5 * ((p * u**2).sum(-1) - (p * u).sum(-1) ** 2).mean()
    return float(expected - plain), float(half)


def coverage(scale, batches, masks, *, size=8, repetitions=500):
    """Return how often R_drop, ½E[uᵀHu] and their ratio lie in their intervals."""
    model = net(scale)
    population = truth(model, *examples(POPULATION, new_generator(1)))
    hits = np.zeros(3)
    for seed in range(repetitions):
        generator = new_generator(1000 + seed)
        drawn = [examples(size, generator) for _ in range(batches)]
        r_drop, half = truth(model, *drawn[0]) if batches == 1 else population
        found = measure_r_drop(model, drawn, masks=masks, generator=generator)
        estimates = (found.parts.r_drop, found.parts.half_quadratic, found.quadratic_share)
        for place, (e, value) in enumerate(
            zip(estimates, (r_drop, half, half / r_drop), strict=True)
        ):
            hits[place] += e.low <= value <= e.high
    return hits / repetitions


CASES = [(1.0, 1, 4), (1.0, 1, 16), (3.0, 1, 8), (3.0, 2, 4), (3.0, 4, 4), (3.0, 16, 2)]
"""The factor on the output weights, batches, and masks per batch."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("scale", "batches", "masks"), CASES)
def test_the_intervals_contain_the_truth_as_often_as_they_claim(scale, batches, masks):
    found = coverage(scale, batches, masks)
    print(f"scale {scale:g}, {batches} batches, {masks} masks: {found}")
    assert (found > 0.90).all()  # 95 % minus five standard errors of 500 repetitions
