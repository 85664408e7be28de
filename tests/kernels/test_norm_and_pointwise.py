"""Layer norm and activations with their tangents, against plain autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from undrop.kernels.layer_norm import layer_norm
from undrop.kernels.pointwise import GELU, GELU_TANH, SILU, pointwise

ACTIVATIONS = {"gelu": GELU, "gelu_tanh": GELU_TANH, "silu": SILU}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_gradients(affine):
    x, dx = randn(2, 3, 5), randn(2, 3, 5)
    w, b = (randn(5), randn(5)) if affine else (None, None)
    inputs = [t for t in (x, dx, w, b) if t is not None]
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t), inputs)


def test_layer_norm_tangent_is_the_derivative():
    x, dx, w, b = (t.detach() for t in (randn(4, 6), randn(4, 6), randn(6), randn(6)))
    truth = torch.func.jvp(lambda x: F.layer_norm(x, (6,), w, b), (x,), (dx,))
    for mine, theirs in zip(layer_norm(x, dx, w, b), truth, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_gradients_and_tangents(name):
    activation = ACTIVATIONS[name]
    x, dx = randn(3, 7), randn(3, 7)
    assert torch.autograd.gradcheck(lambda x, dx: pointwise(activation, x, dx), (x, dx))
    x, dx = x.detach() * 3, dx.detach()
    truth = torch.func.jvp(activation.f, (x,), (dx,))
    for mine, theirs in zip(pointwise(activation, x, dx), truth, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
