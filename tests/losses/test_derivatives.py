"""Every loss against torch: its value, its derivatives along u, and their gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian

from device import DEVICE, new_generator
from problems import LOSSES, softened
from undrop.errors import OptionError
from undrop.losses import FORMS, CrossEntropy, Generic, LinearCrossEntropy

D = torch.float64
SHAPES = [(3,), (2, 3), ()]
REFERENCES = {
    "cross-entropy": lambda f, y: F.cross_entropy(f.flatten(0, -2), y.flatten()),
    "smoothed": lambda f, y: (
        F.cross_entropy(
            f.flatten(0, -2), y.flatten(), ignore_index=1, label_smoothing=0.2, reduction="sum"
        )
        / (y != 1).sum()
    ),
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "generic": softened,
}


def linear_head(w):
    """Cross-entropy of the whole layer at once, for comparison."""

    class Head(CrossEntropy):
        def sampled(self, output, target, form, generator):
            return super().sampled(output @ w.T, target, form, generator)

    return Head(ignore_index=1)


def case(name, leading):
    """A loss with an output, a tangent and a target."""
    torch.manual_seed(0)
    output, u = torch.randn(2, *leading, 4, dtype=D).requires_grad_()
    loss = LOSSES[name]()
    if not isinstance(loss, CrossEntropy):
        return loss, output, u, torch.rand(*leading, 4, dtype=D)
    target = torch.randint(4, leading)
    if leading:
        target[0] = 1  # one that "smoothed" ignores
        target[-1] = 2
    return loss, output, u, target if leading else torch.tensor(3)


@pytest.fixture(params=[(name, shape) for name in LOSSES for shape in SHAPES], ids=str)
def given(request):
    name, leading = request.param
    if name == "cross-entropy" and not leading:
        leading = (1,)  # torch's own wants a row
    if name == "smoothed" and not leading:
        leading = (4,)
    return name, *case(name, leading)


def test_the_value_equals_torchs_loss(given):
    name, loss, output, _, target = given
    expected = REFERENCES[name](output, target)
    torch.testing.assert_close(loss.value(output, target), expected, rtol=1e-12, atol=1e-12)


def test_the_derivatives_match_the_value_along_u(given):
    name, loss, output, u, target = given
    found = loss.derivatives(output, u, target)
    f, u = output.detach(), u.detach()

    def reference(flat):
        return REFERENCES[name](flat.view_as(f), target)

    slope, curvature = grad(reference)(f.flatten()), hessian(reference)(f.flatten())
    torch.testing.assert_close(found.loss, reference(f))
    torch.testing.assert_close(found.directional, slope @ u.flatten())
    torch.testing.assert_close(found.quadratic, u.flatten() @ curvature @ u.flatten())


def test_the_identity_and_loss_jacobian_forms_match_their_definition(given):
    _, loss, output, u, target = given
    identity = loss.derivatives(output, u, target, "identity")
    n = loss.count(output, target)
    kept = u.square()
    if isinstance(loss, CrossEntropy):
        kept = kept[target != loss.ignore_index]
    torch.testing.assert_close(identity.quadratic, kept.sum() / n)
    jacobian = loss.derivatives(output, u, target, "loss-jacobian")
    torch.testing.assert_close(jacobian.quadratic, n * identity.directional.square())
    torch.testing.assert_close(jacobian.loss, identity.loss)


@pytest.mark.parametrize("form", FORMS)
def test_the_derivatives_pass_gradcheck(given, form):
    _, loss, output, u, target = given
    torch.autograd.gradcheck(lambda f, u: loss.derivatives(f, u, target, form), (output, u))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, -3.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("form", FORMS)
def test_the_combined_total_is_the_weighted_sum(given, form, weights):
    _, loss, output, u, target = given
    total, parts = loss.combined(output, u, target, form, weights)
    wanted = loss.derivatives(output, u, target, form)
    expected = sum(c * part for c, part in zip(weights, wanted, strict=True))
    torch.testing.assert_close(total, expected)
    for c, part, other in zip(weights, parts, wanted, strict=True):
        if c or part:  # a part of coefficient 0 may be left out
            torch.testing.assert_close(part, other.detach())
        assert not part.requires_grad
    for scale in (1.0, 3.0):
        found = torch.autograd.grad(scale * total, (output, u), retain_graph=True)
        torch.testing.assert_close(
            found, torch.autograd.grad(scale * expected, (output, u), retain_graph=True)
        )


@pytest.mark.parametrize("form", ["hessian", "identity"])
@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "bce", "mse"])
def test_the_second_moment_of_sampled_gradients_is_the_form(name, form):
    """E[∇S ∇Sᵀ] = N × the form's matrix: 20,000 rows drawn at once, each entry within 4 errors."""
    n = 20_000
    torch.manual_seed(0)
    loss = LOSSES[name]()
    row = torch.randn(4, dtype=D)
    output = row.expand(n, 4).clone().requires_grad_()
    target = torch.zeros(n, dtype=torch.long)
    if not isinstance(loss, CrossEntropy):
        target = torch.rand(4, dtype=D).expand(n, 4)
    total = loss.sampled(output, target, form, new_generator(0))
    (g,) = torch.autograd.grad(total, output)
    products = g.unsqueeze(-1) * g.unsqueeze(-2)
    p, s = row.softmax(0), row.sigmoid()
    expected = torch.eye(4, dtype=D)
    if form == "hessian":
        expected = {
            "bce": torch.diag(s * (1 - s)),
            "mse": 2 * torch.eye(4, dtype=D),
        }.get(name, torch.diag(p) - torch.outer(p, p))
    error = 4 * products.std(0) / n**0.5 + 1e-12
    assert bool(((products.mean(0) - expected).abs() <= error).all())


