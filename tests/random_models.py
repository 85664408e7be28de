"""Random small models: layers, norms, activations, dropout kinds, losses and batch layouts."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from problems import D, Problem
from undrop.losses import BCEWithLogits, CrossEntropy, Loss, as_loss
from undrop.nn import LockedDropout, WeightDrop

ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.Softplus)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Recurrent(nn.Module):
    def __init__(self, kind, size, *, batch_first, layers, p):
        super().__init__()
        self.net = kind(size, size, layers, dropout=p, batch_first=batch_first)

    def forward(self, x):
        return self.net(x)[0]


class Attention(nn.Module):
    def __init__(self, size, *, batch_first, p):
        super().__init__()
        self.net = nn.MultiheadAttention(size, 2, dropout=p, batch_first=batch_first)

    def forward(self, x):
        return self.net(x, x, x, need_weights=False)[0]


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x - x.mean(self.dim, keepdim=True)


class Flattened(nn.Module):
    """Works on rows, the batch and time in one dimension."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


@dataclass
class RandomProblem:
    problem: Problem
    batch_dim: int
    description: str


def random_problem(seed: int) -> RandomProblem:
    """The problem of that seed, in float64."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, time, size = rng.choice([3, 4, 6]), rng.choice([2, 3, 4]), rng.choice([4, 6])
    layout = rng.choice(["rows", "batch first", "time first"])
    dim = 1 if layout == "time first" else 0
    shape = {
        "rows": (batch, size),
        "batch first": (batch, time, size),
        "time first": (time, batch, size),
    }[layout]
    layers = [_layer(rng, size, layout, dim) for _ in range(rng.randint(2, 4))]
    layers.insert(rng.randrange(len(layers) + 1), nn.Dropout(rng.choice([0.1, 0.3, 0.6])))
    if rng.random() < 0.1:
        layers.insert(rng.randrange(len(layers) + 1), Centred(dim))
    outputs = rng.choice([1, 3]) if rng.random() < 0.3 else 3
    model = nn.Sequential(*layers, nn.Linear(size, outputs)).to(D).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
    loss, targets = _loss(rng, (*shape[:-1], outputs))
    names = ", ".join(type(m).__name__ for m in model.modules() if not list(m.children()))
    return RandomProblem(
        Problem(model, torch.randn(shape, dtype=D), targets, loss),
        dim,
        f"seed {seed}: {layout}, {names}, {type(loss).__name__}",
    )


def _layer(rng: random.Random, size: int, layout: str, dim: int) -> nn.Module:
    p = rng.choice([0.1, 0.3, 0.5])
    first = dim == 0
    choices = [
        lambda: nn.Sequential(nn.Linear(size, size), rng.choice(ACTIVATIONS)()),
        lambda: nn.Sequential(nn.Linear(size, size), nn.Dropout(p), rng.choice(ACTIVATIONS)()),
        lambda: Residual(nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.Dropout(p))),
        lambda: WeightDrop(nn.Linear(size, size), ["weight"], p),
        lambda: Flattened(nn.Sequential(nn.Linear(size, size), nn.Dropout(p), nn.Tanh())),
        lambda: nn.Sequential(nn.Linear(size, size), nn.GLU(), nn.Linear(size // 2, size)),
    ]
    if layout == "rows":
        choices.append(
            lambda: nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU())
        )
    else:
        choices += [
            lambda: LockedDropout(p, time_dim=1 - dim),
            lambda: Recurrent(nn.LSTM, size, batch_first=first, layers=rng.choice([1, 2]), p=p),
            lambda: Recurrent(nn.GRU, size, batch_first=first, layers=1, p=0.0),
            lambda: Residual(Attention(size, batch_first=first, p=p)),
            lambda: WeightDrop(nn.LSTM(size, size, batch_first=first), ["weight_hh_l0"], p),
        ]
    made = rng.choice(choices)()
    if isinstance(made, WeightDrop) and isinstance(made.module, nn.LSTM):
        return _First(made)
    return made


class _First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def _loss(rng: random.Random, shape: tuple[int, ...]) -> tuple[Loss, Tensor]:
    kind = rng.choice(["classes", "weighted", "sum", "mse", "bce", "smooth"])
    if shape[-1] > 1 and kind in ("classes", "weighted", "sum"):
        targets = torch.randint(shape[-1], shape[:-1])
        if kind == "classes" or len(shape) > 2:
            return CrossEntropy(), targets
        if kind == "sum":
            return as_loss(nn.CrossEntropyLoss(reduction="sum")), targets
        weight = torch.rand(shape[-1], dtype=D) + 0.2
        return as_loss(nn.CrossEntropyLoss(weight=weight)), targets
    if kind == "bce":
        return BCEWithLogits(), torch.rand(shape, dtype=D).round()
    if kind == "smooth":
        return as_loss(nn.SmoothL1Loss(beta=5.0)), torch.randn(shape, dtype=D)
    return as_loss(nn.MSELoss()), torch.randn(shape, dtype=D)
