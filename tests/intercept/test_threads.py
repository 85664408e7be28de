"""Every interception ends, and does not affect other threads or other code in the process."""

from threading import Barrier, Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from undrop.errors import EngineError
from undrop.intercept import Interception, no_noise

ENGINES = ("tangent", "antithetic", "reverse", "exact")
X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.tensor([0, 1, 1, 0])


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 2))


def train(model, gradient, steps=15):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        gradient(model)
        optimizer.step()
    return bits(model)


def bits(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def with_objective(engine, seed=1):
    generator = new_generator(seed)
    objective = undrop.Analytic(engine=engine, generator=generator)
    return lambda model: objective(model, X, Y).backward()


def with_dropout(model):
    F.cross_entropy(model(X), Y).backward()


def run_concurrently(*functions):
    """Return the result of each function; all start at the same moment, in separate threads."""
    results, ready = {}, Barrier(len(functions))

    def run(index):
        ready.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[index] for index in range(len(functions))]


def dropout_is_torchs_own():
    return F.dropout(torch.ones(1000), 0.5).min() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_trained_in_another_thread_is_not_affected(engine):
    def train_with_dropout():
        return train(other, with_dropout)

    other = net(7)
    torch.manual_seed(3)
    alone = train_with_dropout()
    model, other, gradient = net(), net(7), with_objective(engine)
    gradient(model)  # its first step finds the sites and restores the random state
    torch.manual_seed(3)
    _, beside = run_concurrently(lambda: train(model, gradient, 40), train_with_dropout)
    assert torch.equal(beside, alone)


class DrawsInAnotherThread(nn.Module):
    """In every pass, another thread draws a random number; this begins when ``active`` is set."""

    def __init__(self):
        super().__init__()
        self.active, self.numbers = False, []

    def forward(self, x):
        if self.active:
            thread = Thread(target=lambda: self.numbers.append(torch.rand(()).item()))
            thread.start()
            thread.join()
        return x


@pytest.mark.parametrize("engine", ENGINES)
def test_random_numbers_of_another_thread_do_not_repeat(engine):
    """In 70 steps a plan is proven three times: at steps 1, 16 and 64."""
    other = DrawsInAnotherThread()
    model, gradient = net().append(other), with_objective(engine)
    gradient(model)  # its first step finds the sites and restores the random state
    other.active = True
    torch.manual_seed(3)
    train(model, gradient, 70)
    torch.manual_seed(3)
    assert other.numbers == [torch.rand(()).item() for _ in other.numbers]


def test_objectives_in_several_threads_compute_bit_for_bit_the_same_as_alone():
    alone = [train(net(), with_objective(engine)) for engine in ENGINES * 2]
    models = [net() for _ in alone]
    functions = [
        lambda model=model, engine=engine: train(model, with_objective(engine))
        for model, engine in zip(models, ENGINES * 2, strict=True)
    ]
    for found, expected in zip(run_concurrently(*functions), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_objectives_on_a_shared_model_compute_the_same_as_alone(engine):
    def objectives():
        generators = [new_generator(seed) for seed in range(4)]
        new = [undrop.Analytic(engine=engine, generator=generator) for generator in generators]
        for objective in new:
            objective(model, X, Y)  # the first step looks for sites
        return new

    def totals(objective):
        return [objective(model, X, Y).total.item() for _ in range(10)]

    model = net()
    alone = [totals(objective) for objective in objectives()]
    found = run_concurrently(*(lambda o=objective: totals(o) for objective in objectives()))
    assert found == alone


def test_threads_that_find_sites_leave_the_model_unchanged():
    model = net()
    model[2].eval()
    model.append(nn.Dropout(0.1))

    def look():
        return [undrop.sites(model, X).names for _ in range(20)]

    assert run_concurrently(*[look] * 4) == [[("4",)] * 20] * 4
    assert [module.training for module in model] == [True, True, False, True, True]


class EvaluatesAnObjective(nn.Module):
    """A model that evaluates an objective on another model in its forward pass."""

    def __init__(self, objective):
        super().__init__()
        self.dropout, self.objective, self.inner = nn.Dropout(0.5), objective, [net(5)]
        self.totals = []

    def forward(self, x):
        with torch.enable_grad():
            self.totals.append(self.objective(self.inner[0], X, Y).total.item())
        return self.dropout(x)


@pytest.mark.parametrize("outer", ["antithetic", "tangent"])
def test_an_objective_inside_a_models_forward_works(outer):
    inner = undrop.Analytic(engine="exact")  # its value does not depend on a draw
    expected = inner(net(5), X, Y).total.item()
    model, x = EvaluatesAnObjective(inner), X.clone().requires_grad_()
    undrop.Analytic(engine=outer, loss=nn.MSELoss())(model, x, X).backward()
    assert x.grad.isfinite().all()
    assert set(model.totals) == {expected}
    assert dropout_is_torchs_own()


@pytest.mark.parametrize("outer", ["antithetic", "tangent"])
def test_dropout_within_an_objective_within_a_pass_is_torchs_own(outer):
    model, x = EvaluatesAnObjective(undrop.Dropout()), X.clone().requires_grad_()
    without_noise = undrop.NoRegularization()(net(5), X, Y).total.item()
    assert undrop.sites(model, X).names == ("dropout",)
    undrop.Analytic(engine=outer, loss=nn.MSELoss())(model, x, X)
    assert without_noise not in model.totals


def test_nested_forward_mode_is_refused():
    model, x = EvaluatesAnObjective(undrop.Analytic(engine="tangent")), X.clone().requires_grad_()
    with pytest.raises(EngineError, match="this objective is called inside forward mode"):
        undrop.Analytic(engine="tangent", loss=nn.MSELoss())(model, x, X)
    assert dropout_is_torchs_own()
    with_objective("tangent")(net())  # and forward mode is free again


def batches(model):
    """A loader that keeps an interception open between its batches."""
    with Interception(model, no_noise):
        while True:
            yield F.dropout(torch.ones(1000), 0.5)


def test_a_generator_closed_early_leaves_no_interception():
    running = batches(nn.Identity())
    assert next(running).min() == 1
    running.close()
    assert dropout_is_torchs_own()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_a_pass_leaves_no_interception_behind(engine, error):
    class Raises(nn.Module):
        armed = False

        def forward(self, x):
            if self.armed:
                raise error("in the pass")
            return x

    model, gradient = nn.Sequential(net(), Raises()), with_objective(engine)
    gradient(model)
    before, hooks = set(vars(model[0][2])), len(model[0][2]._forward_hooks)
    model[1].armed = True
    with pytest.raises(error, match="in the pass"):
        gradient(model)
    assert dropout_is_torchs_own()
    assert torch.overrides._get_current_function_mode() is None
    assert torch.autograd.forward_ad._current_level == -1
    assert torch.is_grad_enabled()
    assert all(module.training for module in model.modules())
    assert (set(vars(model[0][2])), len(model[0][2]._forward_hooks)) == (before, hooks)
    model[1].armed = False
    gradient(model)
