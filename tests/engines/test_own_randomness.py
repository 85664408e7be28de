"""Models that draw other random numbers: they are not dropout, and not part of its effects."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from engine_helpers import BOTH, evaluate, gradient, relative, seeded
from problems import D, Problem
from undrop.engines import Antithetic, Tangent
from undrop.losses import CrossEntropy


class Deep(nn.Module):
    """Dropout, and something random beside it."""

    def __init__(self, own):
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.2)
        self.own = own

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.first(x)) * self.own(x)))


OWN = {
    "jitter": lambda x: x.new_empty(len(x), 8).uniform_(0.5, 1.5),
    "an order": lambda x: 0.5 + torch.rand(len(x), 8).argsort(1).to(x) / 7,
    "sampling": lambda x: torch.distributions.Normal(x.new_ones(8), 0.5).rsample(),
    "sampling of classes": lambda x: 8 * F.gumbel_softmax(x.new_ones(8), hard=True),
}


@pytest.fixture(params=OWN)
def problem(request):
    torch.manual_seed(0)
    model = Deep(OWN[request.param]).to(D)
    return Problem(model, torch.randn(6, 4, dtype=D), torch.randint(3, (6,)), CrossEntropy())


def test_both_passes_of_the_antithetic_engine_draw_the_same_random_numbers(problem):
    found = []
    for engine in (Tangent(), Antithetic(1e-4)):
        torch.manual_seed(1)
        total = evaluate(engine, problem, seeded(2), BOTH).total
        found.append((gradient(total, problem.model), torch.rand(())))
    (tangent, after), (antithetic, then) = found
    assert relative(antithetic, tangent) < 1e-6
    assert after == then  # as many numbers are drawn as by one pass


def test_both_passes_draw_the_same_random_numbers_in_the_first_step(problem):
    step = undrop.Analytic(engine="antithetic")(problem.model, problem.inputs, problem.targets)
    assert 0.0 < step.parts["explicit"] < 0.2  # with unequal numbers it would be 20


def test_a_diagnosis_repeats_the_models_own_random_numbers(problem):
    """With the same numbers in every pass, ½E[uᵀHu] is a large share of R_drop, and not far above it."""
    found = undrop.diagnose(
        problem.model,
        [(problem.inputs, problem.targets)],
        seconds=30.0,
        draws=64,
        implicit=False,
        generator=new_generator(0),
        progress=False,
    )
    parts = found.explicit.parts
    assert abs(parts.r_drop.value) < 0.1
    assert 0.0 < parts.half_quadratic.value < 0.1
