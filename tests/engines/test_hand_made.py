"""Masks that models make by hand are sites: every kind, every engine, against the model's own masks."""

from itertools import combinations

import pytest
import torch

import undrop
from engine_helpers import (
    BOTH,
    EXPLICIT,
    IMPLICIT,
    Fixed,
    design,
    evaluate,
    gradient,
    random_signs,
    relative,
)
from hand_made import KINDS, P
from problems import D, Problem
from undrop.engines import Antithetic, Draw, Exact, Reverse, ScaledNoise, Tangent
from undrop.intercept import Interception, Selection
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


def own_losses(problem, passes, seed):
    """The loss with the masks that the model itself draws."""
    torch.manual_seed(seed)
    with torch.no_grad():
        outputs = [problem.model(problem.inputs) for _ in range(passes)]
    return torch.stack([problem.loss.value(f, problem.targets) for f in outputs])


def site_losses(problem, draw, epsilon, passes=1):
    """The loss with ε of a draw at the sites."""
    losses = []
    for _ in range(passes):
        action = ScaledNoise(draw(), epsilon)
        with torch.no_grad(), Interception(problem.model, action):
            output = problem.model(problem.inputs)
        losses.append(problem.loss.value(output, problem.targets))
    return torch.stack(losses)


def test_dropout_at_the_site_is_the_model_s_own_within_two_standard_errors(kind):
    problem = problem_of(kind)
    undrop.sites(problem.model, problem.inputs)
    generator = torch.Generator().manual_seed(1)
    own = own_losses(problem, 400, 1)
    ours = site_losses(
        problem, lambda: Draw("dropout", "as-declared", Selection(), lambda _: generator), 1.0, 400
    )
    error = (own.var() / len(own) + ours.var() / len(ours)).sqrt()
    assert (own.mean() - ours.mean()).abs() < 2.0 * error
    assert 0.7 < own.std() / ours.std() < 1.4


SECOND_ORDER = {"drop path": 0.15, "per batch": 0.15, "branch": 0.15, "LayerDrop": 0.15}
SECOND_ORDER["DropBlock"] = (
    0.5  # a block is a fifth of the batch, and what is kept is scaled by 5/4
)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_for_small_p_the_second_order_is_r_drop(kind):
    """½·d²/dε² of the loss over all signs, against every mask of 0 and 1 with its probability."""
    problem = problem_of(kind)
    for module in problem.model.modules():
        for name in ("p", "layerdrop"):
            if hasattr(module, name):
                setattr(module, name, 0.01)
    sites = undrop.sites(problem.model, problem.inputs)
    plain = site_losses(problem, lambda: next(design(problem)), 0.0)
    e = 1e-3
    second = (
        torch.stack(
            [
                site_losses(problem, lambda r=row: r, e) + site_losses(problem, lambda r=row: r, -e)
                for row in design(problem)
            ]
        ).mean()
        / 2
        - plain.squeeze()
    )
    exact = torch.zeros(())
    shapes = [torch.Size(site.mask_shape).numel() for site in sites]
    p = torch.cat([torch.full((n,), s.p) for n, s in zip(shapes, sites, strict=True)])
    for dropped in [(i,) for i in range(len(p))] + list(combinations(range(len(p)), 2)):
        mask = torch.ones(len(p))
        mask[list(dropped)] = 0.0
        eta = (mask / (1 - p) - 1) / (p / (1 - p)).sqrt()
        chance = torch.where(mask == 1, 1 - p, p).prod()
        loss = site_losses(problem, lambda row=eta: Fixed(row), 1.0)
        exact += chance * (loss - plain).squeeze()
    eta = (1 / (1 - p) - 1) / (p / (1 - p)).sqrt()  # nothing is dropped: 1/(1-p) is not the mask
    loss = site_losses(problem, lambda: Fixed(eta), 1.0)
    exact += (1 - p).prod() * (loss - plain).squeeze()
    assert torch.allclose(second / e**2, exact, rtol=SECOND_ORDER[kind]), (second / e**2, exact)


def test_the_reverse_engine_has_the_same_directional_derivative(kind):
    problem = problem_of(kind)
    a = evaluate(Reverse(), problem, random_signs(problem, 3), IMPLICIT)
    b = evaluate(Tangent(), problem, random_signs(problem, 3), IMPLICIT)
    assert relative(gradient(a.total, problem.model), gradient(b.total, problem.model)) < 1e-9


ONE_GRAPH = {"drop path", "timm's drop path"}


def test_a_compiled_model_has_the_gradients_of_the_eager_one(kind, caplog):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        problem = problem_of(kind)
        model = torch.compile(problem.model, backend="eager") if compiled else problem.model
        objective = undrop.Analytic(generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            step = objective(model, problem.inputs, problem.targets)
        assert step.parts["explicit"] > 1e-6
        step.backward()
        found.append(torch.cat([p.grad.flatten() for p in problem.model.parameters()]))
    assert relative(found[1], found[0]) < 1e-9
    if kind in ONE_GRAPH:
        assert "without torch.compile" not in caplog.text
