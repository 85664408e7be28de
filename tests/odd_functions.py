"""More unusual models, losses and sources of random numbers: imported, it adds them to odd_models."""

import itertools
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from odd_models import MODELS, B, D, Net, labels, loss, net, normal, rows


def gram(h):
    return torch.einsum("bi,bj->bij", h, h) + torch.diag(torch.arange(1.0, 9.0, dtype=D))


# Functions of the features

net("eigenvalues", lambda s, x: s.b(torch.linalg.eigvalsh(gram(s.hidden(x)))))
net("Cholesky factors", lambda s, x: s.b(torch.linalg.cholesky(gram(s.hidden(x)))[:, -1]))
net(
    "distances to centers",
    lambda s, x: -torch.cdist(s.hidden(x), s.c.weight),
    c=lambda: nn.Linear(8, 3),
)
net("logcumsumexp", lambda s, x: s.b(torch.logcumsumexp(s.hidden(x), 1)))
net("median of the features", lambda s, x: s.b((h := s.hidden(x)) - h.median(1, True).values))
net("dropout in place", lambda s, x: s.b(torch.tanh(F.dropout(s.a(x), 0.3, True, inplace=True))))
net("dropout3d", lambda s, x: s.b(F.dropout3d(s.hidden(x).view(-1, 2, 1, 2, 2), 0.3).flatten(1)))
net("dropout1d of one row", lambda s, x: s.b(F.dropout1d(s.hidden(x), 0.3)))
net(
    "transposed convolution",
    lambda s, x: s.b(s.c(s.hidden(x)[:, None]).flatten(1)[:, :8]),
    c=lambda: nn.ConvTranspose1d(1, 2, 3),
)
net("gated linear unit", lambda s, x: s.c(F.glu(s.hidden(x))), c=lambda: nn.Linear(4, 3))
net("group norm", lambda s, x: s.b(s.n(s.hidden(x))), n=lambda: nn.GroupNorm(2, 8))
net(
    "weights made by each example",
    lambda s, x: torch.einsum("bi,bij->bj", s.hidden(x), s.c(s.hidden(x)).view(-1, 8, 3)),
    c=lambda: nn.Linear(8, 24),
)


def _looked_up(s, x):
    h = s.hidden(x)
    places = torch.stack([torch.tanh(h), torch.zeros_like(h)], -1)[:, None]
    return s.b(F.grid_sample(h[:, None, None], places, align_corners=False).flatten(1))


def _grouped_by(s, x):
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 4, 7]).expand(len(x), 8)
    return s.b(torch.zeros(len(x), 8, dtype=D).scatter_reduce(1, groups, s.hidden(x), "mean"))


def _causal(s, x):
    h = s.hidden(x).view(-1, 4, 2)
    return s.b(F.scaled_dot_product_attention(h, h, h, dropout_p=0.2, is_causal=True).flatten(1))


def _grouped_queries(s, x):
    h = s.hidden(x)
    q, k = h.view(-1, 2, 2, 2), h.view(-1, 1, 4, 2)
    out = F.scaled_dot_product_attention(q, k, k, dropout_p=0.2, enable_gqa=True)
    return s.b(out.flatten(1))


net("grid sample", _looked_up)
net("scatter reduce", _grouped_by)
net("causal attention", _causal)
net("grouped queries", _grouped_queries)


# Drop probabilities and passes


def _p_of_the_data(s, x):
    return s.b(F.dropout(torch.tanh(s.a(x)), float(torch.sigmoid(x.mean()))))


def _p_of_another_site(s, x):
    p = float(torch.sigmoid(s.hidden(x).detach().mean()))
    return s.b(F.dropout(s.hidden(x), p))


net("p that depends on the data", _p_of_the_data)
net("p that depends on another site", _p_of_another_site)
net("mean of four masks", lambda s, x: s.b(torch.stack([s.hidden(x) for _ in range(4)]).mean(0)))
net(
    "batch repeated inside",
    lambda s, x: s.b(s.hidden(x.repeat(4, 1)).view(4, len(x), 8).mean(0)),
)
net(
    "examples repeated inside",
    lambda s, x: s.b(s.hidden(x.repeat_interleave(4, 0)).view(len(x), 4, 8).mean(1)),
)
net("batch in two parts", lambda s, x: torch.cat([s.b(s.hidden(part)) for part in x.chunk(2)]))
net("one example at a time", lambda s, x: torch.stack([s.b(s.hidden(row)) for row in x]))
net("batch in reverse", lambda s, x: s.b(s.hidden(x.flip(0))).flip(0))


