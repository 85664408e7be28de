"""Extreme numbers: any shape, precision and p, sizes of one and zero, huge logits."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import undrop
from device import new_generator
from undrop.losses import MSE, BCEWithLogits, CrossEntropy, LinearCrossEntropy

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOSSES = ("cross-entropy", "linear", "bce", "mse")
WIDTH = 3

quick = settings(max_examples=60, deadline=None, derandomize=True)
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
rates = st.one_of(st.sampled_from([1e-6, 0.5, 0.99]), st.floats(1e-6, 0.99))
sizes = st.sampled_from([0.0, 1e-4, 1.0, 1e4])


def target_for(loss, output, classes, ignored):
    """Valid targets; of class indices, the share ``ignored`` is ignored."""
    if isinstance(loss, BCEWithLogits | MSE):
        return torch.rand(output.shape, dtype=output.dtype)
    target = torch.randint(classes, output.shape[:-1])
    return target.masked_fill(torch.rand(target.shape) < ignored, -100)


def named(name, classes, dtype):
    if name == "linear":
        return LinearCrossEntropy(torch.randn(classes, WIDTH, dtype=dtype), chunk=2)
    return {"cross-entropy": CrossEntropy, "bce": BCEWithLogits, "mse": MSE}[name]()


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(
    rows=shapes,
    classes=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    size=sizes,
    tangent=sizes,
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    form=st.sampled_from(["hessian", "identity"]),
    seed=st.integers(0, 99),
)
def test_a_loss_and_its_derivatives_are_finite(
    name, rows, classes, dtype, size, tangent, ignored, form, seed
):
    """Finite with finite gradients, ℓ ≥ 0 and uᵀHu ≥ 0; the fused total is the sum of its parts."""
    torch.manual_seed(seed)
    loss = named(name, classes, dtype)
    last = WIDTH if name == "linear" else classes
    output = torch.empty(*rows, last).uniform_(-size, size).to(dtype).requires_grad_()
    u = torch.empty(*rows, last).uniform_(-tangent, tangent).to(dtype).requires_grad_()
    target = target_for(loss, output, classes, ignored)
    loss.check(output, target)
    loss.check_values(output, target)
    parts = loss.derivatives(output, u, target, form)
    total, again = loss.combined(output, u, target, form, (1.0, 0.5, 2.0))
    expected = parts.loss + 0.5 * parts.quadratic + 2.0 * parts.directional
    gradients = torch.autograd.grad(total, (output, u))
    assert all(map(torch.isfinite, parts))
    assert parts.loss >= 0
    assert parts.quadratic >= 0
    assert again.quadratic >= 0
    scale = sum(float(part.detach().abs()) for part in parts)
    half = dtype in DTYPES[:2]
    assert abs(float(total - expected)) <= (1e-2 if half else 1e-4) * scale
    if dtype != torch.float16 or tangent <= 1.0:  # u² may be more than float16 holds
        assert all(gradient.isfinite().all() for gradient in gradients)
    if ignored == 1.0 and name in ("cross-entropy", "linear"):
        assert [float(part) for part in parts] == [0.0, 0.0, 0.0]
        assert not any(gradient.any() for gradient in gradients)
    if classes == 1 and form == "hessian" and name in ("cross-entropy", "linear"):
        assert [float(part) for part in parts] == [0.0, 0.0, 0.0]


@quick
@given(
    rows=st.integers(1, 6),
    classes=st.integers(1, 5),
    size=sizes,
    tangent=sizes,
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_an_output_layer_inside_the_loss_gives_the_same_derivatives(
    rows, classes, size, tangent, ignored, seed
):
    torch.manual_seed(seed)
    weight = torch.randn(classes, WIDTH, dtype=torch.float64)
    features = torch.empty(rows, WIDTH, dtype=torch.float64).uniform_(-size, size)
    u = torch.empty_like(features).uniform_(-tangent, tangent)
    target = target_for(CrossEntropy(), features, classes, ignored)
    inside = LinearCrossEntropy(weight, chunk=2).derivatives(features, u, target)
    outside = CrossEntropy().derivatives(features @ weight.T, u @ weight.T, target)
    for one, other in zip(inside, outside, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def affine(p, classes, dtype):
    """A net that is affine in its noise, for which the antithetic engine makes no error."""
    return nn.Sequential(nn.Dropout(p), nn.Linear(WIDTH, classes)).to(dtype)


def step_of(model, inputs, target, loss, engine, **options):
    generator = new_generator(1)
    model.zero_grad()
    objective = undrop.Analytic(engine=engine, loss=loss, generator=generator, **options)
    step = objective(model, inputs, target)
    step.backward()
    return step.parts, [parameter.grad.clone() for parameter in model.parameters()]


steps = given(
    rows=shapes,
    classes=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES[2:]),
    p=rates,
    size=st.sampled_from([0.0, 1.0, 1e4]),
    ignored=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
"""The problem on which engines are compared."""


@pytest.mark.parametrize("name", LOSSES)
@quick
@steps
def test_the_tangent_and_the_antithetic_engine_agree(
    name, rows, classes, dtype, p, size, ignored, seed
):
    """In every part and in the gradient, up to rounding, which grows with |F|/(ε₀|u|) ≤ 1/(ε₀σ)."""
    assume(dtype == torch.float64 or p > 0.01)
    torch.manual_seed(seed)
    last = WIDTH if name == "linear" else classes
    model, loss = affine(p, last, dtype), named(name, classes, dtype)
    inputs = torch.empty(*rows, WIDTH, dtype=dtype).uniform_(-size, size)
    target = target_for(loss, torch.empty(*rows, last, dtype=dtype), classes, ignored)
    parts, gradient = step_of(model, inputs, target, loss, "tangent")
    others, other_gradient = step_of(model, inputs, target, loss, "antithetic")
    assert parts["explicit"] >= 0
    assert others["explicit"] >= 0
    rounding = 1e-6 if dtype == torch.float64 else 2e-2
    whole = sum(map(abs, parts.values())) + 1e-6
    for part, value in parts.items():
        assert abs(value - others[part]) <= rounding * whole
    norm = max(float(one.norm()) for one in gradient) + 1e-3
    for one, other in zip(gradient, other_gradient, strict=True):
        assert float((one - other).norm()) <= rounding * norm


@pytest.mark.parametrize("name", LOSSES)
@quick
@steps
def test_the_exact_and_the_tangent_engine_agree(name, rows, classes, dtype, p, size, ignored, seed):
    """With one η a row, uᵀHu is the same for both signs: each draw has the value of the mean."""
    torch.manual_seed(seed)
    last = WIDTH if name == "linear" else classes
    model = nn.Sequential(nn.Dropout(p), nn.Linear(1, last)).to(dtype)
    loss = named(name, classes, dtype)
    inputs = torch.empty(*rows, 1, dtype=dtype).uniform_(-size, size)
    target = target_for(loss, torch.empty(*rows, last, dtype=dtype), classes, ignored)
    parts, _ = step_of(model, inputs, target, loss, "tangent")
    exact, _ = step_of(model, inputs, target, loss, "exact")
    assert exact["explicit"] >= 0
    assert exact["implicit"] == 0
    rounding = 1e-9 if dtype == torch.float64 else 1e-3
    for part in ("loss", "explicit"):
        assert abs(parts[part] - exact[part]) <= rounding * (abs(exact[part]) + 1e-30)


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(
    rows=shapes,
    classes=st.integers(1, 4),
    p=rates,
    size=st.sampled_from([0.0, 1.0, 1e4]),
    ignored=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_reverse_and_the_tangent_engine_have_the_same_implicit_part(
    name, rows, classes, p, size, ignored, seed
):
    """∂ℓ/∂ε and its gradient for the same η; the reverse engine computes them by double backward."""
    torch.manual_seed(seed)
    last = WIDTH if name == "linear" else classes
    model = affine(p, last, torch.float64)
    loss = named(name, classes, torch.float64)
    inputs = torch.empty(*rows, WIDTH, dtype=torch.float64).uniform_(-size, size)
    target = target_for(loss, torch.empty(*rows, last, dtype=torch.float64), classes, ignored)
    parts, gradient = step_of(model, inputs, target, loss, "tangent", explicit=None)
    others, other_gradient = step_of(model, inputs, target, loss, "reverse", explicit=None)
    whole = sum(map(abs, parts.values())) + 1e-9
    assert abs(parts["implicit"] - others["implicit"]) <= 1e-9 * whole
    norm = max(float(one.norm()) for one in gradient) + 1e-9
    for one, other in zip(gradient, other_gradient, strict=True):
        assert float((one - other).norm()) <= 1e-9 * norm


@quick
@given(
    rows=st.integers(1, 3),
    classes=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    p=rates,
    size=st.sampled_from([0.0, 1.0, 100.0]),
    engine=st.sampled_from(["tangent", "antithetic", "reverse", "exact"]),
    ignored=st.sampled_from([0.0, 1.0]),
)
def test_a_step_is_finite_with_every_engine_in_every_precision(
    rows, classes, dtype, p, size, engine, ignored
):
    """For zero to saturated activations, and for one row of one class: finite and of the right sign."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4), nn.Tanh(), nn.Dropout(p), nn.Linear(4, classes)
    model = nn.Sequential(*layers).to(dtype)
    inputs = torch.empty(rows, WIDTH).uniform_(-size, size).to(dtype)
    target = target_for(CrossEntropy(), torch.empty(rows, classes), classes, ignored)
    parts, gradient = step_of(model, inputs, target, CrossEntropy(), engine)
    assert all(map(math.isfinite, parts.values()))
    assert parts["loss"] >= 0
    assert parts["explicit"] >= 0
    assert all(one.isfinite().all() for one in gradient)


