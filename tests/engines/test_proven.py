"""Reverse over forward, op by op, against finite differences: what the tangent engine may trust."""

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F

from device import new_generator
from undrop.engines.proven import CONSTANT, PROVEN, TangentTrace

D = torch.float64


def w(*shape, seed=1):
    return torch.randn(shape, dtype=D, generator=new_generator(seed))


IDX = torch.tensor([2, 0, 1])
BOOL = torch.tensor(
    [[True, False, True, True], [False, True, True, False], [True, True, False, True]]
)

# name: (function of x, shape of x)
CASES = {
    "view": (lambda x: x.view(4, 3) * 2, (3, 4)),
    "unsafe_view": (lambda x: x @ w(2, 4, 3), (2, 3, 4)),
    "reshape": (lambda x: x.t().reshape(2, 6), (3, 4)),
    "reshape_alias": (lambda x: x.unsqueeze(0).expand(2, 3, 4)[:, :2].reshape(2, 8), (3, 4)),
    "expand": (lambda x: x.expand(2, 3, 4).square(), (3, 4)),
    "permute": (lambda x: x.permute(2, 0, 1).sin(), (2, 3, 4)),
    "transpose": (lambda x: x.transpose(0, 1).sin(), (3, 4)),
    "t": (lambda x: x.t().sin(), (3, 4)),
    "unsqueeze": (lambda x: x.unsqueeze(1).sin().squeeze(1), (3, 4)),
    "select": (lambda x: x[1].sin() * x[0], (3, 4)),
    "slice": (lambda x: x[1:, ::2].sin(), (3, 4)),
    "split": (lambda x: x.split(2, 1)[0] * x.split(2, 1)[1], (3, 4)),
    "split_with_sizes": (lambda x: x.split([1, 2], 1)[1] * x[:, :1], (3, 3)),
    "unbind": (lambda x: x.unbind(0)[0] * x.unbind(0)[1], (2, 4)),
    "chunk": (lambda x: x.chunk(2, -1)[0].tanh() * x.chunk(2, -1)[1], (3, 4)),
    "alias": (lambda x: torch.ops.aten.alias(x).sin(), (3, 4)),
    "clone": (lambda x: x.clone().sin(), (3, 4)),
    "to_copy": (lambda x: x.to(torch.float64, copy=True).sin(), (3, 4)),
    "copy_": (lambda x: torch.zeros(3, 4, dtype=D).copy_(x).sin(), (3, 4)),
    "cat": (lambda x: torch.cat((x, x.square()), 1), (3, 4)),
    "stack": (lambda x: torch.stack((x, x.square())), (3, 4)),
    "repeat": (lambda x: x.repeat(2, 1).square(), (3, 4)),
    "flip": (lambda x: x.flip(0) * x, (3, 4)),
    "roll": (lambda x: x.roll(1, 0) * x, (3, 4)),
    "pad": (lambda x: F.pad(x, (1, 2)).sin(), (3, 4)),
    "index": (lambda x: x[IDX].square(), (3, 4)),
    "index_select": (lambda x: x.index_select(0, IDX).square(), (3, 4)),
    "gather": (lambda x: x.gather(1, IDX[:, None]).square(), (3, 4)),
    "masked_fill": (lambda x: x.masked_fill(BOOL, 0.5).square(), (3, 4)),
    "where": (lambda x: torch.where(BOOL, x, x.square()), (3, 4)),
    "tril": (lambda x: x.tril().square(), (3, 4)),
    "triu": (lambda x: x.triu().square(), (3, 4)),
    "diagonal": (lambda x: x.diagonal().square(), (4, 4)),
    "unfold": (lambda x: x.unfold(0, 2, 1).square(), (5, 2)),
    "add": (lambda x: (x + 1) + x * x, (3, 4)),
    "sub": (lambda x: x - x * x, (3, 4)),
    "rsub": (lambda x: torch.rsub(x, 1.0).square(), (3, 4)),
    "mul": (lambda x: x * x * w(4), (3, 4)),
    "div": (lambda x: x / (2 + x * x), (3, 4)),
    "neg": (lambda x: -x * x, (3, 4)),
    "pow": (lambda x: x.pow(3) + x**2, (3, 4)),
    "square": (lambda x: x.square(), (3, 4)),
    "reciprocal": (lambda x: (2 + x * x).reciprocal(), (3, 4)),
    "sqrt": (lambda x: (1 + x * x).sqrt(), (3, 4)),
    "rsqrt": (lambda x: (1 + x * x).rsqrt(), (3, 4)),
    "exp": (lambda x: x.exp(), (3, 4)),
    "log": (lambda x: (1 + x * x).log(), (3, 4)),
    "log1p": (lambda x: (x * x).log1p(), (3, 4)),
    "expm1": (lambda x: x.expm1(), (3, 4)),
    "abs": (lambda x: x.abs() * x, (3, 4)),
    "sin": (lambda x: x.sin(), (3, 4)),
    "cos": (lambda x: x.cos(), (3, 4)),
    "maximum": (lambda x: torch.maximum(x * x, x), (3, 4)),
    "minimum": (lambda x: torch.minimum(x * x, x), (3, 4)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) * x, (3, 4)),
    "clamp_min": (lambda x: x.clamp_min(0.1) * x, (3, 4)),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.3), (3, 4)),
    "lerp": (lambda x: torch.lerp(x, x * x, 0.3), (3, 4)),
    "add_": (lambda x: (x * 1).add_(x * x), (3, 4)),
    "mul_": (lambda x: (x * 1).mul_(w(3, 4)).square(), (3, 4)),
    "sub_": (lambda x: (x * 1).sub_(x * x), (3, 4)),
    "div_": (lambda x: (x * 1).div_(2.0).square(), (3, 4)),
    "relu": (lambda x: x.relu() * x, (3, 4)),
    "relu_": (lambda x: (x * 1).relu_().square(), (3, 4)),
    "gelu": (lambda x: F.gelu(x), (3, 4)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (3, 4)),
    "silu": (lambda x: F.silu(x), (3, 4)),
    "tanh": (lambda x: x.tanh(), (3, 4)),
    "sigmoid": (lambda x: x.sigmoid(), (3, 4)),
    "softplus": (lambda x: F.softplus(x), (3, 4)),
    "leaky_relu": (lambda x: F.leaky_relu(x) * x, (3, 4)),
    "elu": (lambda x: F.elu(x), (3, 4)),
    "hardtanh": (lambda x: F.hardtanh(x) * x, (3, 4)),
    "hardswish": (lambda x: F.hardswish(x), (3, 4)),
    "mish": (lambda x: F.mish(x), (3, 4)),
    "log_sigmoid": (lambda x: F.logsigmoid(x), (3, 4)),
    "mm": (lambda x: (x @ w(4, 5)).square(), (3, 4)),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), (2, 3, 4)),
    "addmm": (lambda x: torch.addmm(w(5), x, w(4, 5)).square(), (3, 4)),
    "linear": (lambda x: F.linear(x, w(5, 4), w(5)).square(), (2, 3, 4)),
    "linear_weight": (lambda x: F.linear(w(3, 4), x, w(5)).square(), (5, 4)),
    "baddbmm": (lambda x: torch.baddbmm(w(2, 3, 3), x, x.transpose(1, 2)), (2, 3, 4)),
    "dot": (lambda x: torch.dot(x, x * x), (4,)),
    "mv": (lambda x: torch.mv(x, w(4)).square(), (3, 4)),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), (2, 3, 4)),
    "conv1d": (lambda x: F.conv1d(x, w(3, 2, 3), w(3)).square(), (2, 2, 6)),
    "conv2d": (lambda x: F.conv2d(x, w(3, 2, 3, 3), w(3), padding=1).square(), (2, 2, 5, 5)),
    "conv_weight": (lambda x: F.conv2d(w(2, 2, 5, 5), x).square(), (3, 2, 3, 3)),
    "conv_transpose": (lambda x: F.conv_transpose2d(x, w(2, 3, 3, 3)).square(), (1, 2, 4, 4)),
    "embedding": (lambda x: F.embedding(IDX, x).square(), (3, 4)),
    "sum": (lambda x: x.square().sum(0) * x.sum(), (3, 4)),
    "mean": (lambda x: x.square().mean(0) * x.mean(), (3, 4)),
    "var": (lambda x: x.var(1), (3, 4)),
    "amax": (lambda x: x.square().amax(1), (3, 4)),
    "amin": (lambda x: x.square().amin(1), (3, 4)),
    "cumsum": (lambda x: x.square().cumsum(1), (3, 4)),
    "prod": (lambda x: x.prod(1), (3, 4)),
    "sort": (lambda x: x.square().sort(1).values, (3, 4)),
    "topk": (lambda x: x.square().topk(2, 1).values, (3, 4)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), (3, 4)),
    "max_pool": (lambda x: F.max_pool2d(x.square(), 2), (1, 2, 4, 4)),
    "avg_pool": (lambda x: F.avg_pool2d(x.square(), 2), (1, 2, 4, 4)),
    "adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x.square(), 2), (1, 2, 4, 4)),
    "nearest": (lambda x: F.interpolate(x.square(), scale_factor=2), (1, 2, 3, 3)),
    "bilinear": (
        lambda x: F.interpolate(x.square(), scale_factor=2, mode="bilinear"),
        (1, 2, 3, 3),
    ),
    "group_norm": (lambda x: F.group_norm(x, 2, w(4), w(4)), (2, 4, 5)),
    "max": (lambda x: x.square().max(1).values, (3, 4)),
    "min": (lambda x: x.square().min(1).values, (3, 4)),
    "max_all": (lambda x: x.square().max() * x, (3, 4)),
    "std": (lambda x: x.std(1), (3, 4)),
    "var_mean": (lambda x: torch.var_mean(x, 1)[0] * torch.var_mean(x, 1)[1], (3, 4)),
    "erf": (lambda x: x.erf(), (3, 4)),
    "tan": (lambda x: (x * 0.3).tan(), (3, 4)),
    "atan": (lambda x: x.atan(), (3, 4)),
    "sinh": (lambda x: x.sinh(), (3, 4)),
    "cosh": (lambda x: x.cosh(), (3, 4)),
    "log2": (lambda x: (1 + x * x).log2(), (3, 4)),
    "exp2": (lambda x: x.exp2(), (3, 4)),
    "logaddexp": (lambda x: torch.logaddexp(x, x * x), (3, 4)),
    "atan2": (lambda x: torch.atan2(x, 1 + x * x), (3, 4)),
    "addcdiv": (lambda x: torch.addcdiv(x, x, 1 + x * x), (3, 4)),
    "cumprod": (lambda x: x.cumprod(1), (3, 4)),
    "scatter": (
        lambda x: torch.zeros_like(x).scatter(
            1, torch.tensor([[0, 1], [2, 3], [1, 2]]), x[:, :2].square()
        ),
        (3, 4),
    ),
    "scatter_add": (
        lambda x: torch.zeros_like(x).scatter_add(
            1, torch.tensor([[0, 0], [2, 3], [1, 1]]), x[:, :2].square()
        ),
        (3, 4),
    ),
    "index_add": (
        lambda x: torch.zeros_like(x).index_add(0, torch.tensor([0, 0, 2]), x.square()),
        (3, 4),
    ),
    "index_put": (
        lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 2, 1]),), x.square()),
        (3, 4),
    ),
    "index_put_": (
        lambda x: torch.zeros_like(x).index_put_((torch.tensor([0, 2, 1]),), x.square()),
        (3, 4),
    ),
    "masked_fill_": (lambda x: (x * x).masked_fill_(BOOL, 0.5) * x, (3, 4)),
    "masked_scatter": (lambda x: torch.zeros_like(x).masked_scatter(BOOL, x.square()), (3, 4)),
    "clamp_": (lambda x: (x * 1).clamp_(-0.5, 0.5) * x, (3, 4)),
    "clamp_max": (lambda x: x.clamp_max(0.1) * x, (3, 4)),
    "tanh_": (lambda x: (x * 1).tanh_(), (3, 4)),
    "sigmoid_": (lambda x: (x * 1).sigmoid_(), (3, 4)),
    "exp_": (lambda x: (x * 1).exp_(), (3, 4)),
    "leaky_relu_": (lambda x: F.leaky_relu(x * 1, inplace=True) * x, (3, 4)),
    "elu_": (lambda x: F.elu(x * 1, inplace=True), (3, 4)),
    "hardtanh_": (lambda x: F.hardtanh(x * 1, inplace=True) * x, (3, 4)),
    "hardswish_": (lambda x: F.hardswish(x * 1, inplace=True), (3, 4)),
    "silu_": (lambda x: F.silu(x * 1, inplace=True), (3, 4)),
    "mish_": (lambda x: F.mish(x * 1, inplace=True), (3, 4)),
    "prelu": (lambda x: F.prelu(x, w(1).abs()) * x, (3, 4)),
    "prelu_w": (lambda x: F.prelu(w(3, 4), x[0, :1]) * x, (3, 4)),
    "celu": (lambda x: F.celu(x), (3, 4)),
    "softshrink": (lambda x: F.softshrink(x, 0.2) * x, (3, 4)),
    "hardshrink": (lambda x: F.hardshrink(x, 0.2) * x, (3, 4)),
    "threshold": (lambda x: F.threshold(x, 0.1, 0.0) * x, (3, 4)),
    "logit": (lambda x: torch.logit(x.sigmoid() * 0.9 + 0.05), (3, 4)),
    "addmv": (lambda x: torch.addmv(w(3), x, w(4)).square(), (3, 4)),
    "addbmm": (lambda x: torch.addbmm(w(3, 3), x, x.transpose(1, 2)), (2, 3, 4)),
    "adaptive_max2d": (lambda x: F.adaptive_max_pool2d(x.square(), 2), (1, 2, 4, 4)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.square(), 2), (1, 1, 2, 2, 4)),
    "max_pool3d": (lambda x: F.max_pool3d(x.square(), 2), (1, 1, 2, 2, 4)),
    "adaptive_avg3d": (lambda x: F.adaptive_avg_pool3d(x.square(), 2), (1, 1, 4, 4, 4)),
    "nearest1d": (lambda x: F.interpolate(x.square(), scale_factor=2), (1, 2, 3)),
    "nearest3d": (lambda x: F.interpolate(x.square(), scale_factor=2), (1, 1, 2, 2, 2)),
    "linear1d": (lambda x: F.interpolate(x.square(), scale_factor=2, mode="linear"), (1, 2, 3)),
    "trilinear": (
        lambda x: F.interpolate(x.square(), scale_factor=2, mode="trilinear"),
        (1, 1, 2, 2, 2),
    ),
    "bicubic": (lambda x: F.interpolate(x.square(), scale_factor=2, mode="bicubic"), (1, 1, 3, 3)),
    "reflect1": (lambda x: F.pad(x.square(), (1, 1), mode="reflect"), (1, 2, 4)),
    "reflect2": (lambda x: F.pad(x.square(), (1, 1, 1, 1), mode="reflect"), (1, 1, 3, 3)),
    "replicate1": (lambda x: F.pad(x.square(), (1, 1), mode="replicate"), (1, 2, 4)),
    "replicate2": (lambda x: F.pad(x.square(), (1, 1, 1, 1), mode="replicate"), (1, 1, 3, 3)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x.square(), 2), (1, 4, 2, 2)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x.square(), 2), (1, 1, 4, 4)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x.square(), 2), (1, 4, 2, 2)),
    "im2col": (lambda x: F.unfold(x.square(), 2), (1, 1, 3, 3)),
    "col2im": (lambda x: F.fold(x.square(), (3, 3), 2), (1, 4, 4)),
    "rms_norm": (lambda x: F.rms_norm(x, (4,), w(4)), (3, 4)),
    "cosine": (lambda x: F.cosine_similarity(x, x * x), (3, 4)),
    "nan_to_num": (lambda x: torch.nan_to_num(x.square()), (3, 4)),
    "hypot": (lambda x: torch.hypot(x, 1 + x * x), (3, 4)),
    "copysign": (lambda x: torch.copysign(x.square(), w(3, 4)), (3, 4)),
    "sgn": (lambda x: x.sgn() * x.square(), (3, 4)),
    "floor": (lambda x: x.floor() * x.square(), (3, 4)),
    "round": (lambda x: x.round() * x.square(), (3, 4)),
    "fmod": (lambda x: torch.fmod(x, 0.7) * x, (3, 4)),
    "remainder": (lambda x: torch.remainder(x, 0.7) * x, (3, 4)),
    "median": (lambda x: x.square().median(1).values, (3, 4)),
    "bilinear_form": (lambda x: F.bilinear(x, x, w(2, 4, 4)), (3, 4)),
    "trace": (lambda x: (x @ x.T).trace(), (3, 4)),
    "neg_": (lambda x: (x * 1).neg_().square(), (3, 4)),
    "sqrt_": (lambda x: (1 + x * x).sqrt_(), (3, 4)),
    "pow_": (lambda x: (1 + x * x).pow_(1.5), (3, 4)),
    "addcmul_": (lambda x: (x * 1).addcmul_(x, x), (3, 4)),
    "fill_zero_": (lambda x: torch.cat(((x * x).zero_(), x * x)), (3, 4)),
    "index_put_add": (
        lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 2, 0]),), x.square(), True),
        (3, 4),
    ),
}
CONSTANTS = {
    "zeros_like": lambda x: torch.zeros_like(x) + x.square(),
    "ones_like": lambda x: torch.ones_like(x) * x.square(),
    "empty_like": lambda x: torch.empty_like(x).fill_(0.5) * x.square(),
    "full_like": lambda x: torch.full_like(x, 0.5) * x.square(),
    "new_zeros": lambda x: x.new_zeros(3, 4) + x.square(),
    "new_ones": lambda x: x.new_ones(3, 4) * x.square(),
    "new_empty": lambda x: x.new_empty(3, 4).fill_(0.5) * x.square(),
    "new_full": lambda x: x.new_full((3, 4), 0.5) * x.square(),
    "new_empty_strided": lambda x: x.new_empty_strided((3, 4), (4, 1)).fill_(0.5) * x.square(),
}
WRONG = {
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), (3, 4)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (5, 3)),
}


