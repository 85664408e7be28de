"""The analytic terms of an objective against Monte Carlo on one batch."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import undrop
from brute_force import LOSSES, NETS, noise_directions
from device import new_generator
from problems import problem
from undrop.diagnosis.measure.estimates import Estimate

MANY = {"seconds": 1e3, "draws": 120}


def net(p, scale=1.0):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 3)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[3].weight.mul_(scale)
    return model, (torch.randn(16, 4).double(), torch.randint(3, (16,)))


def test_the_verdict_for_a_small_p_is_good():
    model, batch = net(0.1)
    found = undrop.check(undrop.Analytic(strength=undrop.TAYLOR), model, batch, **MANY)
    assert found.verdict == "good"
    for ours, theirs in ((found.explicit, found.half_quadratic), (found.explicit, found.r_drop)):
        error = (ours.stderr**2 + theirs.stderr**2) ** 0.5
        assert abs(ours.value - theirs.value) < 4 * error + 0.1 * theirs.value
    assert found.noise_ratio.value == pytest.approx(1.0, abs=0.2)
    assert "the second-order approximation describes this dropout well" in str(found)


def test_the_papers_strength_is_twice_taylors():
    model, batch = net(0.1)
    objective = undrop.Analytic(engine="exact", strength=undrop.PAPER, implicit=False)
    found = undrop.check(objective, model, batch, seconds=1e3, draws=6)
    assert found.explicit.stderr == pytest.approx(0.0, abs=1e-15)
    assert (
        abs(found.explicit.value - 2 * found.half_quadratic.value) < 8 * found.half_quadratic.stderr
    )
    assert found.noise_ratio is None


def test_the_verdict_for_a_large_p_on_a_steep_loss_is_poor():
    model, (x, _) = net(0.5, scale=50.0)
    top = model.eval()(x).topk(2)
    certain = (top.values[:, 0] - top.values[:, 1]).topk(4).indices
    model.train()
    batch = (x[certain], top.indices[certain, 0])  # certain and right: the loss has no curvature
    found = undrop.check(undrop.Analytic(), model, batch, **MANY)
    assert found.verdict == "poor"
    assert "p is too large for the second-order approximation" in str(found)
    assert found.taylor_error.value == pytest.approx(
        found.r_drop.value - found.half_quadratic.value
    )


def test_a_check_measures_only_the_sites_of_the_objective():
    made = problem("mlp")
    batch = (made.inputs, made.targets)
    every = undrop.check(undrop.Analytic(), made.model, batch, **MANY)
    last = undrop.check(undrop.Analytic(sites="5"), made.model, batch, **MANY)
    exact = undrop.Analytic(engine="exact", strength=undrop.TAYLOR, implicit=False, sites="5")
    truth = exact(made.model, *batch).parts["explicit"]
    assert abs(last.half_quadratic.value - truth) < 4.5 * last.half_quadratic.stderr
    assert last.half_quadratic.value < every.half_quadratic.value


CNN = {"2": 0, "5": 1}
"""The index of each site of the small CNN; both sites drop whole feature maps."""


def dropouts_trace(made, sites):
    """The trace of the covariance of dropout's gradient, from every mask of the sites."""
    net, w = NETS["cnn"], {n: p.detach() for n, p in made.model.named_parameters()}
    zeros = net.zeros("as-declared")
    indices = [CNN[name] for name in sites for _ in range(zeros[CNN[name]].numel())]
    q = torch.tensor([net.q[index] for index in indices]).double()
    dropped = torch.tensor(list(product((False, True), repeat=len(indices))))
    parts = torch.where(dropped, -1.0, q / (1 - q)).split(
        [zeros[CNN[name]].numel() for name in sites], 1
    )
    stacks = [z.expand(len(dropped), *z.shape) for z in zeros]
    for name, part in zip(sites, parts, strict=True):
        stacks[CNN[name]] = part.reshape(-1, *zeros[CNN[name]].shape)

    def loss(w, *z):
        return LOSSES["cross-entropy"](net.function(w, z, made.inputs), made.targets)

    gradients = vmap(grad(loss), (None, 0, 0))(w, *stacks)
    rows = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    weights = torch.where(dropped, q, 1 - q).prod(1)
    return float((weights @ rows**2 - (weights @ rows) ** 2).sum())


def analytic_trace(made, sites, mask):
    """Σ over the entries j of every η of weight·σ²·‖∂²ℓ/∂W∂z_j‖²."""
    net, w = NETS["cnn"], dict(made.model.named_parameters())
    rows = noise_directions(net, w, made.inputs, made.targets, "cross-entropy", mask)
    squares = rows.detach().square().sum(1).split([z.numel() for z in net.zeros(mask)])
    return sum(weight * float(squares[CNN[name]].sum()) for name, weight in sites.items())


@pytest.mark.parametrize(
    ("make", "sites", "mask", "factor"),
    [
        (undrop.Analytic, {"2": 1.0, "5": 1.0}, "as-declared", 1.0),
        (undrop.Analytic, {"2": 1.0}, "as-declared", 1.0),
        (undrop.Analytic, {"5": 1.0}, "independent", 1.0),
        (undrop.Analytic, {"2": 9.0, "5": 1.0}, "as-declared", 1.0),
        (undrop.Dropout, {"2": 1.0, "5": 1.0}, "as-declared", 1 - 1 / 4),
        (undrop.Dropout, {"2": 1.0, "5": 4.0}, "independent", 1 - 1 / 4),
    ],
)
def test_a_check_measures_the_noise_of_the_objective(make, sites, mask, factor):
    """The sites, weights, mask structure and factor of the objective, against every mask of dropout."""
    made = problem("cnn")
    options = {"k": 4, "noise": "analytic"} if make is undrop.Dropout else {"interval": 2}
    found = undrop.check(
        make(sites=sites, mask=mask, **options),
        made.model,
        (made.inputs, made.targets),
        seconds=1e3,
        draws=250,
        generator=new_generator(0),
    )
    truth = factor * analytic_trace(made, sites, mask) / dropouts_trace(made, sites)
    assert abs(found.noise_ratio.value - truth) < 4 * found.noise_ratio.stderr  # 250 samples
    assert found.noise_ratio.stderr < 0.12 * truth


