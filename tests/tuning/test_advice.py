"""Advice before a training: a verdict, a p for every site, and its uncertainty."""

import copy

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.errors import DataError
from undrop.tuning import Entry, History, advise_from


def history(slopes):
    found = History()
    for step, values in enumerate(zip(*slopes.values(), strict=True), 1):
        for name, slope in zip(slopes, values, strict=True):
            found.entries.append(Entry(step, name, 0.2, slope, 0.1, slope))
    return found


def drawn(mean, count=60, seed=0):
    return (mean + torch.randn(count, generator=new_generator(seed))).tolist()


def test_evidence_becomes_a_verdict_and_a_p_with_an_interval():
    advice = advise_from(history({"a": drawn(2.0), "b": drawn(-2.0), "c": drawn(0.0)}))
    a, b, c = advice.sites
    assert (a.says, b.says, c.says) == ("more helps", "in the way", "no evidence either way")
    assert b.p < 0.05 < 0.1 < c.p < 0.4 < a.p
    assert all(s.low < s.p < s.high for s in advice.sites)
    assert c.high - c.low > a.high - a.low
    assert advice.verdict.startswith("Dropout helps at `a`")
    assert "in the way at `b`" in advice.verdict


@pytest.mark.parametrize(
    ("means", "verdict"),
    [
        ((-2.0, -2.0), "in the way at every site"),
        ((-2.0, 0.0), "no evidence at the other sites"),
        ((0.0, 0.0), "No evidence either way in 60 steps"),
    ],
)
def test_a_verdict_is_given_whatever_the_evidence(means, verdict):
    found = history({f"s{i}": drawn(m, seed=i) for i, m in enumerate(means)})
    assert verdict in advise_from(found).verdict


def test_only_the_second_half_of_the_measurements_counts():
    late = advise_from(history({"a": drawn(-5.0, 30) + drawn(3.0, 30)}))
    assert late.sites[0].z > 2.0


def test_too_few_measurements_are_refused():
    with pytest.raises(DataError, match="only 3 measurements"):
        advise_from(history({"a": [1.0, 2.0, 3.0]}))


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
    assert advice.sites[0].z < -2.0
    assert "site" in advice.table().text()
    assert advice.to_json()["steps"] > 190
    with pytest.raises(DataError, match="no training batches"):
        undrop.advise(model, [], batches(2))