def ops_of(function, x):
    """The aten ops that a function's input goes through."""
    tainted = TangentTrace()
    with torch.no_grad(), tainted:
        x = x.clone()
        tainted.mark(x)
        function(x)
    return tainted.ops


def reverse_over_forward_error(function, shape):
    """The largest relative error of d/dx [⟨a, f(x)⟩ + ⟨b, Df(x)·v⟩] against central differences."""
    x, v = w(*shape, seed=2) * 0.7, w(*shape, seed=3)

    def scalar(x):
        with forward.dual_level():
            out, tangent = forward.unpack_dual(function(forward.make_dual(x, v)))
            return (out * w(*out.shape, seed=4)).sum() + (tangent * w(*out.shape, seed=5)).sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scalar(leaf), leaf)
    step = 1e-6
    numeric = torch.zeros_like(x)
    for i in range(x.numel()):
        e = torch.zeros_like(x)
        e.view(-1)[i] = step
        numeric.view(-1)[i] = (scalar(x + e) - scalar(x - e)).detach() / (2 * step)
    return float((gradient - numeric).abs().max() / numeric.abs().max().clamp(min=1))


@pytest.mark.parametrize("name", CASES)
def test_reverse_over_forward_of_a_proven_op_equals_finite_differences(name):
    function, shape = CASES[name]
    assert reverse_over_forward_error(function, shape) < 1e-7


def test_every_proven_op_has_a_case():
    seen = {op for f, shape in CASES.values() for op in ops_of(f, w(*shape))}
    assert PROVEN - seen == set()


@pytest.mark.parametrize("name", sorted(CONSTANT))
def test_the_tangent_ends_where_only_the_shape_matters(name):
    assert reverse_over_forward_error(CONSTANTS[name], (3, 4)) < 1e-7


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ops_are_still_wrong_and_not_trusted(name):
    """If torch corrects them, undrop can remove its own rules for them."""
    function, shape = WRONG[name]
    assert reverse_over_forward_error(function, shape) > 1e-3
    assert not set(ops_of(function, w(*shape))) <= PROVEN
