"""Analytic: its parts, its options, and its state."""

import math

import pytest
import torch
from torch import nn

import undrop
from device import DEVICE, new_generator
from problems import PROBLEMS, D, problem
from undrop.losses import FORMS

ENGINES = ("tangent", "antithetic", "reverse")


def generator(seed=0):
    return new_generator(seed)


def step(p, **how):
    how.setdefault("generator", generator())
    return undrop.Analytic(loss=p.loss, **how)(p.model, p.inputs, p.targets)


@pytest.mark.parametrize("engine", [*ENGINES, "auto", "exact"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_parts_of_analytic_add_up_and_have_names(name, form, engine):
    found = step(problem(name), explicit=form, engine=engine)
    assert set(found.parts) == {"loss", "explicit", "implicit"}
    assert sum(found.parts.values()) == pytest.approx(found.total.item(), rel=1e-12)
    assert found.parts["explicit"] > 0


def test_parts_that_are_switched_off_are_left_out():
    p = problem("mlp")
    assert set(step(p, explicit=None).parts) == {"loss", "implicit"}
    assert set(step(p, implicit=False).parts) == {"loss", "explicit"}


def test_the_loss_part_of_analytic_is_the_loss_without_dropout():
    p = problem("mlp")
    expected = p.loss.value(p.model.eval()(p.inputs), p.targets)
    p.model.train()
    assert step(p).parts["loss"] == pytest.approx(expected.item(), rel=1e-4)  # O(ε₀²)
    for exact in ({"exact_output": True}, {"engine": "tangent"}):
        assert step(p, **exact).parts["loss"] == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("engine", [*ENGINES, "exact"])
def test_strength_is_the_factor_on_the_explicit_part(engine):
    p = problem("mlp")
    paper = step(p, engine=engine, strength=undrop.PAPER).parts
    taylor = step(p, engine=engine, strength=undrop.TAYLOR).parts
    assert taylor["explicit"] == pytest.approx(paper["explicit"] / 2, rel=1e-12)
    assert taylor["implicit"] == pytest.approx(paper["implicit"], rel=1e-12)


def test_strength_may_follow_a_schedule():
    p = problem("mlp")
    objective = undrop.Analytic(engine="exact", strength=lambda step: 1.0 + step)
    found = [objective(p.model, p.inputs, p.targets).parts["explicit"] for _ in range(3)]
    assert found == pytest.approx([found[0], 2 * found[0], 3 * found[0]])


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_average_the_explicit_part_and_keep_the_variance_of_the_implicit_one(engine):
    p = problem("lstm")
    source = generator()
    singles = [step(p, engine=engine, generator=source).parts for _ in range(3)]
    found = step(p, engine=engine, samples=3)
    parts = found.parts
    for name in ("loss", "explicit"):
        assert parts[name] == pytest.approx(sum(s[name] for s in singles) / 3, rel=1e-12)
    noise = sum(s["implicit"] for s in singles) / math.sqrt(3)
    assert parts["implicit"] == pytest.approx(noise, rel=1e-12)
    assert sum(parts.values()) == pytest.approx(found.total.item(), rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interval_regularizes_fewer_steps_more_strongly(engine):
    p = problem("mlp")
    every = step(p, engine=engine).parts
    objective = undrop.Analytic(engine=engine, interval=3, generator=generator())
    found = [objective(p.model, p.inputs, p.targets).parts for _ in range(4)]
    assert [set(parts) for parts in found[1:3]] == [{"loss"}] * 2
    assert set(found[3]) == set(found[0])
    assert found[0]["explicit"] == pytest.approx(3 * every["explicit"], rel=1e-12)
    assert found[0]["implicit"] == pytest.approx(math.sqrt(3) * every["implicit"], rel=1e-12)
    assert found[1]["loss"] == pytest.approx(every["loss"], rel=1e-3)  # antithetic: to O(ε₀²)


def test_independent_masks_differ_from_declared_ones():
    p = problem("lstm")
    declared, independent = (
        step(p, engine="exact", mask=mask).parts["explicit"]
        for mask in ("as-declared", "independent")
    )
    assert abs(declared / independent - 1) > 0.01


@pytest.mark.parametrize("engine", ENGINES)
def test_the_noise_of_analytic_comes_from_its_generator_alone(engine):
    p = problem("transformer")
    state = torch.get_rng_state()
    first, again, other = (
        step(p, engine=engine, generator=generator(seed)).parts for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert first["implicit"] != other["implicit"]


def test_without_a_generator_torchs_seed_decides():
    p = problem("mlp")

    def run():
        torch.manual_seed(7)
        return undrop.Analytic()(p.model, p.inputs, p.targets).parts

    assert run() == run()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        undrop.Analytic,
        lambda **how: undrop.Analytic(samples=2, interval=2, **how),
        lambda **how: undrop.Analytic(engine="reverse", **how),
        lambda **how: undrop.Analytic(fraction=0.5, **how),
        lambda **how: undrop.Dropout(2, noise="analytic", **how),
        lambda **how: undrop.Dropout(2, noise="resampled", **how),
    ],
)
def test_a_saved_state_of_analytic_restores_the_noise(make, given):
    p = problem("mlp")

    def made(seed):
        return make(generator=generator(seed)) if given else make()

    def run(objective, steps):
        return [objective(p.model, p.inputs, p.targets).parts for _ in range(steps)]

    objective = made(0)
    run(objective, 3)
    state = objective.state_dict()
    torch_state = torch.get_rng_state()
    expected = run(objective, 3)
    resumed = made(1)
    resumed.load_state_dict(state)
    torch.set_rng_state(torch_state)  # Drop_k without a generator has torch's own masks
    assert run(resumed, 3) == expected
    assert resumed.steps == 6


def test_the_state_of_analytic_contains_only_numbers_and_tensors():
    p = problem("mlp")
    objective = undrop.Analytic()
    objective(p.model, p.inputs, p.targets)
    state = objective.state_dict()
    assert state["steps"] == 1
    assert all(isinstance(value, torch.Tensor) for value in state["generators"].values())


def test_inputs_may_be_a_tuple_or_a_dict():
    p = problem("lstm")
    state = tuple(torch.zeros(1, 2, 3, dtype=D) for _ in range(2))
    expected = step(p).parts
    for inputs in ((p.inputs, state), {"state": state, "x": p.inputs}):
        how = {"loss": p.loss, "generator": generator()}
        found = undrop.Analytic(**how)(p.model, inputs, p.targets)
        assert found.parts == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recurrent_net_gets_its_own_state_back(engine):
    """Window after window: the returned state is that of the net without noise."""
    p = problem("lstm")
    objective = undrop.Analytic(engine=engine, generator=generator())
    state = None
    for _ in range(3):
        _, state = objective(p.model, (p.inputs, state), p.targets).output
        state = tuple(s.detach() for s in state)
    expected = None
    for _ in range(3):
        _, expected = p.model.eval()(p.inputs, expected)
    tolerance = 2e-2 if engine == "antithetic" else 1e-12
    torch.testing.assert_close(
        state, tuple(s.detach() for s in expected), rtol=tolerance, atol=1e-3
    )


class SparseWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.3)
        self.weight = nn.Parameter(torch.eye(4).to_sparse())

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x)))
        return self.last(torch.sparse.mm(self.weight, h.T).T)


@pytest.mark.skipif(
    DEVICE.type not in ("cpu", "cuda"), reason="the device may have no sparse tensors"
)
def test_sparse_weights_are_trained():
    model = SparseWeights()
    undrop.Analytic()(model, torch.randn(5, 3), torch.randint(2, (5,))).backward()
    assert model.weight.grad.to_dense().abs().sum() > 0.0