# Examples that interact


def _whitened(s, x):
    h = s.hidden(x)
    return s.b(torch.linalg.solve(torch.cov(h.T) + torch.eye(8, dtype=D), h.T).T)


def _adaptive_steps(s, x):
    h, t = s.hidden(x), 0.0
    while t < 1.0:
        v = torch.tanh(s.f(h))
        step = min(1.0 - t, 0.3 / (0.1 + float(v.detach().abs().max())))
        h, t = h + step * v, t + step
    return s.b(h)


net("whitened batch", _whitened)
net("steps as long as the batch allows", _adaptive_steps, f=lambda: nn.Linear(8, 8))
net("next example as a factor", lambda s, x: s.b((h := s.hidden(x)) * h.roll(1, 0)))
net("first example added to all", lambda s, x: s.b((h := s.hidden(x)) + h[:1]))
net(
    "batch norm without momentum",
    lambda s, x: s.b(s.n(s.hidden(x))),
    n=lambda: nn.BatchNorm1d(8, momentum=None),
)
net(
    "attention between examples",
    lambda s, x: s.b(F.scaled_dot_product_attention(h := s.hidden(x), h, h, dropout_p=0.2)),
)


class Queue(Net):
    """Attends to what it saw in earlier steps."""

    def __init__(self):
        super().__init__(None)
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h, seen = self.hidden(x), self.queue.clone()
        with torch.no_grad():
            self.queue[(self.place + torch.arange(len(h))) % 12] = h.detach()
            self.place += len(h)
        return self.b(h + torch.softmax(h @ seen.T, -1) @ seen)


class Pair(Net):
    def forward(self, left, right):
        left, right = self.hidden(torch.cat([left, right])).chunk(2)
        return self.b((left - right).abs())


class Graphs(Net):
    """Nodes of several graphs, added up in each."""

    def forward(self, nodes, graph):
        return self.b(torch.zeros(B, 8, dtype=D).index_add(0, graph, self.hidden(nodes)))


class Cells(Net):
    def __init__(self):
        super().__init__(None)
        self.cell = nn.LSTMCell(4, 8)

    def forward(self, x):
        h = c = torch.zeros(len(x), 8, dtype=D)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (self.drop(h), c))
        return self.b(h)


class BothWays(nn.Module):
    """A state as an input, with the batch in its second dimension."""

    def __init__(self):
        super().__init__()
        self.layers = nn.GRU(4, 5, 2, dropout=0.3, bidirectional=True)
        self.b = nn.Linear(10, 3)

    def forward(self, x, state):
        return self.b(self.layers(x, state)[0][-1])


NODES = {"nodes": (13, 4), "graph": torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 5, 5, 5])}

MODELS["queue of earlier examples"] = lambda: (Queue(), rows(), labels(), None)
MODELS["both inputs in one call"] = lambda: (Pair(None), (rows(), rows()), labels(), None)
MODELS["cells of an LSTM"] = lambda: (Cells(), normal(B, 3, 4), labels(), None)
MODELS["state of a GRU as an input"] = lambda: (
    BothWays(),
    {"x": normal(3, B, 4), "state": normal(4, B, 5)},
    labels(),
    None,
)
MODELS["sums over graphs"] = lambda: (
    Graphs(None),
    {"nodes": normal(*NODES["nodes"]), "graph": NODES["graph"]},
    labels(),
    None,
)


# Sources of random numbers


class Held(Net):
    def __init__(self, source, draw):
        super().__init__(None)
        self.source, self.draw = source, draw

    def forward(self, x):
        h = self.hidden(x)
        return self.b(h * (1 + self.draw(self.source, h)))


def held(name, make, draw):
    MODELS[name] = lambda: (Held(make(), draw), rows(), labels(), None)


def drawn(name, draw):
    held(name, lambda: None, lambda _, h: draw(h))


