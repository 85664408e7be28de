"""The benefit of a site against what one gradient step does to the validation loss, in float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator
from problems import problem
from undrop.diagnosis.measure.analytic import AnalyticNoise
from undrop.diagnosis.measure.benefit import (
    inner,
    site_gradient,
    two_way_error,
    validation_gradient,
)
from undrop.engines import as_engine
from undrop.generators import Generators


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(4, 3)).double()


def data(seed, n=6):
    generator = new_generator(seed)
    x = torch.randn(n, 3, generator=generator).double()
    return x, torch.randint(3, (n,), generator=generator)


def site_benefit(model, train, validation, site, engine="exact", seed=0, loss=None):
    loss = undrop.CrossEntropy() if loss is None else loss
    parameters = list(model.parameters())
    push = site_gradient(
        model,
        *train,
        loss,
        parameters,
        site,
        strength=undrop.TAYLOR,
        generator=Generators(new_generator(seed)),
        noise=AnalyticNoise(as_engine(engine)),
    )
    return inner(validation_gradient(model, *validation, loss, parameters), push)


@pytest.mark.parametrize("site", ["2", "5"])
def test_benefit_is_the_fall_of_the_validation_loss_over_one_gradient_step(site):
    """(L_val(W + γ∇R) - L_val(W - γ∇R)) / 2γ, the step taken with the exact engine's gradient."""
    model, train, validation = net(), data(1), data(2)
    found = site_benefit(model, train, validation, site)
    options = {"engine": "exact", "implicit": False, "sites": site}
    regularized = undrop.Analytic(strength=undrop.TAYLOR, **options)(model, *train).total
    plain = undrop.NoRegularization()(model, *train).total
    parameters = list(model.parameters())
    push = torch.autograd.grad(regularized - plain, parameters)
    step = 1e-5

    @torch.no_grad()
    def loss_after(size):
        for p, g in zip(parameters, push, strict=True):
            p.sub_(g, alpha=size)
        value = float(F.cross_entropy(model.eval()(validation[0]), validation[1]))
        for p, g in zip(parameters, push, strict=True):
            p.add_(g, alpha=size)
        model.train()
        return value

    fall = (loss_after(-step) - loss_after(step)) / (2 * step)
    assert abs(found) > 1e-4
    assert found == pytest.approx(fall, rel=1e-6)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_the_mean_over_draws_is_the_exact_engines_benefit(name):
    made = problem(name)
    batch = (made.inputs, made.targets)
    site = undrop.sites(made.model, made.inputs)[0].name
    exact = site_benefit(made.model, batch, batch, site, loss=made.loss)
    values = torch.tensor(
        [
            site_benefit(made.model, batch, batch, site, "auto", seed, loss=made.loss)
            for seed in range(200)
        ]
    )
    error = values.std().item() / 200**0.5
    assert abs(values.mean().item() - exact) < 4 * error  # 200 draws


def test_a_site_whose_name_looks_like_a_pattern_is_chosen_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.add_module("[ab]", nn.Dropout(0.5))
            self.b = nn.Dropout(0.5)

        def forward(self, x):
            return self.b(self.get_submodule("[ab]")(self.a(x)))

    torch.manual_seed(0)
    model = Odd().double()
    alone = site_benefit(model, data(1), data(2), "[ab]")
    assert alone == pytest.approx(site_benefit(model, data(1), data(2), "b"), rel=1e-9)
    assert alone != 0.0


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


def test_one_row_or_one_column_has_no_error():
    assert two_way_error(np.ones((1, 4)))[0] is None
    assert two_way_error(np.ones((4, 1)))[0] is None


def diagnosed(validation, **options):
    model = net()
    train = [data(seed) for seed in range(10, 16)]
    options = {"seconds": 1e3, "draws": 2, "implicit": False, "progress": False, **options}
    return model, train, undrop.diagnose(model, train, validation=validation, **options)


def test_a_diagnosis_with_validation_batches_has_the_benefit_of_every_site():
    """Per 1,000 steps, against the exact engine over all pairs of batches."""
    validation = [data(seed) for seed in range(20, 25)]
    model, train, found = diagnosed(validation, learning_rate=0.01, draws=20)
    benefit = found.benefit
    assert list(benefit.sites) == ["2", "5"]
    for name, estimate in benefit.sites.items():
        pairs = [site_benefit(model, t, v, name) for t in train for v in validation]
        exact = 1000 * 0.01 * sum(pairs) / len(pairs)
        # the error is also over batches, so that this is a loose bound on the noise of the draws
        assert abs(estimate.value - exact) < 3 * estimate.stderr
        assert estimate.z == pytest.approx(estimate.value / estimate.stderr)
    total = sum(estimate.value for estimate in benefit.sites.values())
    assert benefit.every_site.value == pytest.approx(total)
    assert "benefit" in str(found)
    assert found.to_json()["benefit"]["learning_rate"] == 0.01


def test_the_benefit_of_weight_decay_is_the_product_with_the_weights():
    validation = [data(seed) for seed in range(20, 23)]
    model, _, found = diagnosed(validation, learning_rate=0.01, weight_decay=0.1)
    parameters = list(model.parameters())
    loss = undrop.CrossEntropy()
    products = [
        inner(
            validation_gradient(model, *batch, loss, parameters), [p.detach() for p in parameters]
        )
        for batch in validation
    ]
    decay = found.benefit.weight_decay
    assert decay.value == pytest.approx(1000 * 0.01 * 0.1 * sum(products) / 3, rel=1e-9)
    error = np.std(products, ddof=1) / 3**0.5
    assert decay.stderr == pytest.approx(1000 * 0.01 * 0.1 * error, rel=1e-9)
    assert found.benefit.decay == 0.1


def test_one_validation_batch_gives_no_evidence_either_way():
    _, _, found = diagnosed([data(20)])
    assert all(estimate.stderr is None for estimate in found.benefit.sites.values())
    assert any(s.startswith("No evidence either way at `") for s in found.advice)


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
