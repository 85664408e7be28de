"""The bound against a slow, literal version of the paper's formulas, and its lemmas as properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis import last_layer
from undrop.diagnosis.theorem.generalization import TAU, BoundCurve, minimum_over_beta
from undrop.lab.models import MLP


def softmax(v):
    e = np.exp(v - v.max())
    return e / e.sum()


def literal(weight, features, labels, cut, delta, alpha, tau):
    """Theorem 4.1, Theorem B.1 and G, written down as the paper has them, example by example."""
    n, c = len(labels), len(weight)
    mu = nu = loss = 0.0
    for x, y in zip(features, labels, strict=True):
        p = softmax(weight @ x)
        gradient = p - np.eye(c)[y]
        hessian = np.diag(p) - np.outer(p, p)
        mu += np.sqrt((gradient**2).sum()) / n
        nu += np.trace(hessian) / n
        loss += min(cut, -np.log(p[y])) / n
    transposed = weight.T
    norm = sum(
        np.sqrt(sum(transposed[i, j] ** 2 for i in range(transposed.shape[0])))
        for j in range(transposed.shape[1])
    )
    kappa = max(np.sqrt((x**2).sum()) for x in features)
    theta = np.log(n * c) ** 3 * kappa**2
    zeta = cut * (np.log(1 / delta) + np.log(np.log(n))) / n
    inside = cut * norm**2 * theta / (nu * n)
    first = (norm * mu) ** (2 / 3) * (theta * cut) ** (1 / 3) / n ** (1 / 3)
    second = norm * np.sqrt(cut * nu * theta) / np.sqrt(n)
    third = cut * norm**2 * theta / (n * (np.log(inside) ** 2 + 1))
    general = (
        cut
        * norm**2
        * theta
        * tau**2
        / (n * (np.log(cut * norm**2 * theta * tau**4 / (n * nu)) ** 2 + 1))
    )

    def g(beta):
        grown = (np.exp(tau * beta * kappa) - tau * beta * kappa - 1) / tau**2
        return (
            beta * (1 + 1 / alpha) * mu * kappa
            + (1 + 1 / alpha) * nu * grown
            + (1 + alpha) * cut * norm**2 * np.log(n * c) ** 3 / (beta**2 * n)
        )

    return {
        "mu": mu,
        "nu": nu,
        "norm": norm,
        "theta": theta,
        "zeta": zeta,
        "loss": loss,
        "terms": [first, second, third, zeta],
        "general": [first, second, general, zeta],
        "g": g,
        "kappa": kappa,
    }


def data(seed=0, n=40, c=5, d=6, scale=1.0):
    rng = np.random.default_rng(seed)
    weight = scale * rng.normal(size=(c, d))
    features = rng.normal(size=(n, d))
    labels = rng.integers(c, size=n)
    return weight, features, labels


@pytest.mark.parametrize(
    ("scale", "tau", "alpha"), [(1.0, TAU, 100.0), (0.1, 1.0, 5.0), (4.0, 2.0, 1.0)]
)
def test_every_figure_of_the_bound_agrees_with_a_literal_implementation(scale, tau, alpha):
    weight, features, labels = data(scale=scale)
    found = undrop.bound(
        *map(torch.from_numpy, (weight, features, labels)),
        truncation=1.5,
        delta=0.1,
        tau=tau,
        alpha=alpha,
    )
    truth = literal(weight, features, labels, 1.5, 0.1, alpha, tau)
    for name in ("mu", "nu", "norm", "theta", "zeta", "kappa"):
        assert getattr(found, name) == pytest.approx(truth[name], rel=1e-12)
    assert list(found.terms.values()) == pytest.approx(truth["terms"], rel=1e-12)
    assert list(found.general_terms.values()) == pytest.approx(truth["general"], rel=1e-12)
    assert found.train_loss.value == pytest.approx(truth["loss"], rel=1e-12)
    assert found.total == pytest.approx(sum(truth["terms"]))
    assert found.g_minimum == pytest.approx(truth["g"](found.beta), rel=1e-10)
    grid = found.beta * np.exp(np.linspace(-3, 3, 2001))
    with np.errstate(over="ignore"):
        assert found.g_minimum <= truth["g"](grid).min() * (1 + 1e-12)
        assert found.g_minimum == pytest.approx(truth["g"](grid).min(), rel=1e-4)


def test_the_minimum_of_the_bound_matches_scipys():
    optimize = pytest.importorskip("scipy.optimize")
    for a, b, c, s in [(1.0, 2.0, 3.0, 0.5), (1e-6, 1e-9, 1e4, 30.0), (5.0, 0.0, 1e-3, 1.0)]:
        curve = BoundCurve(a, b, c, s)
        beta, least = minimum_over_beta(curve)
        found = optimize.minimize_scalar(
            lambda t, curve=curve: math.log(sum(curve.terms(math.exp(t)))),
            bracket=(math.log(beta) - 1, math.log(beta) + 0.5),
            tol=1e-12,
        )
        assert math.exp(found.fun) == pytest.approx(least, rel=1e-9)


def test_a_perfect_layer_leaves_only_the_low_order_term():
    weight = torch.tensor([[2000.0, 0.0], [0.0, 2000.0]]).double()
    features = torch.eye(2).double().repeat(4, 1)
    found = undrop.bound(weight, features, torch.arange(8) % 2)
    assert found.mu == 0.0
    assert found.nu == 0.0
    assert found.g_minimum == 0.0
    assert found.total == pytest.approx(found.zeta)
    assert found.to_json()["beta"] is None


@pytest.mark.parametrize("size", [0.0, 1e-200, 1e-100])
def test_zero_features_leave_only_the_low_order_term(size):
    """κ = 0: G(β) = c/β², and every term but ζ has a factor κ. A tiny κ comes close to that."""
    weight, features, labels = map(torch.from_numpy, data())
    found = undrop.bound(weight, size * features, labels)
    assert found.nu == pytest.approx(1 - 1 / 5)  # a blind guess among five classes
    assert found.g_minimum == pytest.approx(0.0, abs=1e-60)
    assert found.total == pytest.approx(found.zeta)
    assert math.isinf(found.beta) == (found.kappa == 0.0)


def test_a_bias_acts_as_one_more_feature_with_value_one():
    weight, features, labels = map(torch.from_numpy, data())
    bias = torch.randn(5).double()
    joined = torch.cat([weight, bias[:, None]], 1)
    ones = torch.cat([features, torch.ones(len(features), 1).double()], 1)
    with_bias = undrop.bound(weight, features, labels, bias=bias).to_json()
    assert with_bias == undrop.bound(joined, ones, labels).to_json()


logits = st.lists(st.floats(-30, 30), min_size=2, max_size=12).map(np.array)


@given(logits)
@settings(max_examples=300, deadline=None)
def test_cross_entropy_has_an_exponential_tail_with_tau_root_two(v):
    """Lemma: ‖D(tr∘D²ℓ)‖ ≤ √2·tr D²ℓ, the derivative by a difference in every direction."""

    def trace(v):
        p = torch.softmax(v, -1)
        return (p * (1 - p)).sum()

    at = torch.from_numpy(v).requires_grad_()
    value = trace(at)
    (slope,) = torch.autograd.grad(value, at)
    assert float(slope.norm()) <= math.sqrt(2.0) * float(value.detach()) * (1 + 1e-9) + 1e-14


@given(logits)
@settings(max_examples=200, deadline=None)
def test_the_hessian_is_the_covariance_of_sampled_labels(v):
    """Claim: D²ℓ = E over ŷ ~ p of Dℓ_ŷᵀ Dℓ_ŷ, whatever the true label."""
    p = softmax(v)
    gradients = p - np.eye(len(v))
    expected = sum(p[y] * np.outer(gradients[y], gradients[y]) for y in range(len(v)))
    hessian = torch.autograd.functional.hessian(
        lambda f: nn.functional.cross_entropy(f[None], torch.tensor([0])), torch.from_numpy(v)
    )
    np.testing.assert_allclose(hessian.numpy(), expected, atol=1e-12)


def test_assumptions_are_checked_and_constants_are_said_to_be_unknown():
    found = undrop.bound(*map(torch.from_numpy, data()))
    text = str(found)
    assert "constants are universal and unknown" in text
    assert [a.holds for a in found.assumptions] == [True, None, None, False]
    steep = undrop.bound(*map(torch.from_numpy, data()), tau=0.01, norm_bound=1e6)
    assert [a.holds for a in steep.assumptions] == [False, True, None, False]
    assert "FAILS" in str(steep)
    assert found.truncation == pytest.approx(math.log(5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5)}, r"weight must be \(classes, features\)"),
        ({"features": torch.zeros(40, 3).double()}, r"got \(5, 6\) and \(40, 3\)"),
        ({"labels": torch.zeros(40)}, "labels must be 40 class indices of an integer type"),
        ({"labels": torch.full((40,), 5)}, r"labels must lie in 0 … 4"),
        ({"features": torch.full((40, 6), math.nan).double()}, "must be finite"),
        ({"truncation": 0.0}, "truncation must be positive"),
        ({"delta": 1.0}, r"delta must lie in \(0, 1\)"),
        ({"norm_bound": 0.1}, "norm_bound must be at least"),
        ({"bias": torch.zeros(3)}, "bias must have one number per class, 5"),
    ],
)
def test_the_bound_names_bad_input(change, message):
    weight, features, labels = map(torch.from_numpy, data())
    arguments = {"weight": weight, "features": features, "labels": labels, **change}
    with pytest.raises(undrop.errors.UndropError, match=message):
        undrop.bound(**arguments)


def test_the_bound_refuses_two_examples():
    weight, features, labels = (torch.from_numpy(x) for x in data(n=2))
    with pytest.raises(undrop.errors.OptionError, match="at least 3 examples"):
        undrop.bound(weight, features, labels)


def trained(objective, x, y):
    torch.manual_seed(0)
    model = MLP([10, 64, 4], dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        objective(model, x, y).backward()
        optimizer.step()
    return model


def test_regularization_lowers_hessian_and_gap_of_the_same_model():
    """Evaluate Theorem 4.1 and the gap for the last layer, with and without the regularizer."""
    torch.manual_seed(0)
    teacher = torch.randn(10, 4)
    x = torch.randn(1100, 10)
    y = (x @ teacher + 3.0 * torch.randn(1100, 4)).argmax(1)
    train, test = (x[:100], y[:100]), (x[100:], y[100:])
    bounds = {}
    for name, objective in {
        "none": undrop.NoRegularization(),
        "analytic": undrop.Analytic(generator=new_generator(0)),
    }.items():
        model = trained(objective, *train)
        head, other = last_layer(model, [train]), last_layer(model, [test])
        assert head.weight is not None
        bounds[name] = undrop.bound(
            head.weight,
            head.features,
            head.labels,
            bias=head.bias,
            test=(other.features, other.labels),
            truncation=5.0,
        )
    none, analytic = bounds["none"], bounds["analytic"]
    assert analytic.gap.value + 4 * analytic.gap.stderr < none.gap.value
    assert analytic.norm < none.norm
    assert analytic.terms["tail"] < none.terms["tail"]


def test_last_layer_returns_a_linear_layer_and_refuses_any_other():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))
    x, y = torch.randn(7, 3), torch.tensor([0, 1, -100, 1, 0, 0, 1])
    head = last_layer(model, [(x, y)])
    assert head.weight.data_ptr() == model[3].weight.data_ptr()
    assert head.features.shape == (6, 5)
    torch.testing.assert_close(head.features, model[:2](x)[y != -100])  # no dropout
    assert model.training
    with pytest.raises(undrop.errors.OutputError, match="is not that of a linear layer"):
        last_layer(nn.Sequential(model, nn.Tanh()), [(x, y)])
