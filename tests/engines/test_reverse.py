"""The paper's sampled engine: its value has the right mean, and its gradient does not."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_helpers import EXPLICIT, assert_mean, evaluate, gradient, relative, seeded
from problems import Problem, problem
from undrop.engines import Exact, Reverse
from undrop.errors import EngineError
from undrop.losses import CrossEntropy
from undrop.nn import WeightDrop

MASKS = ("as-declared", "independent")


def copies(p, n):
    """The batch n times: n independent draws of the noise in one pass."""
    repeats = (n,) + (1,) * (p.inputs.dim() - 1)
    targets = p.targets.repeat((n,) + (1,) * (p.targets.dim() - 1))
    return replace(p, inputs=p.inputs.repeat(repeats), targets=targets)


def explicit_draws(p, form, mask, passes):
    """The explicit part, pass after pass."""
    draws = [
        evaluate(Reverse(), p, seeded(seed, mask), EXPLICIT, form).parts["explicit"]
        for seed in range(passes)
    ]
    return torch.stack(draws)


@pytest.mark.parametrize("form", ["hessian", "identity"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_two_thousand_reverse_draws_have_the_exact_mean(name, mask, form):
    """40 passes of 50 copies each, of noise that is independent between examples."""
    p = problem(name)
    exact = evaluate(Exact(), p, seeded(0, mask), EXPLICIT, form).parts["explicit"]
    assert_mean(explicit_draws(copies(p, 50), form, mask, 40), exact)


def drop_connect():
    torch.manual_seed(0)
    layers = nn.Linear(2, 3), nn.Tanh(), WeightDrop(nn.Linear(3, 3), ["weight"], 0.4)
    x, y = torch.randn(2, 2).double(), torch.tensor([0, 2])
    return Problem(nn.Sequential(*layers).double(), x, y, CrossEntropy())


def test_reverse_draws_have_the_exact_mean_if_all_examples_share_the_noise():
    p = drop_connect()
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).parts["explicit"]
    assert_mean(explicit_draws(p, "hessian", "as-declared", 2000), exact)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["lstm", "transformer", "gru", "batch_norm"])
def test_reverse_draws_have_the_exact_mean_on_larger_nets(name, mask):
    p = problem(name)
    exact = evaluate(Exact(), p, seeded(0, mask), EXPLICIT).parts["explicit"]
    assert_mean(explicit_draws(p, "hessian", mask, 2000), exact)


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_labels_of_other_losses_are_drawn_from_their_models(loss):
    p = problem("mlp", loss)
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).parts["explicit"]
    assert_mean(explicit_draws(copies(p, 50), "hessian", "as-declared", 40), exact)


def test_the_reverse_engine_needs_no_draws_for_the_loss_jacobian():
    p = problem("lstm")
    found = evaluate(Reverse(), p, seeded(0), EXPLICIT, "loss-jacobian")
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT, "loss-jacobian")
    assert found.total.item() == pytest.approx(exact.total.item(), rel=1e-9)
    assert relative(gradient(found.total, p.model), gradient(exact.total, p.model)) < 1e-9


class Labelled(CrossEntropy):
    """Cross-entropy with given labels instead of sampled ones."""

    def __init__(self, labels):
        super().__init__()
        self.labels = torch.tensor(labels)

    def _sampled(self, output, target, generator):
        return F.cross_entropy(output, self.labels, reduction="sum")


def test_over_all_labels_the_reverse_value_is_exact_and_its_gradient_is_not():
    """The reverse engine does not differentiate the probabilities of the labels that it draws."""
    p = problem("mlp")
    with torch.no_grad():  # larger weights, so that the classes are not equally likely
        for parameter in p.model.parameters():
            parameter.mul_(3.0)
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT)
    probabilities = torch.softmax(exact.output.detach(), -1)
    value, slope = 0.0, 0.0
    for labels in itertools.product(range(3), repeat=3):
        found = evaluate(Reverse(), replace(p, loss=Labelled(labels)), seeded(0), EXPLICIT)
        weight = probabilities[range(3), labels].prod().item()
        value += weight * found.total.item()
        slope += weight * gradient(found.total, p.model)
    assert value == pytest.approx(exact.total.item(), rel=1e-9)
    assert relative(slope, gradient(exact.total, p.model)) > 0.1


def test_the_reverse_engine_refuses_a_loss_without_a_distribution():
    p = problem("mlp", "generic")
    with pytest.raises(EngineError, match=r"Generic has no distribution .* engine='tangent'"):
        evaluate(Reverse(), p, seeded(0), EXPLICIT)
