"""If only the last examples have u: the same result as with u padded by zeros, for less work."""

import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loss_problems import LOSSES, leaf, problem
from undrop.losses import (
    FORMS,
    Coefficients,
    CrossEntropy,
    LinearCrossEntropy,
    as_loss,
)
from undrop.losses.base import pad_tangent

C = Coefficients(0.7, 1.3, -0.4)
D = torch.float64


@pytest.mark.parametrize("carrying", [1, 2, 5])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_u_of_the_last_examples_is_u_padded_with_zeros(name, form, dim, carrying):
    loss, output, u, target = problem(name, dim % 3, carrying)
    found = loss.combined(output, u, target, form, C, dim=dim)
    wanted = loss.combined(output, pad_tangent(u, output, dim), target, form, C)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(tuple(found[1]), tuple(wanted[1]), rtol=1e-12, atol=1e-14)
    inputs = [output, u, *loss.parameters()]
    gradients = [
        torch.autograd.grad(2.5 * total, inputs, materialize_grads=True, allow_unused=True)
        for total in (found[0], wanted[0])
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_covers_the_whole_output_if_u_is_for_a_part_of_the_batch(name):
    loss, output, u, target = problem(name, 0, 2)
    _, parts = loss.combined(output, u, target, "hessian", C)
    torch.testing.assert_close(parts.loss, loss.value(output, target).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["cross-entropy smoothed", "linear smoothed", "adaptive"])
def test_the_derivatives_along_u_of_the_last_examples_pass_gradcheck(name):
    loss, output, u, target = problem(name, 1, 2)
    assert torch.autograd.gradcheck(
        lambda f, t: tuple(loss.derivatives(f, t, target, dim=1)), (output, u)
    )


def test_u_of_the_last_examples_works_with_the_batch_after_the_class_dimension():
    """Output (T, classes, B) and target (T, B): the batch is in dimension 2 of the output."""
    torch.manual_seed(0)
    output, u, target = leaf(3, 7, 5), leaf(3, 7, 2), torch.randint(7, (3, 5))
    loss = CrossEntropy(class_dim=1)
    found = loss.combined(output, u, target, coefficients=C, dim=2)
    wanted = loss.combined(output, pad_tangent(u, output, 2), target, coefficients=C)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dim", [0, 1])
def test_linear_cross_entropy_has_extra_matrix_products_only_for_rows_with_u(dim):
    """The loss alone takes 3 products over all rows; u for a quarter of the rows adds a quarter."""
    torch.manual_seed(0)
    weight = torch.randn(50, 8).requires_grad_()
    output, target = torch.randn(8, 8, 8).requires_grad_(), torch.randint(50, (8, 8))
    u = output.detach().narrow(dim, 0, 2).clone().requires_grad_()
    loss = LinearCrossEntropy(weight, chunk=16)

    def products(call):
        with FlopCounterMode(display=False) as counter:
            call().backward()
        return counter.get_total_flops()

    alone = products(lambda: loss.value(output, target))
    assert products(lambda: loss.combined(output, u, target, dim=dim)[0]) == 1.25 * alone


@pytest.mark.slow
def test_linear_cross_entropy_takes_extra_time_only_for_rows_with_u():
    """The ratio of median processor times, measured in turns, is about 1.25, well below 2."""
    torch.manual_seed(0)
    weight = torch.randn(5000, 200).mul_(0.05).requires_grad_()
    output, target = torch.randn(700, 200).requires_grad_(), torch.randint(5000, (700,))
    u = torch.randn(175, 200).requires_grad_()
    loss = LinearCrossEntropy(weight)
    calls = (
        lambda: loss.value(output, target),
        lambda: loss.combined(output, u, target)[0],
    )
    times = [[], []]
    for _ in range(15):
        for call, taken in zip(calls, times, strict=True):
            start = time.process_time()
            call().backward()
            taken.append(time.process_time() - start)
    alone, part = (sorted(taken)[7] for taken in times)
    assert part < 1.6 * alone


@pytest.mark.parametrize(
    "theirs",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=D)),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=D)),
        nn.NLLLoss(reduction="sum"),
        nn.MSELoss(reduction="sum"),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=D)),
    ],
    ids=str,
)
@pytest.mark.parametrize("carrying", [2, 6])
def test_weighted_and_summed_losses_keep_torchs_value(theirs, carrying):
    torch.manual_seed(0)
    output, u = leaf(6, 4), leaf(carrying, 4)
    dense = isinstance(theirs, nn.MSELoss | nn.BCEWithLogitsLoss)
    target = torch.rand(6, 4, dtype=D) if dense else torch.randint(4, (6,))
    ours = as_loss(theirs)
    want = theirs(output, target)
    assert torch.equal(ours.value(output, target), want)
    total, parts = ours.combined(output, u, target)
    assert torch.equal(parts.loss, want.detach())
    along = torch.autograd.functional.jvp(
        lambda f: theirs(f, target), output, pad_tangent(u, output, 0)
    )
    torch.testing.assert_close(parts.directional, along[1])
    assert torch.isfinite(torch.autograd.grad(total, output)[0]).all()
