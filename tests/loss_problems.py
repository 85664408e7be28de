"""Every loss with an output, u for a part of the batch, and a target, in float64."""

import torch

from undrop.losses import (
    MSE,
    AdaptiveSoftmax,
    BCEWithLogits,
    CrossEntropy,
    Generic,
    LinearCrossEntropy,
)

D = torch.float64


def leaf(*shape):
    return torch.randn(*shape, dtype=D).requires_grad_()


def softened(output, target):
    return (1 + (output - target).square().sum(-1)).log().mean()


def linear(**options):
    return LinearCrossEntropy(leaf(7, 4), leaf(7), chunk=3, **options)


def adaptive():
    tails = [(None, leaf(2, 4), None), (leaf(3, 4), leaf(4, 3), leaf(4))]
    return AdaptiveSoftmax(leaf(5, 4), leaf(5), tails=tails, cutoffs=[3, 5], chunk=3)


SMOOTHED = {"ignore_index": 2, "label_smoothing": 0.1}
LOSSES = {
    "cross-entropy": (CrossEntropy, 7),
    "cross-entropy smoothed": (lambda: CrossEntropy(**SMOOTHED), 7),
    "linear": (linear, 4),
    "linear smoothed": (lambda: linear(**SMOOTHED), 4),
    "adaptive": (adaptive, 4),
    "bce": (BCEWithLogits, 5),
    "mse": (MSE, 5),
    "generic": (lambda: Generic(softened), 5),
}


def problem(name, batch_dim, carrying, batch=5, time=3):
    """A loss, its output, u for the last ``carrying`` examples, and a target with ignored entries."""
    torch.manual_seed(0)
    make, width = LOSSES[name]
    loss = make()
    shape = (time, batch) if batch_dim else (batch, time)
    output = leaf(*shape, width)
    size = list(output.shape)
    size[batch_dim] = carrying
    if name in ("bce", "mse", "generic"):
        return loss, output, leaf(*size), torch.rand(*shape, width, dtype=D)
    target = torch.randint(7, shape)
    target.view(-1)[[1, 4, -1]] = getattr(loss, "ignore_index", -100)
    return loss, output, leaf(*size), target
