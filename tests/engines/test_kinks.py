"""Functions with kinks or jumps: the gradient is right, or the log says that it is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from engine_helpers import BOTH, evaluate, gradient, random_signs, relative
from problems import D, Problem
from undrop.engines import Antithetic, ScaledNoise
from undrop.intercept import Interception, call
from undrop.losses import CrossEntropy

TOLD = "changes by"


class Kinked(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 24), nn.Dropout(0.3), nn.Linear(24, 24)
        self.last, self.way = nn.Linear(24, 3), way
        self.to(D)

    def forward(self, x):
        return self.last(self.way(self.two(self.drop(self.one(x)))))


def in_place(function, *args):
    def way(h):
        h = h.clone()
        function(h, *args)
        return h

    return way


@torch.jit.script
def scripted(h: torch.Tensor) -> torch.Tensor:
    return torch.relu(h)


class OwnReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


def largest(h):
    return h * torch.zeros_like(h).scatter(-1, h.topk(5, -1).indices, 1.0)


RIGHT = {
    "relu": F.relu,
    "selu": F.selu,
    "elu": lambda h: F.elu(h, 3.0),
    "celu": lambda h: F.celu(h, 0.3),
    "selu_": in_place(F.selu_),
    "elu_": in_place(F.elu_, 3.0),
    "leaky_relu_": in_place(F.leaky_relu_, 0.2),
    "threshold_": in_place(F.threshold_, 0.1, 0.0),
    "fmax": lambda h: torch.fmax(h, h.roll(1, -1)),
    "median": lambda h: h.unflatten(-1, (8, 3)).median(-1).values.repeat(1, 3),
    "a mask of the largest": largest,
    "a window": lambda h: h * ((h > -0.5) & (h < 0.5)),
    "floor": lambda h: h - h.floor(),
    "straight-through rounding": lambda h: h + (h.round() - h).detach(),
    "tanh": torch.tanh,
}
TOLD_OF = {
    "TorchScript": scripted,
    "an autograd function": OwnReLU.apply,
    "aten": torch.ops.aten.relu,
    "quantile": lambda h: h.unflatten(-1, (8, 3)).quantile(0.5, -1).repeat(1, 3),
    "bucketize": lambda h: h * torch.bucketize(h.detach(), torch.tensor([0.0], dtype=D)),
    "norm of order 1": lambda h: F.normalize(h, p=1, dim=-1) * 8,
}


def error_of_the_gradient(way):
    """‖found - wanted‖ / ‖wanted‖ at ε₀ = 0.05, where wanted is from plain passes at ±1e-7."""
    torch.manual_seed(1)
    p = Problem(Kinked(way), torch.randn(24, 8, dtype=D), torch.randint(3, (24,)), CrossEntropy())
    draw, outputs, h = random_signs(p, 1), [], 1e-7
    for epsilon in (0.0, h, -h):
        with Interception(p.model, ScaledNoise(draw, epsilon)):
            outputs.append(call(p.model, p.inputs))
    f, plus, minus = outputs
    total, _ = p.loss.combined(f, (plus - minus) / (2 * h), p.targets, "hessian", BOTH)
    wanted = gradient(total, p.model)
    found = evaluate(Antithetic(0.05), p, draw, BOTH)
    assert found.engine == "antithetic: one stacked pass"
    return relative(gradient(found.total, p.model), wanted)


@pytest.mark.parametrize("name", RIGHT)
def test_functions_with_a_rule_have_the_right_gradient(name, caplog):
    assert error_of_the_gradient(RIGHT[name]) < 0.02
    assert not [m for m in caplog.messages if TOLD in m]


@pytest.mark.parametrize("name", TOLD_OF)
def test_functions_without_a_rule_log_a_warning(name, caplog):
    assert error_of_the_gradient(TOLD_OF[name]) > 0.05
    (message,) = [m for m in caplog.messages if TOLD in m]
    assert "a function with a kink or a jump that undrop has no rule for" in message
    assert "Use engine='tangent', or register a rule" in message


def test_a_smooth_model_that_is_far_from_linear_is_not_said_to_have_a_kink(caplog):
    torch.manual_seed(0)
    model = Kinked(lambda h: torch.sin(40 * h))
    undrop.Analytic()(model, torch.randn(32, 8, dtype=D), torch.randint(3, (32,)))
    (message,) = [m for m in caplog.messages if TOLD in m]
    assert "far from linear over ±ε₀. Use engine='tangent', or a smaller ε₀" in message


def test_rounding_is_no_kink_where_dropout_has_no_effect(caplog):
    class WithoutEffect(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(0 * self.drop(self.a(x))) + x[:, :3] * self.a.weight[0, 0]

    undrop.Analytic()(WithoutEffect(), torch.randn(6, 4), torch.randint(3, (6,)))
    assert not [m for m in caplog.messages if TOLD in m]


def test_kinks_are_measured_before_the_graph_of_the_step_takes_memory(monkeypatch):
    from undrop.engines import antithetic

    order = []
    run = antithetic.run_stacked
    monkeypatch.setattr(antithetic, "measure_kinks", lambda *_: order.append("kinks"))
    monkeypatch.setattr(antithetic, "run_stacked", lambda *a: order.append("step") or run(*a))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    undrop.Analytic()(model, torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    assert order == ["kinks", "step"]


def test_kinks_are_measured_at_a_later_step_if_the_plan_does_not_fit_the_first(monkeypatch):
    from undrop.engines import antithetic, kinks

    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    objective, x, y = undrop.Analytic(), torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    fails, run = iter([True]), antithetic.run_stacked

    def changed(*args):
        if next(fails, False):
            raise antithetic.PlanChanged
        return run(*args)

    monkeypatch.setattr(antithetic, "run_stacked", changed)
    objective(model, x, y)
    assert model not in kinks._measured
    objective(model, x, y)
    assert model in kinks._measured