@pytest.mark.parametrize("form", ["hessian", "identity"])
def test_ignored_rows_are_not_sampled(form):
    output = torch.randn(3, 4, dtype=D, requires_grad=True)
    target = torch.tensor([0, -100, 2])
    total = CrossEntropy().sampled(output, target, form, None)
    (g,) = torch.autograd.grad(total, output)
    assert g[1].count_nonzero() == 0
    assert g[0].count_nonzero() == 4


def test_cross_entropy_is_zero_if_every_target_is_ignored():
    loss, output = CrossEntropy(), torch.randn(3, 4, dtype=D, requires_grad=True)
    target = torch.full((3,), -100)
    found = loss.derivatives(output, torch.randn(3, 4, dtype=D), target)
    assert [part.item() for part in found] == [0.0, 0.0, 0.0]
    assert loss.value(output, target).item() == 0.0


def test_curvature_of_cross_entropy_is_never_negative():
    u = torch.full((2, 5), 1e4) + torch.randn(2, 5)  # a large mean that the variance must not see
    found = CrossEntropy().derivatives(torch.randn(2, 5), u, torch.tensor([1, 2]))
    assert 0.0 <= found.quadratic < 10.0


def test_a_loss_that_is_linear_has_no_curvature():
    loss = Generic(lambda f, y: (f * y).sum(-1).mean())
    f, u = torch.randn(2, 3, 4, dtype=D).requires_grad_()
    found = loss.derivatives(f, u, torch.rand(3, 4, dtype=D))
    assert found.quadratic.item() == 0.0


def test_the_error_for_an_unknown_form_lists_the_forms():
    with pytest.raises(
        OptionError, match=r"no quadratic form 'fisher': use hessian, identity, loss"
    ):
        CrossEntropy().derivatives(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), "fisher")


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_label_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(
        OptionError, match=rf"label_smoothing must lie in \[0, 1\), got {smoothing}"
    ):
        CrossEntropy(label_smoothing=smoothing)


@pytest.mark.parametrize("make", [lambda w: LinearCrossEntropy(w, ignore_index=1), linear_head])
def test_a_sampled_label_may_equal_ignore_index(make):
    """E[g gᵀ] of the features is Wᵀ(diag p - ppᵀ)W, whatever value marks the ignored targets."""
    n = 20_000
    torch.manual_seed(0)
    w, f = torch.randn(4, 3, dtype=D), torch.randn(3, dtype=D)
    output = f.expand(n, 3).clone().requires_grad_()
    total = make(w).sampled(output, torch.zeros(n).long(), "hessian", torch.Generator(DEVICE))
    (g,) = torch.autograd.grad(total, output)
    products = g.unsqueeze(-1) * g.unsqueeze(-2)
    p = (w @ f).softmax(0)
    expected = w.T @ (torch.diag(p) - torch.outer(p, p)) @ w
    assert bool(((products.mean(0) - expected).abs() <= 4 * products.std(0) / n**0.5).all())


@pytest.mark.portable
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_counted_and_summed_in_float32(name):
    """In bfloat16, 1,001 is rounded to 1,000, and sums over 1,001 terms are off by percents."""
    loss = LOSSES[name]()
    output, u = torch.randn(2, 1001, 7).bfloat16()
    cross_entropy = isinstance(loss, CrossEntropy)
    target = torch.randint(2, 7, (1001,)) if cross_entropy else torch.rand(1001, 7)
    assert int(loss.count(output, target)) in (1001, 7007)
    if name == "generic":
        return  # the function is the user's
    expected = loss.derivatives(output.float(), u.float(), target)
    for found, wanted in zip(loss.derivatives(output, u, target), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.value(output, target), expected.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_the_derivatives_do_not_depend_on_the_class_dimension(form):
    torch.manual_seed(0)
    output, u = torch.randn(2, 2, 3, 5, 4, dtype=D)
    target = torch.randint(4, (2, 3, 5))
    last, second = CrossEntropy(label_smoothing=0.1), CrossEntropy(label_smoothing=0.1, class_dim=1)
    moved = [x.movedim(-1, 1) for x in (output, u)]
    second.check(moved[0], target)
    torch.testing.assert_close(
        second.derivatives(*moved, target, form), last.derivatives(output, u, target, form)
    )
    weights = (1.0, 0.5, 2.0)
    total = last.combined(output, u, target, form, weights)[0]
    torch.testing.assert_close(second.combined(*moved, target, form, weights)[0], total)
    probes = [
        loss.sampled(x, target, form, new_generator(1))
        for loss, x in ((last, output), (second, moved[0]))
    ]
    if form != "identity":  # its probe is drawn in the order of the output
        torch.testing.assert_close(*probes)
