"""The tangent engine: over all signs it equals the exact engine, and its noise is ξ_approx."""

import itertools

import pytest
import torch
from torch import nn

from brute_force import NETS, noise_directions
from engine_helpers import (
    BOTH,
    EXPLICIT,
    IMPLICIT,
    Fixed,
    assert_mean,
    design,
    evaluate,
    gradient,
    relative,
    seeded,
)
from problems import PROBLEMS, Problem, problem
from undrop.engines import Antithetic, Exact, Reverse, Tangent
from undrop.losses import FORMS, CrossEntropy

MASKS = ("as-declared", "independent")


def assert_is_exact(p, draws, form="hessian", mask="as-declared"):
    """The mean over the draws is the exact engine's answer, to 1e-9."""
    found = [evaluate(Tangent(), p, draw, EXPLICIT, form).total for draw in draws]
    total = torch.stack(found).mean()
    exact = evaluate(Exact(), p, seeded(0, mask), EXPLICIT, form).total
    assert total.item() == pytest.approx(exact.item(), rel=1e-9)
    assert relative(gradient(total, p.model), gradient(exact, p.model)) < 1e-9


def test_the_tangent_engine_is_exact_over_all_signs():
    """All 2¹⁰ patterns of η, on a net with ten entries of η."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.4))
    model = nn.Sequential(*model, nn.Linear(3, 3)).double()
    p = Problem(model, torch.randn(2, 2).double(), torch.tensor([2, 0]), CrossEntropy())
    signs = itertools.product((-1.0, 1.0), repeat=10)
    assert_is_exact(p, (Fixed(torch.tensor(row)) for row in signs))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_tangent_engine_is_exact_over_a_design_of_signs(name, mask):
    p = problem(name)
    assert_is_exact(p, design(p, mask), mask=mask)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", ["smoothed", "bce", "mse", "generic"])
def test_the_tangent_engine_is_exact_over_a_design_of_signs_for_every_loss_and_form(loss, form):
    p = problem("mlp", loss)
    assert_is_exact(p, design(p), form)


@pytest.mark.parametrize("engine", [Tangent, Reverse], ids=lambda e: e.name)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NETS)
def test_the_implicit_gradient_has_zero_mean_and_the_covariance_of_the_closed_form(
    name, mask, engine
):
    p = problem(name)
    w = {key: value.detach() for key, value in p.model.named_parameters()}
    rows = noise_directions(NETS[name], w, p.inputs, p.targets, "cross-entropy", mask)
    found = torch.stack(
        [gradient(evaluate(engine(), p, draw, IMPLICIT).total, p.model) for draw in design(p, mask)]
    )
    scale = rows.square().sum().sqrt()
    assert found.mean(0).norm() < 1e-12 * scale
    assert relative(found.T @ found / len(found), rows.T @ rows) < 1e-9


def drawn(p, weights, draws):
    """The gradient, draw after draw of random signs."""
    found = (evaluate(Tangent(), p, seeded(seed), weights).total for seed in range(draws))
    return torch.stack([gradient(total, p.model) for total in found])


def test_the_explicit_gradient_is_unbiased():
    p = problem("mlp")
    exact = evaluate(Exact(), p, seeded(0), EXPLICIT).total
    assert_mean(drawn(p, EXPLICIT, 1000), gradient(exact, p.model))


def test_drawn_noise_has_zero_mean_and_the_trace_of_the_closed_form():
    p = problem("mlp")
    w = {key: value.detach() for key, value in p.model.named_parameters()}
    exact = noise_directions(NETS["mlp"], w, p.inputs, p.targets, "cross-entropy", "as-declared")
    found = drawn(p, IMPLICIT, 2000)
    assert_mean(found, torch.zeros_like(found[0]))
    assert found.var(0).sum().item() == pytest.approx(exact.square().sum().item(), rel=0.05)


def test_one_draw_serves_both_parts_and_they_are_uncorrelated():
    """∇uᵀHu is even in η and ξ odd: over η and -η their product cancels."""
    p = problem("lstm")
    draw = next(itertools.islice(design(p), 5, None))
    mirrored = Fixed(-draw.row)
    one, other = (
        [gradient(evaluate(Tangent(), p, d, w).total, p.model) for w in (EXPLICIT, IMPLICIT)]
        for d in (draw, mirrored)
    )
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one[1], -other[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_error_of_the_antithetic_engine_falls_with_the_square_of_epsilon(name):
    p = problem(name)
    row = next(design(p)).row
    draw = Fixed(torch.randn(row.shape, dtype=row.dtype).sign())
    wanted = [gradient(evaluate(Tangent(), p, draw, w).total, p.model) for w in (BOTH, EXPLICIT)]
    epsilons = torch.tensor([0.08, 0.04, 0.02, 0.01], dtype=torch.float64)
    for exact, weights in zip(wanted, (BOTH, EXPLICIT), strict=True):
        errors = torch.tensor(
            [
                relative(gradient(evaluate(Antithetic(e), p, draw, weights).total, p.model), exact)
                for e in epsilons.tolist()
            ]
        )
        slopes = errors.log().diff() / epsilons.log().diff()
        assert slopes.sub(2.0).abs().max() < 0.1, errors


@pytest.mark.parametrize("engine", [Tangent(), Antithetic(1e-4), Reverse(), Exact()])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_output_of_a_tangent_step_has_no_noise(name, engine):
    p = problem(name)
    output = evaluate(engine, p, seeded(1)).output
    silent = p.model
    for module in silent.modules():  # dropout off, batch statistics still on
        if hasattr(module, "p"):
            module.p = 0.0
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    torch.testing.assert_close(output, silent(p.inputs), rtol=1e-7, atol=1e-7)


class ByWay(nn.Module):
    """A layer, a function that a test chooses, and a layer."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(4, 6), nn.Linear(6, 3), way

    def forward(self, x):
        return self.last(self.way(self.first(x)))


