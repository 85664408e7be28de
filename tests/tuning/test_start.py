"""A tuned run does not depend on the p that the model declares, not even in the last bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrop
from device import new_generator

OBJECTIVES = {
    "dropout": undrop.Dropout,
    "analytic": undrop.Analytic,
    "analytic, tangent": lambda: undrop.Analytic(engine="tangent"),
    "averaged dropout, analytic noise": lambda: undrop.Dropout(2, noise="analytic"),
}


def modules(p):
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(p)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 3)),
    )


class Functional(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(6, 8), nn.Linear(8, 3), p

    def forward(self, x):
        x = F.dropout(x, self.rate, self.training)
        return self.last(F.dropout(torch.tanh(self.first(x)), self.rate, self.training))


class Recurrent(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 8, 2, dropout=p, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.lstm(x.view(-1, 3, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=p, batch_first=True)
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.layer(self.first(x.view(-1, 3, 2))).mean(1))


MODELS = {
    "modules": modules,
    "F.dropout": Functional,
    "LSTM": Recurrent,
    "attention": Attention,
}


def batches(count, seed):
    random, teacher = new_generator(seed), torch.randn(6, 3, generator=new_generator(99))
    inputs = [torch.randn(12, 6, generator=random) for _ in range(count)]
    return [(x.double(), (x @ teacher).argmax(1)) for x in inputs]


def tuned(model, objective):
    """The trials and the final weights of a run in float64, which shows rounding differences."""
    torch.manual_seed(0)
    model = model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=1e-3)
    tuner = undrop.Tuner(objective(), batches(4, seed=5), optimizer=optimizer, interval=4)
    for x, y in batches(24, seed=3):
        step = tuner.step(model, x, y)
        optimizer.zero_grad()
        step.backward()
        optimizer.step()
    return tuner.history.to_json(), [w.tolist() for w in model.parameters()]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model", MODELS)
def test_models_that_declare_different_p_make_bitwise_identical_runs(model, objective):
    runs = [tuned(lambda p=p: MODELS[model](p), OBJECTIVES[objective]) for p in (0.05, 0.2, 0.6)]
    assert len(runs[0][0]) == 6
    assert runs[0] == runs[1] == runs[2]
