"""To second order, dropout adds half of the exact engine's explicit part to the loss.

A small q does not make second order accurate. A dropped entry becomes zero however rarely it is
dropped, so for q → 0 the higher orders keep their share of R_drop. They are small only if no single
entry matters much. So these tests use a loss that is quadratic in the noise, without higher orders,
and a wide net, where they are small.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian

from engine_helpers import EXPLICIT, evaluate, seeded
from problems import D, Problem
from undrop.engines import Exact
from undrop.intercept import Interception
from undrop.losses import MSE, CrossEntropy

Q = 0.01


def narrow(q, y, loss):
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(q), nn.Linear(4, 3)).to(D)
    return Problem(model, torch.randn(2, 2, dtype=D), y, loss)


def gap_over_all_masks(p):
    """R_drop, over all 2⁸ masks with their probabilities."""
    q, total = p.model[2].p, 0.0
    with torch.no_grad():
        h, last = p.model[1](p.model[0](p.inputs)), p.model[3]
        plain = p.loss.value(last(h), p.targets)
        for mask in itertools.product((0.0, 1.0), repeat=8):
            kept = torch.tensor(mask, dtype=D).view(2, 4)
            probability = ((1 - q) * kept + q * (1 - kept)).prod()
            total += probability * (p.loss.value(last(h * kept / (1 - q)), p.targets) - plain)
    return total.item()


def half_of_exact(p):
    return 0.5 * evaluate(Exact(), p, seeded(0), EXPLICIT).total.item()


def test_second_order_is_exact_if_the_loss_is_quadratic_in_the_noise():
    p = narrow(0.3, torch.randn(2, 3, dtype=D), MSE())
    assert gap_over_all_masks(p) == pytest.approx(half_of_exact(p), rel=1e-9)


def test_in_a_narrow_net_a_small_q_does_not_make_the_second_order_right():
    p = narrow(0.1, torch.tensor([0, 2]), CrossEntropy())
    with torch.no_grad():
        p.model[3].weight.mul_(5.0)
    ratios = []
    for q in (1e-3, 1e-4, 1e-5):
        p.model[2].p = q
        ratios.append(gap_over_all_masks(p) / half_of_exact(p))
    assert ratios[1:] == pytest.approx(ratios[:-1], rel=0.01)  # it converges, but not to 1
    assert abs(ratios[-1] - 1) > 0.05


class Wide(nn.Module):
    """Two layers of 100 units, each unit of small influence."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(2, 100),
            nn.Linear(100, 100),
            nn.Linear(100, 3),
        )
        self.dropout = nn.Dropout(Q)

    def forward(self, x, z=(0.0, 0.0)):
        h = self.dropout(torch.tanh(self.first(x)) * (1 + z[0]))
        return self.last(self.dropout(torch.tanh(self.second(h)) * (1 + z[1])))


def test_in_a_wide_net_half_the_second_derivative_is_what_dropout_adds():
    """40,000 masks; the first order has mean zero and is subtracted from each."""
    torch.manual_seed(2)
    model, n = Wide().to(D), 20_000
    with torch.no_grad():
        model.last.weight.mul_(5.0)
    x, y = torch.randn(1, 2, dtype=D), torch.tensor([1])
    w = {name: value.detach() for name, value in model.named_parameters()}
    model.eval()

    def loss(z):
        return F.cross_entropy(functional_call(model, w, (x, z.view(2, 100))), y)

    zero = torch.zeros(200, dtype=D)
    value, slope, curvature = loss(zero), grad(loss)(zero), hessian(loss)(zero).diagonal().sum()
    model.train()
    gaps = []
    for seed in range(2):
        draw, noise = seeded(seed, noise="dropout"), []

        def dropped(site, h, draw=draw, noise=noise):
            noise.append(draw.sigma_eta(site, h))
            return h * (1 + noise[-1])

        with torch.no_grad(), Interception(model, dropped):
            losses = F.cross_entropy(model(x.expand(n, 2)), y.expand(n), reduction="none")
        gaps.append(losses - value - torch.cat(noise, 1) @ slope)
    gap = torch.cat(gaps)
    expected = 0.5 * Q / (1 - Q) * curvature
    error = gap.std() / len(gap) ** 0.5
    assert error < 0.05 * expected
    assert abs(gap.mean() - expected) < 4 * error
