"""A model that is changed between two steps takes the step that a fresh copy of it takes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from undrop.engines.stacking import stacks_at_input

D = torch.float64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.between = nn.Linear(4, 8), nn.Dropout(0.3), nn.Identity()
        self.b, self.later, self.c = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)
        self.way = None

    def forward(self, x):
        h = self.between(self.drop(torch.tanh(self.a(x))))
        h = self.later(torch.tanh(self.b(h)))
        return self.c(h if self.way is None else self.way(h))


def put(**attributes):
    def change(model):
        for name, value in attributes.items():
            setattr(model, name, value)

    return change


CHANGES = {
    "p": lambda m: setattr(m.drop, "p", 0.6),
    "p of zero": lambda m: setattr(m.drop, "p", 0.0),
    "a dropout in eval mode": lambda m: m.drop.eval(),
    "one more dropout": put(between=nn.Dropout(0.5)),
    "one dropout less": put(drop=nn.Identity()),
    "layer norm": put(between=nn.LayerNorm(8, dtype=D)),
    "batch norm": put(between=nn.BatchNorm1d(8, dtype=D)),
    "examples that interact": put(way=lambda h: h - h.mean(0)),
    "a functional dropout": put(way=lambda h: F.dropout(h, 0.4)),
    "a reversed batch": put(way=lambda h: h.flip(0)),
    "frozen weights": lambda m: m.a.requires_grad_(False),
    "other weights": put(b=nn.Linear(8, 8, dtype=D)),
    "a hook": lambda m: m.b.register_forward_hook(lambda module, args, out: 2 * out + out.mean(0)),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(m.b),
}
HOW = {
    "auto": {},
    "half": {"fraction": 0.5},
    "tangent": {"engine": "tangent"},
    "reverse": {"engine": "reverse"},
}


def outcome(model, x, y, **how):
    """The parts and the gradient of a step, or the words of its refusal."""
    model.zero_grad()
    torch.manual_seed(2)
    try:
        step = undrop.Analytic(generator=new_generator(5), **how)(model, x, y)
        step.backward()
    except undrop.errors.UndropError as error:
        return str(error)
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([torch.tensor(list(step.parts.values()), dtype=D), *grads])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_takes_the_step_of_a_fresh_copy(name, how):
    model, x, y = Net().double(), torch.randn(8, 4, dtype=D), torch.randint(3, (8,))
    objective = undrop.Analytic(**HOW[how])
    for _ in range(2):
        objective(model, x, y).backward()
    CHANGES[name](model)
    fresh = copy.deepcopy(model)
    outcome(model, x, y, **HOW[how])  # which draws more noise, to find the change
    outcome(fresh, x, y, **HOW[how])
    found, wanted = (outcome(m, x, y, **HOW[how]) for m in (model, fresh))
    if isinstance(wanted, str):
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch", [5, 1])
def test_another_batch_size_takes_the_step_of_a_fresh_copy(batch, how):
    if how == "half" and batch == 1:
        pytest.skip("half of one example is none")
    model, x, y = Net().double(), torch.randn(8, 4, dtype=D), torch.randint(3, (8,))
    undrop.Analytic(**HOW[how])(model, x, y).backward()
    fresh = copy.deepcopy(model)
    found, wanted = (outcome(m, x[:batch], y[:batch], **HOW[how]) for m in (model, fresh))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


class WithState(nn.Module):
    """Without a state, every tensor passes the first dropout; the state enters behind it."""

    def __init__(self):
        super().__init__()
        self.a, self.drop, self.c = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x, state=None):
        h = self.drop(torch.tanh(self.a(x)))
        return self.c(h if state is None else h + state)


def total_and_gradient(objective, model, inputs, y):
    model.zero_grad()
    step = objective(model, inputs, y)
    step.backward()
    return [step.total.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("earlier_batches", [1, 8])
def test_a_step_does_not_depend_on_earlier_batches(earlier_batches, fraction):
    """A resumed run has not seen them, and must compute the same bits."""
    torch.manual_seed(0)
    model, inputs = WithState(), (torch.randn(6, 4), torch.randn(6, 8))
    y = torch.randint(3, (6,))
    fresh = copy.deepcopy(model)
    seen = undrop.Analytic(fraction=fraction, generator=new_generator(1))
    for size in range(7, 7 + earlier_batches):
        seen(model, torch.randn(size, 4), torch.randint(3, (size,)))
    resumed = undrop.Analytic(fraction=fraction)
    resumed.load_state_dict(seen.state_dict())
    results = [
        total_and_gradient(seen, model, inputs, y),
        total_and_gradient(resumed, fresh, inputs, y),
    ]
    assert all(map(torch.equal, *results))


class Residual(WithState):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(self.drop(h) + h if self.residual else self.drop(h))


def test_a_resumed_step_stacks_where_the_saved_run_did():
    """Stacking at the first dropout fails in one branch, so the run stacks at the input afterwards."""
    torch.manual_seed(0)
    model, x, y = Residual(), torch.randn(64, 4), torch.randint(3, (64,))
    objective = undrop.Analytic(generator=new_generator(1))
    plans = []
    for residual in (False, True, False):
        model.residual = residual
        objective(model, x, y)
        plans.append(stacks_at_input(model))
    assert plans == [False, True, True]
    resumed, fresh = undrop.Analytic(), copy.deepcopy(model)
    resumed.load_state_dict(objective.state_dict())
    results = [
        total_and_gradient(objective, model, x, y),
        total_and_gradient(resumed, fresh, x, y),
    ]
    assert all(map(torch.equal, *results))
    assert stacks_at_input(fresh)
