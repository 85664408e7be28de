"""Losses that are functions: piecewise linear, once differentiable, or of several heads."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from undrop.errors import OptionError, TargetError
from undrop.losses import Coefficients, Generic, as_loss
from undrop.losses.base import pad_tangent

D = torch.float64


def leaf(*shape, seed=0):
    generator = new_generator(seed)
    return torch.randn(shape, dtype=D, generator=generator).requires_grad_()


def hinge(f, y):
    return torch.relu(1 - (2 * y - 1) * f).mean()


def clamped_hinge(f, y):
    return (1 - (2 * y - 1) * f).clamp(min=0).mean()


def pinball(f, y):
    return torch.maximum(0.9 * (y - f), 0.1 * (f - y)).mean()


def ranking(f, y):
    return F.margin_ranking_loss(f[:, 0], f[:, 1], 2 * y[:, 0].round() - 1, margin=0.5)


def multi_margin(f, y):
    return F.multi_margin_loss(f, y[:, 0].mul(3).long())


PIECEWISE_LINEAR = [hinge, clamped_hinge, pinball, ranking, multi_margin, F.l1_loss]


@pytest.mark.parametrize("function", PIECEWISE_LINEAR, ids=lambda f: f.__name__)
def test_a_piecewise_linear_loss_has_no_curvature_on_any_batch(function, caplog):
    loss = Generic(function)
    for seed in range(30):
        f, u = leaf(6, 3, seed=seed), leaf(6, 3, seed=100 + seed)
        y = torch.rand(6, 3, dtype=D, generator=new_generator(seed))
        total, parts = loss.combined(f, u, y)
        assert parts.quadratic == 0.0
        (gradient,) = torch.autograd.grad(function(f, y), f)
        torch.testing.assert_close(parts.directional, (gradient * u).sum().detach())
        torch.testing.assert_close(
            torch.autograd.grad(total, (f, u)), (gradient, gradient), rtol=1e-12, atol=1e-15
        )
    (record,) = caplog.records
    assert f"the loss {function.__name__} is linear around the model's output" in record.message


@pytest.mark.parametrize("function", PIECEWISE_LINEAR, ids=lambda f: f.__name__)
def test_a_linear_loss_is_not_logged_without_an_explicit_part(function, caplog):
    f, u, y = leaf(6, 3), leaf(6, 3, seed=1), torch.rand(6, 3, dtype=D)
    total, parts = Generic(function).combined(f, u, y, "hessian", Coefficients(1.0, 0.0, 1.0))
    torch.testing.assert_close(total, parts.loss + parts.directional)
    assert caplog.records == []


@pytest.mark.parametrize("explicit", ["hessian", "identity", "loss-jacobian", None])
@pytest.mark.parametrize("function", PIECEWISE_LINEAR, ids=lambda f: f.__name__)
def test_training_on_a_piecewise_linear_loss_works_on_any_data(function, explicit):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    objective = undrop.Analytic(loss=function, explicit=explicit)
    for _ in range(20):
        optimizer.zero_grad()
        x, y = 3 * torch.randn(5, 4, dtype=D), torch.rand(5, 3, dtype=D)
        objective(net, x, y).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())


def ctc(f, y):
    log_p = f.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(f),), f.shape[1])
    return F.ctc_loss(log_p, y, lengths, torch.full((len(f),), y.shape[1]))


class Softplus(torch.autograd.Function):
    """log(1 + eˣ) with a backward pass that torch can't differentiate."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return g * torch.sigmoid(ctx.saved_tensors[0])


def graphless(f, y):
    return Softplus.apply(f).mean()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].exp()


def once(f, y):
    return Once.apply(f).mean()


def survival(f, y):
    """Cox's partial likelihood; torch's third derivative of logcumsumexp is NaN."""
    return (torch.logcumsumexp(f, 0) - f).mean()


