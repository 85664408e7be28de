"""The analytic terms of an objective against Monte Carlo on one batch."""

import pytest
import torch
from torch import nn

import undrop
from problems import problem

MANY = {"seconds": 1e3, "draws": 120}


def net(p, scale=1.0):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 3)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[3].weight.mul_(scale)
    return model, (torch.randn(16, 4).double(), torch.randint(3, (16,)))


def test_a_gentle_dropout_passes():
    model, batch = net(0.1)
    found = undrop.check(undrop.Analytic(strength=undrop.TAYLOR), model, batch, **MANY)
    assert found.verdict == "good"
    for ours, theirs in ((found.explicit, found.taylor), (found.explicit, found.r_drop)):
        error = (ours.stderr**2 + theirs.stderr**2) ** 0.5
        assert abs(ours.value - theirs.value) < 4 * error + 0.1 * theirs.value
    assert found.noise_ratio.value == pytest.approx(1.0, abs=0.2)
    assert "second order carries this dropout" in str(found)


def test_the_papers_strength_is_twice_taylors():
    model, batch = net(0.1)
    objective = undrop.Analytic(engine="exact", strength=undrop.PAPER, implicit=False)
    found = undrop.check(objective, model, batch, seconds=1e3, draws=6)
    assert found.explicit.stderr == pytest.approx(0.0, abs=1e-15)
    assert abs(found.explicit.value - 2 * found.taylor.value) < 4 * 2 * found.taylor.stderr
    assert found.noise_ratio is None


def test_a_harsh_dropout_is_told_so():
    model, (x, _) = net(0.5, scale=50.0)
    top = model.eval()(x).topk(2)
    certain = (top.values[:, 0] - top.values[:, 1]).topk(4).indices
    model.train()
    batch = (x[certain], top.indices[certain, 0])  # and right: no curvature is left to see
    found = undrop.check(undrop.Analytic(), model, batch, **MANY)
    assert found.verdict == "poor"
    assert "p is too large for second order" in str(found)
    assert found.taylor_error.value == pytest.approx(found.r_drop.value - found.taylor.value)


def test_only_the_objectives_sites_count():
    made = problem("mlp")
    batch = (made.inputs, made.targets)
    every = undrop.check(undrop.Analytic(), made.model, batch, **MANY)
    last = undrop.check(undrop.Analytic(sites="5"), made.model, batch, **MANY)
    exact = undrop.diagnose(made.model, [batch], implicit=False, progress=False).explicit
    assert abs(last.taylor.value - exact.sites["5"].parts.psd.value) < 4.5 * last.taylor.stderr
    assert last.taylor.value < every.taylor.value


def test_neither_model_nor_objective_moves():
    made = problem("batch_norm")
    objective = undrop.Analytic(interval=3, generator=torch.Generator().manual_seed(5))
    objective.steps = 7
    before = objective.state_dict()
    weights = {name: value.clone() for name, value in made.model.state_dict().items()}
    found = undrop.check(objective, made.model, (made.inputs, made.targets), seconds=1e3, draws=8)
    after = objective.state_dict()
    assert found.explicit is not None
    assert after["steps"] == 7
    for device, state in before["generators"].items():
        assert torch.equal(after["generators"][device], state)
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_json_has_every_figure():
    model, batch = net(0.1)
    found = undrop.check(undrop.Dropout(4, noise="analytic"), model, batch, seconds=1e3, draws=8)
    json = found.to_json()
    assert json["explicit"] is None  # Dropout's explicit part is dropout itself
    assert json["noise_ratio"]["stderr"] > 0.0
    assert set(json) == {
        *("objective", "r_drop", "taylor", "taylor_error", "taylor_share", "explicit"),
        *("noise_ratio", "verdict", "draws"),
    }


@pytest.mark.parametrize("objective", [undrop.NoRegularization(), undrop.Dropout(2)])
def test_an_objective_without_analytic_part_is_refused(objective):
    model, batch = net(0.1)
    with pytest.raises(undrop.errors.OptionError, match="has no analytic part to check"):
        undrop.check(objective, model, batch)


def test_a_batch_must_be_a_pair():
    model, batch = net(0.1)
    with pytest.raises(undrop.errors.DataError, match="each batch must be a pair"):
        undrop.check(undrop.Analytic(), model, batch[0])
