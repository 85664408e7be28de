"""A loss that computes its own gradient, so that a stacked output is one node of the graph."""

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.engines.antithetic import _WithGradient
from undrop.engines.layout import Layout, Rows
from undrop.losses import Coefficients, CrossEntropy, Derivatives


@pytest.mark.parametrize("noisy", [6, 2])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("form", ["hessian", "identity"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5)])
def test_the_gradients_computed_with_the_loss_equal_those_of_autograd(noisy, ignored, form, shape):
    torch.manual_seed(0)
    f = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    u = torch.randn((noisy, *shape[1:]), dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, shape[:-1])
    if ignored:
        y[-1] = -100
    c = Coefficients(0.5, 0.7, 1.3)
    loss = CrossEntropy()
    found = loss.total_and_gradients(f.detach(), u.detach(), y, form, c)
    parts = loss.derivatives(f, u, y, form)
    total = c.total(torch.stack(parts))
    want = torch.autograd.grad(total, (f, u))
    torch.testing.assert_close(found.total, total.detach())
    torch.testing.assert_close(torch.stack(list(found.means)), torch.stack(parts).detach())
    torch.testing.assert_close((found.output_gradient, found.u_gradient), want)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.of(4, 1.0, False, False),
        Layout.of(5, 0.4, False, False),
        Layout.of(5, 0.4, True, False),
        Layout.of(5, 0.4, False, True),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_stacked_rows_equals_that_of_autograd(layout, dim):
    torch.manual_seed(0)
    shape = [3, 3]
    shape[dim] = layout.total
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    rows = Rows.draw(layout, new_generator(0))
    f, u = rows.output_and_tangent(x, dim, 7.0)
    in_f, in_u = torch.randn_like(f), torch.randn_like(u)
    (want,) = torch.autograd.grad((f * in_f).sum() + (u * in_u).sum(), x)
    torch.testing.assert_close(rows.stacked_gradient(x.detach(), in_f, in_u, dim, 7.0), want)


def test_a_scaled_gradient_in_half_precision_does_not_underflow():
    """A gradient scaler multiplies the total by a large number before any gradient is rounded."""
    x = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    tiny = torch.full((1, 3), 1e-9)
    gradient = Rows(Layout.of(1, 1.0, False, False), None).stacked_gradient(
        x.detach(), 2.0 * tiny, 0.0 * tiny, 0, 1.0
    )
    (_WithGradient.apply(x, torch.zeros(()), gradient) * 2.0**20).backward()
    assert x.grad.dtype == torch.float16
    torch.testing.assert_close(
        x.grad.float(), torch.full((2, 3), 1e-9 * 2.0**20), rtol=1e-3, atol=0
    )


def test_a_subclass_of_cross_entropy_keeps_its_own_formulas():
    class Doubled(CrossEntropy):
        def _derivatives_of_part(self, output, u, target, form, dim):
            parts = CrossEntropy().derivatives(output, u, target)
            return Derivatives(*(2.0 * part for part in parts))

        def combined(self, output, u, target, form="hessian", coefficients=(1, 1, 1), *, dim=0):
            parts = self.derivatives(output, u, target, form, dim=dim)
            return sum(c * p for c, p in zip(coefficients, parts, strict=True)), parts

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    totals = []
    for loss in (CrossEntropy(), Doubled()):
        generator = new_generator(1)
        totals.append(undrop.Analytic(loss=loss, generator=generator)(model, x, y).total.detach())
    torch.testing.assert_close(totals[1], 2.0 * totals[0])
