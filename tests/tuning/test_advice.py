"""Advice before a training run: a verdict with its evidence, and where dropout helps now."""

import copy
import json

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import DataError
from undrop.tuning.trial import loss_gap


def batches(count, seed, rows=32, noise=0.0):
    """A linear teacher on 8 inputs."""
    random = new_generator(seed)
    teacher = torch.randn(8, 3, generator=new_generator(99))
    inputs = torch.randn(count, rows, 8, generator=random)
    return [(x, x @ teacher + noise * torch.randn(rows, 3, generator=random)) for x in inputs]


def advised(train, held, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    advice = undrop.advise(
        *(model, train, held),
        objective=undrop.Dropout(loss=undrop.MSE()),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        **options,
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return advice


def test_dropout_will_help_a_run_that_overfits():
    """12 noisy rows determine 9 weights for each output."""
    advice = advised(batches(2, 1, rows=6, noise=2.0), batches(8, 2), steps=200)
    assert advice.evidence == "helps"
    assert advice.gap.low > 0.0
    assert advice.verdict.startswith("Dropout will probably help: after 200 steps the validation")
    assert "Start at p = 0.1 (in 30 searches the best was 0.05 to 0.2)." in advice.verdict
    assert advice.benefit.every_site.value > 0.0


def test_a_run_on_plenty_of_clean_data_gives_no_evidence_and_its_dropout_harms():
    advice = advised(batches(100, 1), batches(8, 2), steps=100)
    assert advice.evidence == "no evidence either way"
    assert advice.verdict.startswith(
        "No evidence either way: after 100 steps the validation loss is"
    )
    assert advice.benefit.sites["0"].high < 0.0
    rows = advice.table().text()
    assert "harms" in rows
    assert "every site" in rows
    assert "weight decay" in rows
    found = json.loads(json.dumps(advice.to_json()))
    assert (found["steps"], found["p"], found["evidence"]) == (100, 0.1, advice.evidence)


def test_the_copy_trains_with_the_p_that_the_advice_names():
    """Not with the 0.5 that the model declares: 200 values, 4 standard errors."""
    seen = []

    class Watching(nn.Module):
        def forward(self, x):
            seen.append(float((x == 0.0).float().mean()))
            return x

    model = nn.Sequential(nn.Dropout(0.5), Watching(), nn.Linear(8, 3))
    undrop.advise(
        *(model, batches(100, 1), batches(2, 2)),
        steps=100,
        objective=undrop.Dropout(loss=undrop.MSE()),
    )
    assert sum(seen[80:100]) / 20 == pytest.approx(0.1, abs=4 * (0.09 / (20 * 256)) ** 0.5)


def test_the_gap_of_two_losses_has_welchs_interval():
    """Against scipy, for unequal sizes and variances."""
    stats = pytest.importorskip("scipy.stats")
    a, b = [1.0, 2.0, 4.0, 8.0], [0.5, 0.6, 0.8]
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    found = loss_gap(a, b)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert loss_gap([1.0], [0.0, 0.1]) == Estimate(0.95, None)


def test_advise_refuses_an_empty_list_of_training_batches():
    with pytest.raises(DataError, match="no training batches"):
        advised([], batches(2, 1))