class NoisyBias(nn.Module):
    """A recurrent layer with dropout on one of its biases."""

    def __init__(self, cell):
        super().__init__()
        self.rnn, self.dropout = cell(6, 6), nn.Dropout(0.4)

    def forward(self, x):
        weights = list(self.rnn._flat_weights)
        weights[2] = self.dropout(weights[2])
        lstm = isinstance(self.rnn, nn.LSTM)
        zero = x.new_zeros(1, len(x), 6)
        function, state = (torch.lstm, (zero, zero)) if lstm else (torch.gru, zero)
        out, *_ = function(x[None], state, weights, True, 1, 0.0, self.training, False, False)
        return out[0]


WAYS = {
    "softmax without a dimension": nn.Sequential(nn.Dropout(0.3), nn.Softmax()),
    "log-softmax without a dimension": nn.Sequential(nn.Dropout(0.3), nn.LogSoftmax()),
    "SiLU in place before a dropout": nn.Sequential(nn.SiLU(inplace=True), nn.Dropout(0.3)),
    "SiLU in place after one": nn.Sequential(nn.Dropout(0.3), nn.SiLU(inplace=True)),
    "noise on a bias of an LSTM": NoisyBias(nn.LSTM),
    "noise on a bias of a GRU": NoisyBias(nn.GRU),
}


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("way", WAYS)
def test_unusual_operations_agree_with_the_antithetic_engine(way):
    torch.manual_seed(0)
    model = ByWay(WAYS[way]).double()
    p = Problem(model, torch.randn(5, 4).double(), torch.randint(3, (5,)), CrossEntropy())
    found, expected = (
        evaluate(engine, p, seeded(1), BOTH).total for engine in (Tangent(), Antithetic(1e-4))
    )
    assert relative(gradient(found, model), gradient(expected, model)) < 1e-6


def test_layer_norm_of_a_single_vector_has_the_right_tangent():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.3), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    p = Problem(model, torch.randn(4).double(), torch.tensor(1), CrossEntropy())
    found, expected = (
        evaluate(engine, p, seeded(1), BOTH).total for engine in (Tangent(), Antithetic(1e-4))
    )
    assert relative(gradient(found, model), gradient(expected, model)) < 1e-6
