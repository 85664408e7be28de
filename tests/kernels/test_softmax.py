"""Softmax cross-entropy along a tangent against torch's own derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp

from device import new_generator
from undrop.kernels.output_layers import Logits
from undrop.kernels.softmax import Coefficients, SoftmaxOptions

FORMS = ("hessian", "identity")


def cross_entropy_derivatives(logits, u, target, label_smoothing=0.0, form="hessian"):
    return Logits().derivatives(logits, u, target, SoftmaxOptions(label_smoothing, form))


def cross_entropy_combined(logits, u, target, coefficients, label_smoothing=0.0, form="hessian"):
    options = SoftmaxOptions(label_smoothing, form, Coefficients(*coefficients))
    return Logits().combined(logits, u, target, options)


def problem(shape=(4, 3), classes=7, ignored=2, dtype=torch.float64, seed=0):
    g = new_generator(seed)
    logits = torch.randn(*shape, classes, generator=g, dtype=torch.float64).mul(2).to(dtype)
    u = torch.randn(*shape, classes, generator=g, dtype=torch.float64).to(dtype)
    target = torch.randint(classes, shape, generator=g)
    target.view(-1)[:ignored] = -100
    return logits.requires_grad_(), u.requires_grad_(), target


def log_softmax(z):
    return z - z.exp().sum(-1, keepdim=True).log()


def reference(logits, u, target, smoothing, form):
    """ℓ and its first two derivatives along u by plain differentiable arithmetic and jvp."""
    keep = target != -100
    z, t, y = logits[keep], u[keep], target[keep]
    q = F.one_hot(y, z.shape[-1]).to(z) * (1 - smoothing) + smoothing / z.shape[-1]

    def loss(s):
        return -(q * log_softmax(z + s * t)).sum(-1).mean()

    def slope(s):
        return jvp(loss, (s,), (torch.ones_like(s),))[1]

    zero = z.new_zeros(())
    first, second = jvp(slope, (zero,), (torch.ones_like(zero),))
    return loss(zero), second if form == "hessian" else t.square().sum(-1).mean(), first


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0, 2])
def test_the_derivatives_of_softmax_match_autograd(form, smoothing, ignored):
    logits, u, target = problem(ignored=ignored)
    got = cross_entropy_derivatives(logits, u, target, label_smoothing=smoothing, form=form)
    want = reference(logits, u, target, smoothing, form)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.7, -1.3, 0.4)):
        grads = [
            torch.autograd.grad(
                sum(w * x for w, x in zip(weights, parts, strict=True)),
                (logits, u),
                retain_graph=True,
                materialize_grads=True,
            )
            for parts in (got, want)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_derivatives_of_softmax_pass_gradcheck(form):
    logits, u, target = problem(shape=(3,), classes=5, ignored=1)
    assert torch.autograd.gradcheck(
        lambda z, t: cross_entropy_derivatives(z, t, target, label_smoothing=0.1, form=form),
        (logits, u),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_combined_softmax_total_is_the_weighted_sum(form, scale):
    logits, u, target = problem()
    parts = cross_entropy_derivatives(logits, u, target, label_smoothing=0.1, form=form)
    total, detached = cross_entropy_combined(
        logits, u, target, (0.9, 0.8, -0.3), label_smoothing=0.1, form=form
    )
    want = 0.9 * parts[0] + 0.8 * parts[1] - 0.3 * parts[2]
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(detached, tuple(x.detach() for x in parts), rtol=1e-12, atol=0)
    assert not any(x.requires_grad for x in detached)
    got = torch.autograd.grad(scale * total, (logits, u))
    torch.testing.assert_close(got, torch.autograd.grad(scale * want, (logits, u)))


def test_the_softmax_derivatives_do_not_depend_on_the_size_of_blocks(monkeypatch):
    logits, u, target = problem(shape=(11,), ignored=3)
    whole = cross_entropy_combined(logits, u, target, (1.0, 0.5, 1.0))
    grads = torch.autograd.grad(whole[0], (logits, u))
    monkeypatch.setattr("undrop.kernels.softmax._BLOCK_ELEMENTS", 3 * 7)
    parts = cross_entropy_combined(logits, u, target, (1.0, 0.5, 1.0))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(parts[0], (logits, u)), grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_have_finite_gradients_and_a_nonnegative_form(dtype):
    logits, u, target = problem(shape=(50,), ignored=0, dtype=dtype)
    with torch.no_grad():
        logits.mul_(1e4)
        u.mul_(1e3)
    loss, quadratic, directional = cross_entropy_derivatives(logits, u, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    assert quadratic >= 0
    grads = torch.autograd.grad(loss + quadratic + directional, (logits, u))
    assert all(torch.isfinite(g).all() for g in grads)


def test_a_common_shift_of_the_tangent_does_not_change_the_softmax_derivatives():
    logits, u, target = problem()
    parts = cross_entropy_derivatives(logits, u, target)
    shifted = cross_entropy_derivatives(logits, u + 1e3, target)
    torch.testing.assert_close(shifted, parts, rtol=1e-9, atol=1e-9)


def test_the_softmax_derivatives_are_zero_if_all_targets_are_ignored():
    logits, u, target = problem()
    target.fill_(-100)
    parts = cross_entropy_derivatives(logits, u, target)
    total, _ = cross_entropy_combined(logits, u, target, (1.0, 1.0, 1.0))
    assert [x.item() for x in (*parts, total)] == [0.0] * 4
    for scalar in (sum(parts), total):
        for grad in torch.autograd.grad(scalar, (logits, u)):
            assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.portable
def test_the_softmax_of_bfloat16_is_computed_in_float32():
    logits, u, target = problem(dtype=torch.bfloat16)
    parts = cross_entropy_derivatives(logits, u, target)
    want = cross_entropy_derivatives(logits.float(), u.float(), target)
    torch.testing.assert_close(parts, want)
    grads = torch.autograd.grad(sum(parts), (logits, u))
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in grads)


def test_classes_with_logits_of_minus_infinity_do_not_change_the_derivatives():
    logits, u, target = problem(shape=(5,), ignored=0)
    wide = torch.cat((logits, logits.new_full((5, 2), -torch.inf)), -1)
    tangent = torch.cat((u, u.new_zeros(5, 2)), -1)
    torch.testing.assert_close(
        cross_entropy_derivatives(wide, tangent, target),
        cross_entropy_derivatives(logits, u, target),
    )
