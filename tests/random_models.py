"""Random small models: layers, norms, activations, dropout kinds, losses and batch layouts."""

import random
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from problems import D, Problem
from undrop.losses import BCEWithLogits, CrossEntropy, Loss, as_loss
from undrop.nn import LockedDropout, WeightDrop

ACTIVATIONS = (
    *(nn.Tanh, nn.ReLU, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.Softplus),
    *(nn.PReLU, nn.SELU, nn.Mish, nn.Hardtanh, nn.Softshrink, nn.ReLU6, nn.Sigmoid),
)


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


class Centered(nn.Module):
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


class Gated(nn.Module):
    """Adds the mean over the batch behind a gate that starts at 0."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.gate = dim, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * x.mean(self.dim, keepdim=True)


class Averaged(nn.Module):
    """Keeps a moving mean over the batch in a buffer, and subtracts it."""

    def __init__(self, dim, size):
        super().__init__()
        self.dim = dim
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x):
        y = x - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.flatten(0, -2).mean(0))
        return y


class Paired(nn.Module):
    """Each example sees its neighbor; one without a neighbor sees itself."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        n = x.shape[self.dim]
        place = torch.arange(n) ^ 1
        return x + 0.5 * x.index_select(self.dim, place.clamp(max=n - 1))


class OwnNoise(nn.Module):
    """Scales by random numbers that the model draws itself."""

    def __init__(self, source, dim):
        super().__init__()
        self.source, self.dim = source, dim
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        shape = [1] * x.dim()
        shape[self.dim] = x.shape[self.dim]
        if self.source == "rows":
            noise = torch.rand(shape, dtype=D)
        elif self.source == "NumPy":
            noise = torch.from_numpy(np.random.rand(*shape))
        elif self.source == "Python":
            noise = random.random()
        else:
            noise = torch.rand((), generator=self.generator, dtype=D)
        return x * (0.5 + noise)


class Feature(nn.Module):
    """Drops whole channels, as Dropout1d does, over the features of (batch, time, features)."""

    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout1d(p)

    def forward(self, x):
        return self.drop(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    """A convolution over time with group norm and max pooling, on (batch, time, features)."""

    def __init__(self, size, p):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(size, size, 3, padding=1), nn.GroupNorm(2, size), nn.ReLU(), nn.Dropout(p)
        )
        self.pool = nn.MaxPool1d(3, 1, 1)

    def forward(self, x):
        return self.pool(self.net(x.transpose(1, 2))).transpose(1, 2)


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
    if rng.random() < 0.3:
        layers.insert(rng.randrange(len(layers) + 1), _oddity(rng, size, dim))
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
        lambda: nn.Sequential(nn.RMSNorm(size), nn.Linear(size, size), rng.choice(ACTIVATIONS)()),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(size, size)),
        lambda: nn.utils.spectral_norm(nn.Linear(size, size)),
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
    if layout == "batch first":
        choices += [lambda: Feature(p), lambda: Residual(Convolution(size, p))]
    made = rng.choice(choices)()
    if isinstance(made, WeightDrop) and isinstance(made.module, nn.LSTM):
        return _First(made)
    return made


def _oddity(rng: random.Random, size: int, dim: int) -> nn.Module:
    """Something that makes examples interact, keeps state or draws random numbers."""
    choices = [
        lambda: Centered(dim),
        lambda: Gated(dim),
        lambda: Averaged(dim, size),
        lambda: Paired(dim),
        lambda: OwnNoise(rng.choice(["rows", "NumPy", "Python", "held"]), dim),
    ]
    return rng.choice(choices)()


def changed(made: RandomProblem, seed: int) -> RandomProblem:
    """The same model later in its training: other weights, p, modes or batch."""
    rng = random.Random(seed)
    p, dim = made.problem, made.batch_dim
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in p.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    drops = [m for m in p.model.modules() if isinstance(m, nn.Dropout)]
    kind = rng.choice(["weights", "p", "idle", "mode", "batch"])
    if kind == "p":
        rng.choice(drops).p = 0.45
    elif kind == "idle" and len(drops) > 1:
        rng.choice(drops[1:]).p = 0.0
    elif kind == "mode":
        for module in p.model.modules():
            module.train(not isinstance(module, nn.BatchNorm1d) and module.training)
    elif kind == "batch" and p.inputs.shape[dim] > 3:
        n = p.inputs.shape[dim] - 1
        p = replace(p, inputs=p.inputs.narrow(dim, 0, n), targets=p.targets.narrow(dim, 0, n))
    return RandomProblem(p, dim, f"{made.description}, then {kind}")


class _First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def _loss(rng: random.Random, shape: tuple[int, ...]) -> tuple[Loss, Tensor]:
    kind = rng.choice(
        ["classes", "weighted", "sum", "mse", "bce", "smooth", "smoothed", "closure", "neighbors"]
    )
    if kind == "closure":
        weights = torch.rand(shape, dtype=D)
        return as_loss(lambda f, y: _weighted(f, y, weights)), torch.randn(shape, dtype=D)
    if kind == "neighbors":
        return as_loss(_neighbors), torch.randn(shape, dtype=D)
    if kind == "smoothed" and shape[-1] > 1:
        return CrossEntropy(label_smoothing=0.2), torch.randint(shape[-1], shape[:-1])
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


def _weighted(f: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    kept = weights[tuple(slice(n) for n in f.shape)]
    return (kept * (f - y).square().add(1).log()).mean()


def _neighbors(f: Tensor, y: Tensor) -> Tensor:
    """Examples and steps next to each other have a term in common."""
    rows = f.flatten(0, -2)
    return F.mse_loss(f, y) + (rows[1:] * rows[:-1]).tanh().mean()
