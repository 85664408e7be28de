"""Losses of several heads or of the order of the examples, and heads without a gradient."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from engine_helpers import BOTH, evaluate, gradient, random_signs, relative
from problems import D, Problem
from undrop.engines import Antithetic, Tangent
from undrop.errors import EngineError
from undrop.losses import Generic


class TwoHeads(nn.Module):
    """A class and a number for each example, in a tuple or a dict."""

    def __init__(self, make, mixes=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3))
        self.classes, self.number = nn.Linear(8, 3), nn.Linear(8, 2)
        self.make, self.mixes = make, mixes
        self.to(D)

    def forward(self, x):
        h = self.body(x)
        h = h - h.mean(0) if self.mixes else h
        return self.make(self.classes(h), self.number(h).tanh())


def as_dict(a, b):
    return {"logits": a, "number": b}


def both(output, target):
    a, b = output.values() if isinstance(output, dict) else output
    return F.cross_entropy(a, target[0]) + F.mse_loss(b, target[1])


both.whole_output = True


def joined(p):
    """The same net with one output, for engines that take only one."""

    class One(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            out = self.net(x)
            return torch.cat(tuple(out.values() if isinstance(out, dict) else out), 1)

    def loss(f, y):
        return F.cross_entropy(f[:, :3], y[0]) + F.mse_loss(f[:, 3:], y[1])

    return Problem(One(p.model), p.inputs, p.targets, Generic(loss))


def problem(make, mixes=False):
    torch.manual_seed(0)
    targets = torch.randint(3, (6,)), torch.randn(6, 2, dtype=D)
    return Problem(
        TwoHeads(make, mixes), torch.randn(6, 4, dtype=D), targets, undrop.losses.as_loss(both)
    )


@pytest.mark.parametrize("mixes", [False, True], ids=["one pass", "two passes"])
@pytest.mark.parametrize("engine", [Antithetic(1e-4), Tangent()], ids=["antithetic", "tangent"])
@pytest.mark.parametrize("make", [lambda a, b: (a, b), as_dict], ids=["tuple", "dict"])
def test_a_loss_of_two_heads_trains_both(make, engine, mixes):
    p = problem(make, mixes)
    one = joined(p)
    found = evaluate(engine, p, random_signs(p, 1), BOTH)
    wanted = evaluate(Tangent(), one, random_signs(one, 1), BOTH)
    for name in ("loss", "explicit", "implicit"):
        assert float(found.parts[name]) == pytest.approx(float(wanted.parts[name]), rel=1e-5)
    assert relative(gradient(found.total, p.model), gradient(wanted.total, one.model)) < 1e-5


def test_a_loss_of_the_whole_output_works_on_half_of_the_batch(monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n).flip(0))
    p = problem(as_dict)
    one = joined(p)
    found = evaluate(Antithetic(1e-4), p, random_signs(p, 1), BOTH, fraction=0.5)
    wanted = evaluate(Antithetic(1e-4), one, random_signs(one, 1), BOTH, fraction=0.5)
    assert relative(gradient(found.total, p.model), gradient(wanted.total, one.model)) < 1e-9
    loss = both(p.model.eval()(p.inputs), p.targets)
    assert float(found.parts["loss"]) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("objective", [undrop.Dropout, undrop.NoRegularization, undrop.Analytic])
def test_every_objective_takes_a_loss_of_the_whole_output(objective):
    p = problem(as_dict)
    objective(loss=both)(p.model, p.inputs, p.targets).backward()
    assert all(q.grad is not None and q.grad.any() for q in p.model.parameters())


@pytest.mark.parametrize("engine", ["exact", "reverse"])
def test_engines_that_take_one_output_refuse_a_loss_of_the_whole_output(engine):
    p = problem(as_dict)
    with pytest.raises(EngineError, match=f"the {engine} engine takes a loss of one output"):
        undrop.Analytic(loss=both, engine=engine)(p.model, p.inputs, p.targets)


@pytest.mark.parametrize("objective", [undrop.Analytic, undrop.Dropout])
def test_a_head_without_a_gradient_is_named_once(objective, caplog):
    p = problem(as_dict)
    for _ in range(2):
        objective()(p.model, p.inputs, p.targets[0]).backward()
    assert p.model.number.weight.grad is None
    (message,) = [m for m in caplog.messages if "get no gradient" in m]
    assert "one of the 2 outputs of TwoHeads, and number.weight, number.bias get no" in message


def test_a_state_in_the_output_is_not_a_head(caplog):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
            self.drop = nn.Dropout(0.3)

        def forward(self, x):
            out, state = self.net(x)
            return self.last(self.drop(out)), state

    undrop.Analytic()(Recurrent(), torch.randn(4, 3, 4), torch.randint(3, (4, 3)))
    assert not [m for m in caplog.messages if "get no gradient" in m]


WEIGHTS = torch.linspace(0.1, 2.0, 8, dtype=D)
IN_ORDER = {
    "weights in a closure": lambda f, y: (F.cross_entropy(f, y, reduction="none") * WEIGHTS).mean(),
    "neighbors": lambda f, y: F.cross_entropy(f, y) + (f[1:] - f[:-1]).square().mean(),
    "targets in the loss": lambda f, y: F.cross_entropy(f @ f.T, torch.arange(len(f))),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_loss_that_depends_on_the_order_gets_the_order_of_the_batch(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).to(D)
    x, y = torch.randn(8, 4, dtype=D), torch.randint(3, (8,))
    loss = IN_ORDER[name]
    expected = loss(net.eval()(x), y)
    net.train()
    for seed in range(3):
        step = undrop.Analytic(
            loss=loss,
            fraction=0.5,
            engine=Antithetic(1e-4),
            generator=new_generator(seed),
        )(net, x, y)
        assert step.parts["loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_loss_that_depends_on_the_order_keeps_its_mean_explicit_part_on_half_of_the_batch(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).to(D)
    x, y = torch.randn(8, 4, dtype=D), torch.randint(3, (8,))
    exact = undrop.Analytic(loss=IN_ORDER[name], engine="exact")(net, x, y).parts["explicit"]
    objective = undrop.Analytic(loss=IN_ORDER[name], fraction=0.5, generator=new_generator(0))
    found = torch.tensor([objective(net, x, y).parts["explicit"] for _ in range(300)])
    assert abs(found.mean() - exact) < 4 * found.std() / 300**0.5 + 0.01 * abs(exact)


@pytest.mark.parametrize("given", [False, True])
def test_an_objective_can_be_pickled_and_copied(given):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    generator = new_generator(1) if given else None
    objective = undrop.Analytic(generator=generator)
    pickle.dumps(objective)
    objective(net, x, y)
    copies = [pickle.loads(pickle.dumps(objective)), copy.deepcopy(objective)]  # noqa: S301
    wanted = [objective(net, x, y).parts for _ in range(2)]
    for each in copies:
        assert [each(net, x, y).parts for _ in range(2)] == wanted
        assert each.steps == 3


class Mapped(nn.Module):
    """One example at a time, by vmap."""

    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x):
        def row(r):
            return self.two(torch.tanh(self.drop(self.one(r))))

        return torch.vmap(row, randomness="different")(x)


def test_a_model_with_vmap_runs_twice_and_logs_it(caplog):
    torch.manual_seed(0)
    step = undrop.Analytic()(Mapped(), torch.randn(6, 4), torch.randint(3, (6,)))
    step.backward()
    assert step.engine == "antithetic: two passes, since its examples interact"
    assert step.parts["explicit"] > 0.0
