"""A trial compares two branches that differ in one thing, and restores everything it changes."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.branches import Branches
from undrop.tuning.trial import RecentSteps, run_trial


def linear(p=0.5):
    """A linear model with dropout on its input, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(p), nn.Linear(3, 1, bias=False)).double()


def data(count, seed, rows=8):
    random = new_generator(seed)
    x = torch.randn(count, rows, 3, generator=random, dtype=torch.float64)
    teacher = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return [(each, each @ teacher) for each in x]


def trial_for(model, objective, length=0.05, seed=7):
    weights = list(model.parameters())
    lengths = torch.full((len(weights),), length)
    branches = Branches(objective, model, weights, data(4, 1), data(2, 2), seed)
    return partial(run_trial, branches, lengths)


def by_hand(model, p, decay, length, seed=7):
    """The same branch with torch's own dropout and a learning rate that falls to 0."""
    model = copy.deepcopy(model)
    model[0].p = p
    torch.manual_seed(seed)
    for (x, y), lr in zip(data(4, 1), (1.0, 0.75, 0.5, 0.25), strict=True):
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            w = model[1].weight
            step = length * w.grad / w.grad.norm()
            w.mul_(1.0 - lr * decay).sub_(lr * step)
    model[0].p = 0.0
    with torch.no_grad():
        return sum(float(nn.functional.mse_loss(model(x), y)) for x, y in data(2, 2)) / 2


def setting(objective, p, decay=0.0):
    def apply():
        objective.site_p = {"0": p}
        return [decay]

    return apply


def test_the_benefit_equals_that_of_two_runs_by_hand():
    """Equal up to rounding."""
    model, objective = linear(), undrop.Dropout(loss=undrop.MSE())
    found = trial_for(model, objective, length=0.2)(
        setting(objective, 0.3, 0.01), setting(objective, 0.1)
    ).benefit
    expected = by_hand(model, 0.1, 0.0, length=0.2) - by_hand(model, 0.3, 0.01, length=0.2)
    assert found.value == pytest.approx(expected, rel=1e-6)
    assert abs(found.value) > 1e-4
    assert 0.0 < found.stderr < math.inf


def test_the_same_setting_twice_has_no_benefit():
    model, objective = linear(), undrop.Dropout(loss=undrop.MSE())
    same = setting(objective, 0.3)
    assert trial_for(model, objective)(same, same).benefit.value == 0.0


def test_dropout_on_the_inputs_of_a_noiseless_teacher_has_a_negative_benefit():
    model, objective = linear(), undrop.Dropout(loss=undrop.MSE())
    more, less = setting(objective, 0.5), setting(objective, 0.01)
    found = [trial_for(model, objective, seed=s)(more, less).benefit.value for s in range(10)]
    assert sum(found) / 10 < 0.0


def test_a_branch_that_diverges_loses_and_two_that_diverge_give_no_evidence():
    model, objective = linear(), undrop.Dropout(loss=undrop.MSE())
    fine, bad = setting(objective, 0.3), setting(objective, 0.3, math.inf)
    before = copy.deepcopy(model.state_dict())
    trial = trial_for(model, objective)
    assert trial(bad, fine).benefit.z == -2.0
    assert trial(fine, bad).benefit.z == 2.0
    assert trial(bad, bad).benefit.z == 0.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_overfits_if_its_validation_loss_is_clearly_above_its_training_loss():
    """The validation targets are shifted by 0 or by 20; the training targets are not.

    Without training batches of an earlier trial, the gap has no verdict.
    """
    model, objective = linear(), undrop.Dropout(loss=undrop.MSE())
    same = setting(objective, 0.01)
    found = []
    for shift in (0.0, 20.0):
        held = [(x, y + shift) for x, y in data(4, 2)]
        weights = list(model.parameters())
        branches = Branches(objective, model, weights, data(10, 1), held, 7)
        trial = partial(run_trial, branches, torch.full((1,), 0.01), same, same)
        assert trial().gap.includes_zero
        found.append(trial(data(4, 3)).gap.low > 0.0)
    assert found == [False, True]


def test_the_mean_length_of_updates_ignores_steps_that_do_not_move_the_weights():
    recent, weight = RecentSteps(), torch.zeros(2, requires_grad=True)
    for shift in (0.0, 3.0, 0.0, 1.0):
        with torch.no_grad():
            weight += torch.tensor([shift, 0.0])
        recent.add([weight], None, None)
    assert recent.update_lengths.tolist() == [2.0]
    resumed = RecentSteps()
    resumed.load_state_dict(recent.state_dict())
    assert resumed.update_lengths.tolist() == [2.0]
    assert RecentSteps().update_lengths is None
