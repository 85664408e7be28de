"""The benefit of a site against hand-written training loops, in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.benefit import (
    STEPS,
    BranchOptimizer,
    measure_benefit,
    two_way_error,
)
from undrop.diagnosis.measure.branches import Branches
from undrop.diagnosis.measure.model import MeasuredModel
from undrop.diagnosis.measure.timing import Budget


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4, 3)).double()


def data(seed, n=6):
    generator = new_generator(seed)
    x = torch.randn(n, 3, generator=generator).double()
    return x, torch.randint(3, (n,), generator=generator)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def by_hand(model, batches, held, p, seed, decay=0.0):
    """Train with torch's own dropout and optimizer; the loss on each validation batch."""
    model = copy.deepcopy(model).train()
    model[2].p, model[5].p = p
    optimizer = sgd(model)
    torch.manual_seed(seed)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(1.0 - 0.1 * decay)
        optimizer.step()
    with torch.no_grad():
        return [float(nn.functional.cross_entropy(model.eval()(x), y)) for x, y in held]


@pytest.mark.parametrize(("p", "decay"), [((0.3, 0.5), 0.0), ((1e-9, 0.5), 0.0), ((0.3, 0.5), 0.2)])
def test_a_branch_equals_training_by_hand(p, decay):
    model, batches, held = net(), [data(s) for s in range(5)], [data(8), data(9)]
    objective, training = undrop.Dropout(), BranchOptimizer(model, sgd(model), None, decay or None)
    objective.site_p = {"2": p[0], "5": p[1]}
    branches = Branches(objective, model, training.weights, batches, held, 7)
    with training.steps(more_decay=decay > 0.0) as move:
        found = branches.losses(move)
    assert found == pytest.approx(by_hand(model, batches, held, p, 7, decay), rel=1e-9)
    assert found != pytest.approx(by_hand(model, batches, held, (0.3, 0.1), 7), rel=1e-3)


def test_a_branch_leaves_weights_gradients_and_the_optimizer_as_they_were():
    model = net()
    optimizer = sgd(model)
    nn.functional.cross_entropy(model(data(1)[0]), data(1)[1]).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(3)
    undrop.diagnose(
        *(model, [data(2), data(3)]),
        validation=[data(4), data(5)],
        optimizer=optimizer,
        learning_rate=0.5,
        draws=2,
        implicit=False,
        progress=False,
    )
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients))
    after = torch.rand(())
    torch.manual_seed(3)
    assert after == torch.rand(())


def test_the_two_way_error_has_the_spread_of_repeated_tables():
    """Random rows, columns and residuals of known size; 2,000 tables of 6 × 5."""
    generator = np.random.default_rng(0)
    r, c = 6, 5
    means, errors = [], []
    for _ in range(2000):
        table = (
            1.0 * generator.normal(size=(r, 1))
            + 0.7 * generator.normal(size=(1, c))
            + 0.5 * generator.normal(size=(r, c))
        )
        means.append(table.mean())
        errors.append(two_way_error(table)[0])
    truth = math.sqrt(1.0 / r + 0.49 / c + 0.25 / (r * c))
    assert np.std(means) == pytest.approx(truth, rel=0.05)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(truth, rel=0.05)


def test_a_table_of_one_row_or_one_column_has_no_error():
    assert two_way_error(np.ones((1, 4)))[0] is None
    assert two_way_error(np.ones((4, 1)))[0] is None


def teacher(seed, rows=16, noise=0.0):
    random = new_generator(seed)
    x = torch.randn(rows, 8, generator=random).double()
    y = x[:, :1] - 2.0 * x[:, 1:2]
    return x, y + noise * torch.randn(rows, 1, generator=random).double()


def linear(p=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(p), nn.Linear(8, 1)).double()


def diagnosed(model, train, held, **options):
    options = {"seconds": 1e3, "draws": 6, "implicit": False, "progress": False, **options}
    random = torch.Generator().manual_seed(0)
    loss = undrop.MSE() if held[0][1].is_floating_point() else None
    return undrop.diagnose(model, train, validation=held, loss=loss, generator=random, **options)


def fitted(model, batches, steps=300):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.eval()
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.train()


def test_dropout_hurts_a_model_of_a_noiseless_teacher():
    """Dropout shrinks weights that are already right."""
    train, held = [teacher(s) for s in range(6)], [teacher(s) for s in range(10, 14)]
    model = fitted(linear(), train)
    found = diagnosed(model, train, held, learning_rate=0.01)
    benefit = found.benefit
    assert benefit.sites["0"].high < 0.0
    assert benefit.sites["0"].z < -2.0
    assert benefit.every_site == benefit.sites["0"]  # it is the only one
    assert benefit.weight_decay.value < 0.0
    assert any(s.startswith("Dropout at `0` hurts, so lower its p: after 20") for s in found.advice)
    assert "Dropout hurts: after 20 steps without it" in found.conclusion