class Words(nn.Module):
    """A recurrent net with dropout around it."""

    def __init__(self, p):
        super().__init__()
        self.before, self.rnn = nn.Dropout(p), nn.LSTM(WIDTH, 4)
        self.after, self.decoder = nn.Dropout(p), nn.Linear(4, 5)

    def forward(self, x):
        return self.decoder(self.after(self.rnn(self.before(x))[0]))


@settings(quick, max_examples=40)
@given(
    length=st.integers(1, 4),
    batch=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    p=rates,
    size=st.sampled_from([0.0, 1.0, 100.0]),
    engine=st.sampled_from(["tangent", "antithetic"]),
    ignored=st.sampled_from([0.0, 1.0]),
)
def test_a_step_of_a_recurrent_net_is_finite(length, batch, dtype, p, size, engine, ignored):
    """For zero to saturated activations, and for one token: finite and of the right sign."""
    torch.manual_seed(0)
    model = Words(p).to(dtype)
    inputs = torch.empty(length, batch, WIDTH).uniform_(-size, size).to(dtype)
    target = target_for(CrossEntropy(), torch.empty(length, batch, 5), 5, ignored)
    parts, gradient = step_of(model, inputs, target, CrossEntropy(), engine)
    assert parts["loss"] >= 0
    assert parts["explicit"] >= 0
    assert all(one.isfinite().all() for one in gradient)
    if ignored == 1.0:
        assert set(parts.values()) == {0.0}
