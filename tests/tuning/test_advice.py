"""Advice before a training: a verdict, a p for every site, and its uncertainty."""

import copy

import pytest
import torch
from torch import nn

import undrop
from undrop.errors import DataError
from undrop.tuning import Entry, History, advise_from


def history(paths):
    """Trials after which the sites had these p."""
    found = History()
    for step, values in enumerate(zip(*paths.values(), strict=True), 1):
        found.entries.append(Entry(step, "every site", 0.0, dict(zip(paths, values, strict=True))))
    return found


def test_the_second_half_of_the_trials_becomes_a_verdict_and_a_p_with_a_range():
    paths = {
        "a": [0.01, 0.01, 0.1, 0.3],
        "b": [0.5, 0.5, 0.02, 0.04],
        "c": [0.1, 0.1, 0.03, 0.2],
    }
    a, b, c = advise_from(history(paths)).sites
    assert (a.says, b.says, c.says) == ("helps", "does not help", "can't say")
    assert (a.low, a.high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert all(s.low < s.p < s.high for s in (a, b, c))


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ([0.1, 0.1, 0.1, 0.3], "Dropout helps: start at p = 0.18 (0.10 to 0.30)."),
        ([0.1, 0.1, 0.02, 0.02], "Dropout does not help in the first 4 steps, where p = 0.02"),
        ([0.1, 0.1, 0.02, 0.2], "4 steps can't say whether dropout helps"),
    ],
)
def test_a_verdict_is_given_whatever_the_evidence(path, verdict):
    assert advise_from(history({"a": path, "b": path})).verdict.startswith(verdict)


def test_p_lies_within_its_range_although_a_mean_is_rounded():
    for n in range(1000):
        found = advise_from(history({"a": [0.005 + n * 1e-4] * 20})).sites[0]
        assert found.low <= found.p <= found.high


def test_too_few_trials_are_refused():
    with pytest.raises(DataError, match="only 3 trials"):
        advise_from(history({"a": [0.1, 0.1, 0.1]}))


def test_a_short_training_leaves_the_model_alone_and_tells_where_dropout_is_in_the_way():
    """Plenty of clean data from a linear teacher: noise on the inputs only shrinks the weights."""
    torch.manual_seed(0)
    teacher = torch.randn(8, 3)

    def batches(count):
        inputs = torch.randn(count, 32, 8)
        return [(x, x @ teacher) for x in inputs]

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    advice = undrop.advise(
        *(model, batches(200), batches(8)),
        steps=200,
        objective=undrop.Dropout(loss=undrop.MSE()),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.2),
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert advice.every.says == advice.sites[0].says == "does not help"
    assert "site" in advice.table().text()
    assert advice.to_json()["steps"] == 200
    with pytest.raises(DataError, match="no training batches"):
        undrop.advise(model, [], batches(2))
