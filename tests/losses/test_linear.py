"""``LinearCrossEntropy`` against ``CrossEntropy`` on the logits, which are never all in memory."""

import pytest
import torch
import torch.nn.functional as F

from device import new_generator
from dispatch import LargestTensor
from undrop.errors import OptionError, OutputError, TargetError
from undrop.losses.base import FORMS
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.softmax import LinearCrossEntropy

CLASSES, WIDTH = 7, 4


def leaf(g, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def problem(shape=(5, 3), *, ignored=2, dtype=torch.float64, classes=CLASSES, width=WIDTH):
    g = new_generator(0)
    features, u = leaf(g, *shape, width, dtype=dtype), leaf(g, *shape, width, dtype=dtype)
    weight, bias = leaf(g, classes, width, dtype=dtype), leaf(g, classes, dtype=dtype)
    target = torch.randint(classes, shape, generator=g)
    target.view(-1)[:ignored] = -100
    return features, u, weight, bias, target


def losses(weight, bias, **options):
    return LinearCrossEntropy(weight, bias, chunk=4, **options), CrossEntropy(**options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0, 2])
def test_the_fused_value_and_its_gradients_match_the_plain_loss(smoothing, ignored):
    features, _, weight, bias, target = problem(ignored=ignored)
    fused, plain = losses(weight, bias, label_smoothing=smoothing)
    got = fused.value(features, target)
    want = plain.value(F.linear(features, weight, bias), target)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    inputs = (features, weight, bias)
    for scale in (1.0, -0.4):
        torch.testing.assert_close(
            torch.autograd.grad(scale * got, inputs, retain_graph=True),
            torch.autograd.grad(scale * want, inputs, retain_graph=True),
            rtol=1e-10,
            atol=1e-12,
        )