@pytest.mark.parametrize("function", [ctc, graphless, once, survival], ids=lambda f: f.__name__)
def test_a_loss_without_three_derivatives_is_differentiated_by_differences(function, caplog):
    """The reference is a difference of gradients over a much shorter step, in float64."""
    caplog.set_level(logging.INFO)
    f, u, y = leaf(3, 7, 5), leaf(3, 7, 5, seed=1), torch.tensor([[1, 2], [3, 3], [4, 1]])
    loss = Generic(function)

    def gradient(s):
        at = (f + s * u).detach().requires_grad_()
        return torch.autograd.grad(function(at, y), at)[0]

    h = 1e-4
    quadratic = ((gradient(h) - gradient(-h)) / (2 * h) * u).sum()
    of_directional = (gradient(h) - gradient(-h)) / (2 * h)
    of_quadratic = (gradient(h) - 2 * gradient(0.0) + gradient(-h)) / h**2
    found = loss.derivatives(f, u, y)
    assert torch.equal(found.loss, function(f, y))
    torch.testing.assert_close(found.quadratic, quadratic, rtol=1e-3, atol=1e-6)
    directional = (gradient(0.0) * u).sum()
    torch.testing.assert_close(found.directional, directional, rtol=1e-3, atol=1e-6)
    grads = [torch.autograd.grad(part, f, retain_graph=True)[0] for part in found]
    for got, want in zip(grads, (gradient(0.0), of_quadratic, of_directional), strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm()
    assert len(caplog.records) == 1
    loss.derivatives(f, u, y)
    assert len(caplog.records) == 1
    assert "differences of its value" in caplog.records[0].message


class Varying(nn.Module):
    """A loss with a factor that changes from call to call: random, or kept in a buffer."""

    def __init__(self, function, random):
        super().__init__()
        self.function, self.random = function, random
        self.register_buffer("calls", torch.zeros((), dtype=D))

    def forward(self, f, y):
        self.calls += 1
        return self.function(f, y) * (1 + (torch.rand(()) if self.random else 1 / self.calls))


@pytest.mark.parametrize("engine", ["antithetic", "tangent", "exact"])
@pytest.mark.parametrize("random", [True, False], ids=["random", "buffer"])
@pytest.mark.parametrize("function", [once, graphless, F.mse_loss], ids=lambda f: f.__name__)
def test_all_parts_of_a_step_come_from_one_call_of_a_loss_that_varies(function, random, engine):
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)).double(), leaf(5, 4)
    y = torch.zeros(5, 3, dtype=D)
    varying = Varying(function, random)
    parts = []
    for loss in (function, varying):
        objective = undrop.Analytic(loss=loss, engine=engine, generator=new_generator(3))
        parts.append([objective(net, x, y).parts for _ in range(3)])
    for plain, found in zip(*parts, strict=True):
        factor = found["loss"] / plain["loss"]
        assert 1.0 < factor <= 2.0
        for name in ("explicit", "implicit"):
            assert found[name] == pytest.approx(factor * plain[name], rel=1e-6, abs=1e-12)
    assert int(varying.calls) == 3


def test_a_loss_that_differs_at_every_call_can_not_be_differentiated_by_differences():
    numbers = iter(range(10**6))

    def counted(f, y):
        return once(f, y) * (1 + next(numbers))

    with pytest.raises(
        OptionError, match="the loss counted must be differentiated by finite differences"
    ):
        Generic(counted).derivatives(leaf(2, 3), leaf(2, 3, seed=1), None)


@pytest.mark.parametrize("function", [ctc, once], ids=lambda f: f.__name__)
def test_differences_of_a_loss_in_float32_are_close_to_those_in_float64(function):
    f, u, y = leaf(3, 7, 5), leaf(3, 7, 5, seed=1), torch.tensor([[1, 2], [3, 3], [4, 1]])
    want = Generic(function).derivatives(f, u, y)
    got = Generic(function).derivatives(f.float(), u.float(), y)
    for a, b in zip(got, want, strict=True):
        assert abs(a.item() - b.item()) <= 0.02 * abs(b.item())


@pytest.mark.parametrize("engine", ["tangent", "antithetic", "exact"])
@pytest.mark.parametrize("explicit", ["hessian", None])
def test_ctc_can_be_trained_with_any_engine(engine, explicit):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 5)).double()
    objective = undrop.Analytic(loss=ctc, engine=engine, explicit=explicit)
    step = objective(net, torch.randn(2, 4, 2, dtype=D), torch.tensor([[1, 2], [3, 4]]))
    step.backward()
    assert step.parts.get("explicit", 1.0) != 0.0
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def two_heads(output, target):
    """A class and a number, from a dict."""
    classes, numbers = target
    return F.cross_entropy(output["class"], classes) + 2 * F.mse_loss(output["number"], numbers)


two_heads.whole_output = True


