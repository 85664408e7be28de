"""Dropout with another p than the model's own: in the attributes that hold p, or by interception."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import undrop
from undrop.errors import RecomputationError
from undrop.intercept import Batch
from undrop.lab.models import AWDLSTM, GPT, ConvNet
from undrop.objectives.site_p import find_p_attributes


class Attention(nn.Module):
    """Dropout by torch's functions, with p in attributes of any name."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.rate, self.scale = 0.4, 0.5

    def forward(self, x):
        h = self.lstm(self.mixing(x, x, x)[0])[0]
        return F.dropout(self.scale * h, self.rate, self.training).sum(1)


class Region(nn.Module):
    """A part of it may run under activation checkpointing."""

    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3)
        self.checkpointed = checkpointed

    def part(self, x):
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x):
        if self.checkpointed:
            return self.last(checkpoint(self.part, x, use_reentrant=False))
        return self.last(self.part(x))


class Renamed(nn.Dropout):
    """Takes its p from another attribute."""

    def __init__(self, p):
        super().__init__()
        self.rate = p

    def forward(self, x):
        return F.dropout(x, self.rate, self.training)


class Scaled(nn.Module):
    """Uses p for something else too."""

    def __init__(self):
        super().__init__()
        self.p = 0.3

    def forward(self, x):
        return F.dropout(x, self.p, self.training) * (1.0 - self.p)


MODELS = {
    "convnet": (
        lambda: ConvNet(widths=(4, 8), feature_dropout=0.2, output_dropout=0.3),
        torch.randn(4, 1, 28, 28),
    ),
    "lstm": (
        lambda: AWDLSTM(20, embedding_size=8, hidden_size=8, layers=2, weight_dropout=0.0),
        torch.randint(20, (6, 4)),
    ),
    "gpt": (lambda: GPT(20, size=8, layers=2, heads=2, context=8), torch.randint(20, (6, 4))),
    "functions": (Attention, torch.randn(4, 6, 8)),
}


def names_of(model, x):
    return [site.name for site in undrop.sites(model, x)]


def probabilities(model, x):
    return [site.p for site in undrop.sites(model, x)]


def region_batch():
    torch.manual_seed(0)
    return torch.randn(32, 8), torch.randint(3, (32,))


def gradient(model, x, y):
    objective = undrop.Dropout()
    objective.site_p = {"drop": 0.1}
    torch.manual_seed(1)
    objective(model, x, y).backward()
    return model.first.weight.grad


@pytest.mark.parametrize("name", MODELS)
def test_the_attributes_that_hold_p_are_found_and_left_as_they_were(name):
    make, x = MODELS[name]
    model = make()
    names, declared = names_of(model, x), probabilities(model, x)
    state = torch.get_rng_state()
    assert list(find_p_attributes(Batch(model, x, None), names)) == names
    assert probabilities(model, x) == declared
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), Scaled()),
        nn.Sequential(nn.Linear(8, 8), *[nn.Dropout(0.3)] * 2),
        Region(checkpointed=True),
    ],
    ids=["p has another use", "one attribute for two sites", "activation checkpointing"],
)
def test_an_attribute_that_is_not_the_p_of_one_site_alone_is_not_used(model):
    x = torch.randn(32, 8)
    assert find_p_attributes(Batch(model, x, None), names_of(model, x)) == {}


def test_each_of_two_sites_of_one_module_gets_its_own_p():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), *[nn.Dropout(0.5)] * 2)
    nn.init.ones_(model[0].weight)
    objective = undrop.Dropout(loss=undrop.MSE())
    objective.site_p = {"1": 0.1, "1#2": 0.3}
    output = objective(model, torch.ones(20000, 1), torch.zeros(20000, 1)).output
    assert float((output == 0.0).float().mean()) == pytest.approx(1.0 - 0.9 * 0.7, abs=0.02)


def test_activation_checkpointing_runs_again_with_the_same_p():
    x, y = region_batch()
    plain, checkpointed = Region(checkpointed=False), Region(checkpointed=True)
    checkpointed.load_state_dict(plain.state_dict())
    torch.testing.assert_close(gradient(checkpointed, x, y), gradient(plain, x, y))


def test_activation_checkpointing_that_begins_during_training_is_refused():
    x, y = region_batch()
    model = Region(checkpointed=False)
    gradient(model, x, y)
    model.checkpointed = True
    with pytest.raises(RecomputationError, match="switched on during training"):
        gradient(model, x, y)
    assert model.drop.p == 0.5


def test_a_module_that_is_replaced_during_training_is_examined_again():
    x, y = region_batch()
    model = Region(checkpointed=False)
    expected = gradient(model, x, y).clone()
    model.drop = Renamed(0.4)
    model.zero_grad()
    torch.testing.assert_close(gradient(model, x, y), expected)