def _seeded_by_torch(h):
    return torch.from_numpy(np.random.default_rng(int(torch.randint(99, ()))).random(h.shape))


def _student(h):
    return torch.distributions.StudentT(torch.tensor(5.0, dtype=D), 0.0, h.abs() + 0.1).rsample()


def _relaxed(h):
    return torch.distributions.RelaxedBernoulli(torch.tensor(0.5, dtype=D), logits=h).rsample()


held(
    "a NumPy generator of the model",
    lambda: np.random.default_rng(3),
    lambda g, h: torch.from_numpy(g.random(h.shape)),
)
held(
    "a RandomState of the model",
    lambda: np.random.RandomState(3),
    lambda g, h: torch.from_numpy(g.rand(*h.shape)),
)
held("a Random of the model", lambda: random.Random(3), lambda g, h: g.random())
held(
    "a generator in a dict",
    lambda: {"a": torch.Generator().manual_seed(3)},
    lambda g, h: torch.rand(h.shape, generator=g["a"]),
)
held(
    "a generator in a dict in a list",
    lambda: [{"a": torch.Generator().manual_seed(3)}],
    lambda g, h: torch.rand(h.shape, generator=g[0]["a"]),
)
drawn("NumPy seeded by torch", _seeded_by_torch)
drawn("Poisson numbers", lambda h: torch.poisson(torch.ones_like(h)))
drawn(
    "binomial numbers", lambda h: torch.binomial(5 * torch.ones_like(h), 0.4 * torch.ones_like(h))
)
drawn("geometric numbers", lambda h: torch.empty_like(h).geometric_(0.4).detach())
drawn("Cauchy numbers", lambda h: torch.empty_like(h).cauchy_().clamp(-2, 2).detach())
drawn("von Mises", lambda h: torch.distributions.VonMises(torch.zeros_like(h), 1.0).sample())
drawn("Student's t with a scale", _student)
drawn("relaxed Bernoulli", _relaxed)
drawn("features in Python's order", lambda h: h[:, sorted(range(8), key=lambda _: random.random())])
drawn("a clock", lambda h: time.perf_counter() % 1.0)
held("a counter", itertools.count, lambda g, h: 0.1 * next(g))
held(
    "a Sobol sequence",
    lambda: torch.quasirandom.SobolEngine(8, scramble=True, seed=1),
    lambda g, h: g.draw(len(h)).double(),
)


# Losses


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=D))

    def forward(self, f, y):
        return F.cross_entropy(self.scale * F.normalize(f, dim=-1), y)


def dice(f, y):
    f = torch.sigmoid(f)
    return 1 - 2 * (f * y).sum() / (f.sum() + y.sum())


def decorrelated(f, y):
    left, right = f[:3] - f[:3].mean(0), f[3:] - f[3:].mean(0)
    return (left.T @ right - torch.eye(3, dtype=D)).square().sum()


def numbers():
    return normal(B, 3)


def yes_or_no():
    return (torch.rand(B, 3) > 0.5).to(D)


def risk(f, y):
    return -(f[:, 0] - torch.logcumsumexp(f[:, 0].flip(0), 0).flip(0)).mean()


loss("learned temperature", Temperature())
loss("log cosh", lambda f, y: torch.log(torch.cosh(f - y)).mean(), numbers)
loss("Dice", dice, yes_or_no)
loss("Cox", risk)
loss("Barlow twins", decorrelated)
loss(
    "ranking of the batch",
    lambda f, y: F.kl_div(F.log_softmax(f, 0), torch.softmax(y, 0), reduction="batchmean"),
    numbers,
)
loss("class probabilities", F.cross_entropy, lambda: torch.softmax(numbers(), -1))
loss("soft margin", nn.SoftMarginLoss(), lambda: 2 * yes_or_no() - 1)
loss("several labels", nn.MultiLabelSoftMarginLoss(), yes_or_no)
loss("quantile of the batch", lambda f, y: F.cross_entropy(f, y, reduction="none").quantile(0.7))
loss("divided by itself", lambda f, y: (v := F.cross_entropy(f, y)) / v.detach())
loss("exponential tilt", lambda f, y: F.cross_entropy(f, y, reduction="none").exp().mean().log())