def test_dropout_and_weight_decay_help_a_model_that_has_learned_noise():
    """10 noisy rows determine 9 weights, which shrinking improves."""
    train, held = [teacher(0, 10, noise=4.0)], [teacher(s, 64) for s in range(10, 14)]
    model = fitted(linear(0.3), train, 3000)
    found = diagnosed(model, train * 2, held, learning_rate=0.01, weight_decay=1.0)
    assert found.benefit.sites["0"].low > 0.0
    assert found.benefit.weight_decay.low > 0.0
    assert found.benefit.decay == 1.0
    assert any(s.startswith("Keep the dropout at `0` for now") for s in found.advice)
    assert any(s.startswith("Weight decay helps") for s in found.advice)
    assert "benefit" in str(found)
    assert found.to_json()["benefit"]["learning_rate"] == 0.01


def test_the_default_decay_shrinks_the_weights_by_one_percent_in_a_branch():
    training = BranchOptimizer(net(), None, 0.002, None)
    assert training.name == "AdamW"
    assert training.decay * 0.002 * STEPS == pytest.approx(0.01)


def test_a_site_for_which_the_time_runs_out_has_no_benefit():
    train, held = [data(seed) for seed in range(6)], [data(seed) for seed in range(20, 23)]
    found = diagnosed(net(), train, held, seconds=1e-6, draws=2)
    assert all(math.isnan(estimate.value) for estimate in found.benefit.sites.values())
    assert math.isfinite(found.benefit.every_site.value)
    assert any("the benefit of dropout at any site was measured" in s for s in found.advice)
    assert "nan" not in str(found)


def test_a_benefit_takes_two_repeats_even_if_the_time_is_over(monkeypatch):
    monkeypatch.setattr(Budget, "elapsed", 2.0)
    train, held = [data(seed) for seed in range(6)], [data(seed) for seed in range(20, 23)]
    found = diagnosed(net(), train, held)
    assert found.benefit.repeats == 2
    assert all(estimate.stderr for estimate in found.benefit.sites.values())


def test_the_progress_is_the_share_of_the_planned_repeats():
    shown, model, pairs = [], net(), [data(seed) for seed in range(2)]
    subject = MeasuredModel(model, pairs)
    with subject.preserve():
        budget, optimizer = Budget(1e9, shown.append), BranchOptimizer(model, None, None, None)
        measure_benefit(subject, pairs, pairs, budget, optimizer, loss=subject.loss, repeats=4)
    assert max(shown) == pytest.approx(0.75)  # when the last repeat begins


def test_one_validation_batch_gives_no_evidence_either_way():
    found = diagnosed(net(), [data(1), data(2)], [data(20)])
    assert all(estimate.stderr is None for estimate in found.benefit.sites.values())
    assert any(s.startswith("It is not clear whether dropout at ") for s in found.advice)
    assert any("pass more validation batches" in s for s in found.advice)


def test_diagnose_refuses_an_optimizer_that_does_not_fit_the_model():
    train, held = [data(1), data(2)], [data(20), data(21)]
    for optimizer, text in (
        (sgd(net()), "the optimizer SGD has parameters that Sequential lacks"),
        (object(), "optimizer must be a torch optimizer, got object"),
    ):
        with pytest.raises(undrop.errors.OptionError, match=text):
            diagnosed(net(), train, held, optimizer=optimizer)
    model = net()
    ended = sgd(model)
    ended.param_groups[0]["lr"] = 0.0
    with pytest.raises(
        undrop.errors.OptionError, match="rate of SGD is 0, so the weights do not move"
    ):
        diagnosed(model, train, held, optimizer=ended)


def test_a_branch_with_exploding_steps_is_refused():
    train, held = [teacher(s) for s in range(3)], [teacher(s) for s in range(10, 12)]
    model = linear()
    with pytest.raises(
        undrop.errors.NonFiniteError, match="20 steps of SGD with a learning rate of"
    ):
        diagnosed(model, train, held, optimizer=sgd(model), learning_rate=1e30)


def test_validation_data_that_is_the_training_data_is_refused():
    batches = [data(1), data(2)]
    with pytest.raises(undrop.errors.DataError, match="validation is the training data itself"):
        undrop.diagnose(net(), batches, validation=batches, seconds=1, progress=False)
    rows = len(data(1)[0])
    held = [tuple(part.flip(0) for part in data(2)), data(1)]
    with pytest.raises(undrop.errors.DataError, match=f"{2 * rows} of {2 * rows} examples"):
        undrop.diagnose(net(), batches, validation=held, seconds=1, progress=False)


def test_empty_validation_data_is_refused():
    with pytest.raises(undrop.errors.DataError, match="there are no validation batches"):
        undrop.diagnose(net(), [data(1)], validation=[], seconds=1, progress=False)