def test_the_noise_of_a_check_has_the_objectives_mask_structure():
    """Over n equal steps a locked η has n times the trace of independent ones: (Σd)² = n·Σd²."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), undrop.nn.LockedDropout(0.1), nn.Linear(6, 3)).double()
    batch = (torch.randn(1, 5, 3).double().expand(4, 5, 3), torch.randint(3, (5,)).expand(4, 5))
    locked, independent = (
        undrop.check(
            undrop.Analytic(explicit=None, mask=mask),
            model,
            batch,
            generator=new_generator(0),
            **MANY,
        ).noise_ratio
        for mask in ("as-declared", "independent")
    )
    ratio = locked.value / independent.value
    parts = [each.stderr / each.value for each in (locked, independent)]
    assert abs(ratio - 4.0) < 4 * ratio * (parts[0] ** 2 + parts[1] ** 2) ** 0.5
    assert max(parts) < 0.12


@pytest.mark.parametrize(
    "objective",
    [
        undrop.Analytic(engine="exact"),
        undrop.Analytic(implicit=False),
        undrop.Dropout(1, noise="analytic"),
    ],
)
def test_an_objective_without_noise_has_no_noise_ratio(objective):
    made = problem("mlp")
    found = undrop.check(objective, made.model, (made.inputs, made.targets), seconds=1e3, draws=4)
    assert found.noise_ratio is None


@pytest.mark.parametrize(("interval", "steps", "at"), [(1, 0, 0), (1, 2, 2), (3, 7, 6)])
def test_a_strength_schedule_does_not_advance_during_a_check(interval, steps, at):
    """Every draw has the strength of the objective's present step, or of the last regularized step."""
    model, batch = net(0.1)

    def explicit(strength):
        objective = undrop.Analytic(
            engine="exact", implicit=False, strength=strength, interval=interval
        )
        objective.steps = steps
        return undrop.check(objective, model, batch, seconds=1e3, draws=4).explicit.value

    assert explicit(lambda step: 10.0**-step) == pytest.approx(10.0**-at * explicit(1.0), rel=1e-12)


@pytest.mark.parametrize("engine", ["auto", "exact"])
def test_an_explicit_part_of_strength_zero_is_zero(engine):
    model, batch = net(0.1)
    objective = undrop.Analytic(engine=engine, strength=0.0)
    found = undrop.check(objective, model, batch, seconds=1e3, draws=4)
    assert found.explicit.value == 0.0
    assert found.explicit.stderr == 0.0


def test_a_check_leaves_model_and_objective_as_they_were():
    made = problem("batch_norm")
    objective = undrop.Analytic(interval=3, generator=new_generator(5))
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


@pytest.mark.parametrize("objective", [undrop.Analytic(), undrop.Dropout(2, noise="analytic")])
def test_the_text_of_a_check_begins_with_the_verdict_and_aligns_its_figures(objective):
    model, batch = net(0.1)
    text = str(undrop.check(objective, model, batch, seconds=1e3, draws=40))
    verdict, empty, *rows = text.splitlines()
    assert verdict.startswith(
        "good: the second-order approximation describes this dropout well (40 masks)"
    )
    assert not empty
    assert len({re.search(r" {2,}(?=\S)", row).end() for row in rows}) == 1


def test_no_ratio_is_shown_if_r_drop_may_be_zero():
    model, (x, y) = net(0.1)
    found = undrop.check(undrop.Analytic(), model, (x, y), seconds=1e3, draws=20)
    assert "% of R_drop" in str(found)
    assert "times R_drop" in str(found)
    nothing = replace(found, r_drop=Estimate.of(1e-5, 1e-3))
    assert re.search(r"0\.0000 ± 0\.0010 +may be 0", str(nothing))
    assert "% of R_drop" not in str(nothing)
    assert "times R_drop" not in str(nothing)


def test_the_json_of_a_check_has_every_figure():
    model, batch = net(0.1)
    found = undrop.check(undrop.Dropout(4, noise="analytic"), model, batch, seconds=1e3, draws=8)
    json = found.to_json()
    assert json["explicit"] is None  # Dropout's explicit part is dropout itself
    assert json["noise_ratio"]["stderr"] > 0.0
    assert set(json) == {
        *("objective", "r_drop", "half_quadratic", "taylor_error", "quadratic_share", "explicit"),
        *("noise_ratio", "verdict", "draws"),
    }


@pytest.mark.parametrize(
    "objective", [undrop.NoRegularization(), undrop.Dropout(2), torch.nn.Linear(1, 1)]
)
def test_check_refuses_what_is_not_an_objective_with_analytic_terms(objective):
    model, batch = net(0.1)
    with pytest.raises(undrop.errors.OptionError, match="has no analytic terms to check"):
        undrop.check(objective, model, batch)


def test_check_refuses_a_batch_that_is_not_a_pair():
    model, batch = net(0.1)
    with pytest.raises(undrop.errors.DataError, match="each of the batches must be a pair"):
        undrop.check(undrop.Analytic(), model, batch[0])
