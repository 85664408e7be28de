"""Masks that models make by hand are sites: every kind, every engine, against the model's own masks."""

import pytest
import torch

import undrop
from engine_helpers import BOTH, EXPLICIT, design, evaluate, gradient, random_signs, relative
from hand_made import KINDS, P
from problems import D, Problem
from undrop.engines import Antithetic, Exact, Tangent
from undrop.losses import CrossEntropy


@pytest.fixture(autouse=True)
def double():
    """torch.rand draws float64, so that ε₀ can be tiny."""
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


def problem_of(kind, seed=0):
    torch.manual_seed(seed)
    model = KINDS[kind][0]().to(D)
    return Problem(model, torch.randn(3, 5, 3, dtype=D), torch.randint(3, (3,)), CrossEntropy())


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_it_is_a_site_with_its_p_and_mask(kind):
    problem = problem_of(kind)
    found = undrop.sites(problem.model, problem.inputs)
    assert len(found) == 2
    assert {site.mask for site in found} == {KINDS[kind][1]}
    assert {round(site.p, 9) for site in found} == {round(P / 3 if kind == "DropBlock" else P, 9)}
    assert not found.unaccounted


def test_the_list_is_the_same_for_every_seed(kind):
    problem = problem_of(kind)
    lists = []
    for seed in range(5):
        torch.manual_seed(seed)
        lists.append(undrop.sites(problem.model, problem.inputs))
    assert all(found == lists[0] for found in lists)


def test_one_stacked_pass_has_the_gradient_of_the_tangent(kind):
    problem = problem_of(kind)
    signs = [random_signs(problem, 3) for _ in range(2)]
    a = evaluate(Antithetic(1e-4), problem, signs[0], BOTH)
    b = evaluate(Tangent(), problem, signs[1], BOTH)
    assert relative(gradient(a.total, problem.model), gradient(b.total, problem.model)) < 1e-5
    if kind != "DropBlock":  # it divides by the mean over the batch
        assert a.engine == "antithetic: one stacked pass"


def test_the_mean_over_signs_is_the_exact_explicit_part(kind):
    problem = problem_of(kind)
    exact = evaluate(Exact(), problem, random_signs(problem, 0), EXPLICIT).total
    mean = torch.stack(
        [evaluate(Tangent(), problem, row, EXPLICIT).total for row in design(problem)]
    ).mean()
    assert torch.allclose(exact, mean, rtol=1e-9)
    assert exact > 1e-6