def test_a_loss_of_several_heads_has_the_derivatives_of_the_joined_output():
    a, b, ua, ub = leaf(4, 3), leaf(4, 2, seed=1), leaf(4, 3, seed=2), leaf(4, 2, seed=3)
    target = torch.tensor([0, 2, 1, 1]), torch.rand(4, 2, dtype=D)
    loss = as_loss(two_heads)
    assert loss.whole_output
    positions = torch.arange(4)  # integers have no tangent
    found = loss.derivatives(
        {"class": a, "number": b, "positions": positions},
        {"class": ua, "number": ub, "positions": None},
        target,
    )

    def joined(f, y):
        return two_heads({"class": f[:, :3], "number": f[:, 3:]}, y)

    wanted = Generic(joined, whole_output=False).derivatives(
        torch.cat((a, b), 1), torch.cat((ua, ub), 1), target
    )
    torch.testing.assert_close(tuple(found), tuple(wanted))
    inputs = (a, b, ua, ub)
    torch.testing.assert_close(
        torch.autograd.grad(sum(found), inputs), torch.autograd.grad(sum(wanted), inputs)
    )


def test_a_loss_of_several_heads_takes_u_for_a_part_of_the_batch():
    a, b, ua, ub = leaf(4, 3), leaf(4, 2, seed=1), leaf(1, 3, seed=2), leaf(1, 2, seed=3)
    target = torch.tensor([0, 2, 1, 1]), torch.rand(4, 2, dtype=D)
    loss = Generic(two_heads)
    output = {"class": a, "number": b}
    found = loss.combined(output, {"class": ua, "number": ub}, target)
    wanted = loss.combined(
        output, {"class": pad_tangent(ua, a, 0), "number": pad_tangent(ub, b, 0)}, target
    )
    torch.testing.assert_close(found, wanted)


def test_a_head_that_the_loss_does_not_use_does_not_change_the_derivatives():
    a, b = leaf(4, 3), leaf(4, 2, seed=1)
    target = torch.tensor([0, 2, 1, 1])
    loss = Generic(lambda output, y: F.cross_entropy(output[0], y), whole_output=True)
    found = loss.derivatives((a, b), (a, b), target)
    torch.testing.assert_close(found, Generic(F.cross_entropy).derivatives(a, a, target))


def test_the_error_of_a_loss_function_says_what_it_received():
    def first(output, target):
        return F.cross_entropy(output[0][0], target)

    with pytest.raises(
        TargetError,
        match=r"the loss first raised IndexError .* for a tensor of shape \(4, 3\) \(float64\) and a "
        r"target that is a tensor of shape \(4,\) \(int64\): .* set whole_output = True",
    ):
        as_loss(first).value(leaf(4, 3), torch.zeros(4).long())


def test_a_generic_loss_takes_a_single_number_as_output():
    f, u = leaf(), leaf(seed=1)
    loss = Generic(lambda output, y: (output - y).square())
    found = loss.derivatives(f, u, torch.tensor(0.5, dtype=D))
    torch.testing.assert_close(found.quadratic, 2 * u.square())


def test_the_error_for_a_loss_that_expects_the_whole_tuple_says_what_it_receives():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.last = nn.Dropout(0.3), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.drop(x)), x

    objective = undrop.Analytic(loss=lambda output, y: F.cross_entropy(output[0], y))
    with pytest.raises(TargetError, match=r"first tensor that the model returns; set whole_output"):
        objective(Two(), torch.randn(6, 4), torch.randint(3, (6,)))


class Projected(nn.Module):
    """A loss with its own layer and dropout."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3, dtype=D), nn.Dropout(0.5)

    def forward(self, f, y):
        return F.mse_loss(self.layer(self.drop(f)), y)


DROPPING = {
    "a module": Projected(),
    "a function": lambda f, y: F.mse_loss(F.dropout(f, 0.5), y),
    "torch's own": lambda f, y: F.mse_loss(torch.dropout(f, 0.5, True), y),
}


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("objective", [undrop.Analytic, undrop.Dropout, undrop.NoRegularization])
def test_dropout_in_a_loss_is_refused(name, objective):
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 3)).to(D)
    x, y = leaf(4, 3).detach(), leaf(4, 3, seed=1).detach()
    with pytest.raises(OptionError, match=r"the loss \S+ contains dropout"):
        objective(loss=DROPPING[name])(model, x, y)


def test_dropout_that_is_off_in_a_loss_is_accepted():
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 3)).to(D)
    x, y = leaf(4, 3).detach(), leaf(4, 3, seed=1).detach()
    loss = Projected().eval()
    objective = undrop.Analytic(loss=loss)
    expected = loss(model[1](x), y).detach()
    torch.testing.assert_close(objective(model, x, y).parts["loss"], float(expected))
    loss.train()
    with pytest.raises(OptionError, match="contains dropout"):
        objective(model, x, y)
