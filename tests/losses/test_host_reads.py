"""A training step must not wait for its device: no loss reads a value or copies one to it."""

import pytest
import torch
from torch import nn

from dispatch import HostReads
from loss_problems import LOSSES, problem
from undrop.losses import FORMS, as_loss

TORCH_LOSSES = {
    "weighted": nn.CrossEntropyLoss(weight=torch.rand(7, dtype=torch.float64)),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "smooth l1": nn.SmoothL1Loss(),
    "l1": nn.L1Loss(),
}


def reads(call):
    """Return the host reads of a second call: a loss may look at its first batch for a warning."""
    call()
    with HostReads() as mode:
        call()
    return mode.found


def backward(scalar, inputs):
    torch.autograd.grad(3.0 * scalar, inputs, allow_unused=True)


@pytest.mark.parametrize("carrying", [2, 5])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "adaptive"])
def test_no_loss_waits_for_its_device(name, form, carrying):
    loss, output, u, target = problem(name, 1, carrying)
    inputs = [output, u, *loss.parameters()]

    def step():
        loss.check(output, target)
        loss.count(output, target)
        backward(loss.value(output, target), inputs)
        backward(loss.combined(output, u, target, form, dim=1)[0], inputs)
        backward(sum(loss.derivatives(output, u, target, form, dim=1)), inputs)

    assert reads(step) == []


@pytest.mark.parametrize("name", TORCH_LOSSES)
def test_a_torch_loss_does_not_wait_for_its_device(name):
    loss = as_loss(TORCH_LOSSES[name])
    output, u = torch.randn(2, 5, 7, dtype=torch.float64).requires_grad_().unbind()
    dense = name in ("smooth l1", "l1")
    target = torch.rand(5, 7, dtype=torch.float64) if dense else torch.randint(7, (5,))
    assert reads(lambda: backward(loss.combined(output, u, target)[0], [output, u])) == []


def test_the_adaptive_softmax_only_reads_how_many_rows_a_tail_has():
    loss, output, u, target = problem("adaptive", 0, 2)
    inputs = [output, u, *loss.parameters()]
    found = reads(lambda: backward(loss.combined(output, u, target)[0], inputs))
    assert set(found) == {"nonzero"}


def test_the_check_of_values_reads_from_the_device():
    loss, output, _, target = problem("cross-entropy", 0, 2)
    assert "_local_scalar_dense" in reads(lambda: loss.check_values(output, target))