def test_the_fused_value_can_be_differentiated_twice():
    features, _, weight, bias, target = problem()
    fused, plain = losses(weight, bias, label_smoothing=0.1)
    inputs = (features, weight, bias)
    seconds = []
    for loss in (
        fused.value(features, target),
        plain.value(F.linear(features, weight, bias), target),
    ):
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.pow(2).sum() for g in grads), inputs))
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_fused_derivatives_and_their_gradients_match_the_plain_loss(form, with_bias):
    features, u, weight, bias, target = problem()
    bias = bias if with_bias else None
    fused, plain = losses(weight, bias, label_smoothing=0.1)
    got = fused.derivatives(features, u, target, form)
    want = plain.derivatives(F.linear(features, weight, bias), F.linear(u, weight), target, form)
    torch.testing.assert_close(tuple(got), tuple(want), rtol=1e-12, atol=1e-14)
    inputs = [features, u, weight] + ([bias] if with_bias else [])
    for c in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, -1.2, 0.7)):
        grads = [
            torch.autograd.grad(
                sum(a * x for a, x in zip(c, parts, strict=True)),
                inputs,
                retain_graph=True,
                materialize_grads=True,
            )
            for parts in (got, want)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_fused_combined_total_is_the_weighted_sum(form, scale):
    features, u, weight, bias, target = problem()
    fused, plain = losses(weight, bias, label_smoothing=0.1)
    c = (0.9, 0.8, -0.3)
    total, parts = fused.combined(features, u, target, form, c)
    logits, tangent = F.linear(features, weight, bias), F.linear(u, weight)
    want, want_parts = plain.combined(logits, tangent, target, form, c)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(tuple(parts), tuple(want_parts), rtol=1e-12, atol=1e-14)
    assert not any(part.requires_grad for part in parts)
    inputs = (features, u, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(scale * total, inputs), torch.autograd.grad(scale * want, inputs)
    )


@pytest.mark.parametrize("form", ["hessian", "identity"])
def test_the_fused_loss_passes_gradcheck(form):
    *inputs, target = problem((4,), ignored=1)
    assert torch.autograd.gradcheck(
        lambda f, u, w, b: tuple(losses(w, b)[0].derivatives(f, u, target, form)), inputs
    )
    assert torch.autograd.gradcheck(
        lambda f, w, b: losses(w, b)[0].value(f, target), (inputs[0], *inputs[2:])
    )


def test_a_tied_weight_gets_the_gradients_of_both_uses():
    _, _, weight, _, target = problem()
    tokens = target.clamp(min=0)
    fused, plain = losses(weight, None)
    features = F.embedding(tokens, weight)
    got = torch.autograd.grad(fused.value(features, target), weight)
    logits = F.linear(F.embedding(tokens, weight), weight)
    torch.testing.assert_close(got, torch.autograd.grad(plain.value(logits, target), weight))


def test_the_fused_loss_differentiates_only_tensors_that_require_a_gradient():
    features, u, weight, bias, target = problem()
    fused, _ = losses(weight.detach(), bias)
    total, _ = fused.combined(features.detach(), u, target)
    grads = torch.autograd.grad(total, (u, bias))
    everything, _ = losses(weight, bias)[0].combined(features, u, target)
    torch.testing.assert_close(grads, torch.autograd.grad(everything, (u, bias)))
    with torch.no_grad():
        assert not fused.combined(features, u, target)[0].requires_grad


def test_the_fused_loss_is_zero_if_all_targets_are_ignored():
    features, u, weight, bias, target = problem()
    target.fill_(-100)
    loss, _ = losses(weight, bias)
    total, parts = loss.combined(features, u, target)
    scalars = (loss.value(features, target), total, *loss.derivatives(features, u, target))
    assert [x.item() for x in (*scalars, *parts)] == [0.0] * 8
    for scalar in scalars:
        for grad in torch.autograd.grad(scalar, (features, weight), retain_graph=True):
            assert torch.equal(grad, torch.zeros_like(grad))
    assert loss.count(features, target) == 1


def outer_products(loss, features, form, draws):
    """∇S ∇Sᵀ of many independent rows with the same features."""
    rows = features.detach().expand(draws, -1).clone().requires_grad_()
    target = torch.zeros(draws, dtype=torch.long)
    generator = new_generator(5)
    (grads,) = torch.autograd.grad(loss.sampled(rows, target, form, generator), rows)
    return grads.unsqueeze(2) * grads.unsqueeze(1)


@pytest.mark.parametrize("form", ["hessian", "identity"])
def test_sampled_gradients_of_the_fused_loss_have_the_form_as_covariance(form):
    """E[∇S ∇Sᵀ] = WᵀHW or WᵀW: 20,000 draws, all entries within 4 standard errors."""
    features, _, weight, bias, _ = problem((1,), ignored=0)
    loss, _ = losses(weight, bias)
    p = torch.softmax(F.linear(features, weight, bias)[0], -1)
    middle = torch.diag(p) - torch.outer(p, p) if form == "hessian" else torch.eye(CLASSES).double()
    outer = outer_products(loss, features, form, 20_000)
    error = outer.std(0) / len(outer) ** 0.5
    assert ((outer.mean(0) - weight.t() @ middle @ weight).abs() <= 4 * error).all()


def test_the_fused_loss_does_not_sample_ignored_targets():
    features, _, weight, bias, target = problem((6,), ignored=3)
    loss, _ = losses(weight, bias)
    for form in FORMS:
        g = new_generator(0)
        (grad,) = torch.autograd.grad(loss.sampled(features, target, form, g), features)
        assert torch.equal(grad[:3], torch.zeros_like(grad[:3]))
        assert (grad[3:] != 0).any()


@pytest.mark.parametrize("call", ["value", "combined", "derivatives"])
def test_the_fused_loss_never_makes_the_whole_matrix_of_logits(call):
    features, u, weight, bias, target = problem((40, 10), classes=500, dtype=torch.float32)
    loss = LinearCrossEntropy(weight, bias, chunk=16)
    with LargestTensor() as largest:
        if call == "value":
            total = loss.value(features, target)
        elif call == "combined":
            total, _ = loss.combined(features, u, target)
        else:
            total = sum(loss.derivatives(features, u, target))
        total.backward()
    assert largest.elements == (1 if call == "value" else 2) * 16 * 500


@pytest.mark.portable
def test_the_fused_loss_in_float32_and_bfloat16_is_close_to_float64():
    exact = problem(classes=50)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        rounded = problem(classes=50, dtype=dtype)
        results = []
        for features, u, weight, bias, target in (exact, rounded):
            total, _ = LinearCrossEntropy(weight, bias).combined(features, u, target)
            results.append([total, *torch.autograd.grad(total, (features, u, weight, bias))])
        for want, got in zip(*results, strict=True):
            assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.portable
def test_the_fused_loss_under_bfloat16_autocast_is_close_and_its_gradients_are_float32():
    features, u, weight, bias, target = problem(classes=50, dtype=torch.float32)
    loss = LinearCrossEntropy(weight, bias)
    want, _ = loss.combined(features, u, target)
    wanted = torch.autograd.grad(want, (features, u, weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = loss.combined(features, u, target)
        parts = loss.derivatives(features, u, target)
    torch.testing.assert_close(got, sum(parts))
    for total in (got, sum(parts)):
        for a, b in zip(
            torch.autograd.grad(total, (features, u, weight, bias)), wanted, strict=True
        ):
            assert a.dtype == torch.float32
            assert (a - b).norm() <= 0.02 * b.norm()


def test_linear_cross_entropy_refuses_targets_and_features_that_do_not_fit():
    features, _, weight, bias, target = problem()
    loss, _ = losses(weight, bias)
    loss.check(features, target)
    beyond = target.masked_fill(target == -100, 7)
    for call in (loss.check_values, loss.value):
        with pytest.raises(
            TargetError, match=r"must lie in 0 … 6 \(or be ignore_index = -100\), got 7"
        ):
            call(features, beyond)
    with pytest.raises(TargetError, match=r"must have shape \(5, 3\)"):
        loss.check(features, target[:4])
    with pytest.raises(TargetError, match=r"integer type, got torch.float32"):
        loss.check(features, target.float())
    with pytest.raises(
        OutputError, match=r"features of width 4.* got an output of shape \(5, 3, 7\)"
    ):
        loss.check(F.linear(features, weight), target)


def test_linear_cross_entropy_refuses_options_that_do_not_fit():
    _, _, weight, bias, _ = problem()
    with pytest.raises(OptionError, match="at least 1 row, got 0"):
        LinearCrossEntropy(weight, bias, chunk=0)
    with pytest.raises(OptionError, match=r"label_smoothing must lie in \[0, 1\), got 1.0"):
        LinearCrossEntropy(weight, bias, label_smoothing=1.0)
    with pytest.raises(OptionError, match=r"got \(7, 4\) and \(3,\)"):
        LinearCrossEntropy(weight, bias[:3])
