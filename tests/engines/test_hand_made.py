"""Masks that models make by hand are sites: every kind, every engine, against the model's own masks."""

import pytest
import torch
from torch import nn

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
from hand_made import DROPPED, KINDS, MOSTLY, P
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


def problem_of(kind, seed=0, examples=3):
    torch.manual_seed(seed)
    model = KINDS[kind][0]().to(D)
    x, y = torch.randn(examples, 5, 3, dtype=D), torch.randint(3, (examples,))
    return Problem(model, x, y, CrossEntropy())


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_a_hand_made_mask_is_a_site_with_its_p_and_structure(kind):
    problem = problem_of(kind)
    found = undrop.sites(problem.model, problem.inputs)
    assert len(found) == 2
    assert {site.mask for site in found} == {KINDS[kind][1]}
    assert [site.p for site in found] == pytest.approx([DROPPED.get(kind, P)] * 2)
    assert not found.unaccounted


def test_the_sites_of_hand_made_masks_are_the_same_for_every_seed(kind):
    problem = problem_of(kind)
    lists = []
    for seed in range(5):
        torch.manual_seed(seed)
        lists.append(undrop.sites(problem.model, problem.inputs))
    assert all(found == lists[0] for found in lists)


def test_hand_made_masks_in_one_stacked_pass_have_the_gradient_of_the_tangent_engine(kind):
    problem = problem_of(kind)
    signs = [random_signs(problem, 3) for _ in range(2)]
    a = evaluate(Antithetic(1e-4), problem, signs[0], BOTH)
    b = evaluate(Tangent(), problem, signs[1], BOTH)
    assert relative(gradient(a.total, problem.model), gradient(b.total, problem.model)) < 1e-5
    if kind != "DropBlock":  # it divides by the mean over the batch
        assert a.engine == "antithetic: one stacked pass"


def test_for_hand_made_masks_the_mean_over_signs_is_the_exact_explicit_part(kind):
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


def test_dropout_at_the_site_equals_the_models_own_within_two_standard_errors(kind):
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


def second_order(kind, rescaled=True, p=1e-4, scale=0.1, examples=3):
    """The ratio of ½·d²ℓ/dε² over all signs to R_drop from every mask with at most one 0.

    The dropped values are small, so higher orders vanish, and p is so small that two zeros are rare. The
    first order has mean 0 over all masks, so it is subtracted from each of them.
    """
    problem = problem_of(kind, examples=examples)
    problem.model.scale = scale
    for module in problem.model.modules():
        for name, value in (("p", p), ("layerdrop", p), ("rescaled", rescaled)):
            if hasattr(module, name):
                setattr(module, name, value)
    sites = undrop.sites(problem.model, problem.inputs)

    def loss(row, epsilon):
        return site_losses(problem, lambda: row, epsilon).squeeze()

    plain, e = loss(next(design(problem)), 0.0), 0.3
    both = [loss(row, sign * e) for row in design(problem) for sign in (1, -1)]
    ours = (torch.stack(both).mean() - plain) / e**2
    p = torch.cat([torch.full((torch.Size(s.mask_shape).numel(),), s.p) for s in sites])
    exact, e = torch.zeros(()), 1e-3
    for dropped in [[], *([i] for i in range(len(p)))]:
        mask = torch.ones(len(p))
        mask[dropped] = 0.0
        row = Fixed((mask / (1 - p) - 1) / (p / (1 - p)).sqrt())
        slope = (loss(row, e) - loss(row, -e)) / (2 * e)
        chance = torch.where(mask == 1, 1 - p, p).prod()
        exact += chance * (loss(row, 1.0) - plain - slope)
    return float(ours / exact)


def test_for_small_p_the_second_order_is_r_drop(kind):
    if kind not in MOSTLY:  # with a small p they are masks of another kind
        assert second_order(kind, rescaled=False) == pytest.approx(1.0, rel=0.03)


def test_scaling_by_the_share_that_was_kept_adds_higher_orders():
    """Of 8 rows 7 are kept, and scaled by 8/7 where first order says 1 + 1/8."""
    assert second_order("rank dropout") == pytest.approx((1 - 1 / 8) ** 2, rel=0.01)


def test_higher_orders_vanish_if_one_block_is_a_small_share_of_the_batch():
    few, many = (second_order("DropBlock", examples=n) for n in (3, 24))
    assert few == pytest.approx((1 - 3 / 15) ** 2, rel=0.25)
    assert many == pytest.approx((1 - 3 / 120) ** 2, rel=0.03)


def test_for_hand_made_masks_the_reverse_engine_has_the_directional_derivative_of_the_tangent_engine(
    kind,
):
    problem = problem_of(kind)
    a = evaluate(Reverse(), problem, random_signs(problem, 3), IMPLICIT)
    b = evaluate(Tangent(), problem, random_signs(problem, 3), IMPLICIT)
    assert relative(gradient(a.total, problem.model), gradient(b.total, problem.model)) < 1e-9


def test_a_compiled_model_with_hand_made_masks_has_the_gradients_of_the_eager_one(kind, caplog):
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
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    # torch 2.8 compiles no mask, and 2.15 none that sets entries by index
    if version >= (2, 13) and not (version >= (2, 15) and kind == "index"):
        assert "without torch.compile" not in caplog.text


class TensorP(nn.Module):
    """A mask from a probability that is a tensor; ``flipped`` is the mask that drops where it is 1."""

    def __init__(self, flipped):
        super().__init__()
        self.a, self.b, self.flipped = nn.Linear(5, 5), nn.Linear(5, 3), flipped
        self.register_buffer("p", torch.tensor(0.3))

    def forward(self, x):
        h = self.a(x).tanh()
        if self.flipped:
            h = h.masked_fill(torch.bernoulli(self.p.expand(h.shape)).bool(), 0.0)
        else:
            h = h * torch.bernoulli((1 - self.p).expand(h.shape))
        return self.b(h / (1 - self.p))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flipped", [False, True])
def test_a_mask_whose_p_is_a_tensor_is_stacked_whichever_value_drops(flipped, compiled):
    model = TensorP(flipped)
    if compiled:
        model.compile(backend="eager")
    step = undrop.Analytic()(model, torch.randn(4, 5), torch.randint(3, (4,)))
    step.backward()
    assert step.engine == "antithetic: one stacked pass"


@pytest.mark.parametrize("flipped", [False, True])
def test_a_changed_value_of_a_tensor_p_changes_the_site(flipped):
    model, x, y = TensorP(flipped), torch.randn(4, 5), torch.randint(3, (4,))
    objective = undrop.Analytic()
    before = objective(model, x, y).parts["loss"]
    model.p.fill_(0.6)
    assert objective(model, x, y).parts["loss"] == pytest.approx(before, rel=1e-3)
    assert [site.p for site in undrop.sites(model, x)] == pytest.approx([0.6])


class Float32Mask(nn.Module):
    """A model in float64 with stochastic depth in float32, torch's default."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        keep = torch.rand(len(x), 1) < 0.8
        return self.b(x + torch.tanh(self.a(x)) * keep / 0.8)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_float32_mask_in_a_float64_model_is_stacked(fraction):
    torch.manual_seed(0)
    model, x, y = Float32Mask(), torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    step = undrop.Analytic(fraction=fraction)(model, x, y)
    assert step.engine == "antithetic: one stacked pass"
