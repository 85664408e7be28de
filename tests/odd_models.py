"""Models, losses and random numbers that are unusual, but that somebody trains."""

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from problems import D, Problem
from undrop.losses import CrossEntropy, as_loss

B = 6
MODELS, LOSSES = {}, {}


class Net(nn.Module):
    """Two layers, a dropout between them, other modules, and a custom forward."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self.way = forward

    def hidden(self, x):
        return self.drop(torch.tanh(self.a(x)))

    def forward(self, *args, **kwargs):
        return self.way(self, *args, **kwargs)


def normal(*shape):
    return torch.randn(*shape, dtype=D)


def labels(n=B):
    return torch.randint(3, (n,))


def problem(name):
    """The problem of that name, in float64."""
    torch.manual_seed(0)
    model, inputs, targets, loss = (MODELS | LOSSES)[name]()
    model = model.to(D) if not any(p.is_complex() for p in model.parameters()) else model
    return Problem(model, inputs, targets, CrossEntropy() if loss is None else as_loss(loss))


def model(function):
    MODELS[function.__name__.replace("_", " ")] = function
    return function


def rows():
    return normal(B, 4)


def net(name, forward, inputs=rows, **modules):
    """Register a ``Net`` with labels and cross-entropy."""
    MODELS[name] = lambda: (
        Net(forward, **{k: m() for k, m in modules.items()}),
        inputs(),
        labels(),
        None,
    )


def loss(name, function, targets=labels):
    def make():
        return Net(lambda s, x: s.b(s.hidden(x))), normal(B, 4), targets(), function

    LOSSES[name] = make


# Layers and wrappers of torch


@model
def encoder_with_nested_tensors():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3)), normal(B, 3, 8), labels(), None


@model
def encoder_with_padding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
    mask = torch.zeros(B, 5, dtype=torch.bool)
    mask[1, 3:] = mask[4, 2:] = True
    net = Net(
        lambda s, x, mask: s.out(s.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 2),
        out=nn.Linear(8, 3),
    )
    return net, (normal(B, 5, 8), mask), labels(), None


def _with_weights(average, s, x):
    out, weights = s.attention(x, x, x, need_weights=True, average_attn_weights=average)
    return s.b(out[:, 0]) + weights.flatten(1).sum(1, keepdim=True).tanh()


for _average in (True, False):
    net(
        f"attention weights, averaged {_average}",
        partial(_with_weights, _average),
        partial(normal, B, 4, 8),
        attention=lambda: nn.MultiheadAttention(8, 2, 0.3, batch_first=True),
    )


@model
def tied_weights():
    def forward(s, tokens):
        return s.drop(torch.tanh(s.drop(s.words(tokens)).mean(1))) @ s.words.weight.T

    return Net(forward, words=nn.Embedding(7, 5)), torch.randint(7, (B, 4)), labels(), None


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class WeightDropout(nn.Module):
    def forward(self, w):
        return F.dropout(w, 0.3, self.training)


def _parametrized(kind, size):
    layer = nn.Linear(size, 8)
    parametrize.register_parametrization(layer, "weight", kind())
    return layer


net("parametrization", lambda s, x: s.b(s.c(s.hidden(x))), c=lambda: _parametrized(Symmetric, 8))
net(
    "dropout in a parametrization",
    lambda s, x: s.b(torch.tanh(s.c(x))),
    c=lambda: _parametrized(WeightDropout, 4),
)
for _name, _norm in (
    ("weight norm", parametrizations.weight_norm),
    ("old weight norm", nn.utils.weight_norm),
    ("spectral norm", parametrizations.spectral_norm),
    ("orthogonal", parametrizations.orthogonal),
):
    net(_name, lambda s, x: s.b(s.c(s.hidden(x))), c=lambda norm=_norm: norm(nn.Linear(8, 8)))
net("checkpointed segment", lambda s, x: s.b(checkpoint(s.hidden, x, use_reentrant=False)))
net("functional_call", lambda s, x: s.b(_scaled_call(s, x)))


def _scaled_call(s, x):
    return torch.tanh(
        functional_call(s.a, {k: 1.5 * v for k, v in s.a.named_parameters()}, (s.drop(x),))
    )


@model
def channels_last():
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 3))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    last = {"memory_format": torch.channels_last}
    return net.to(**last), normal(B, 2, 5, 5).to(**last), labels(), None


def _tag(s, x, lengths):
    """Return an output for every step of every packed sequence."""
    rows = pack_padded_sequence(s.before(x), lengths, batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(s.rnn(rows)[0], batch_first=True, total_length=x.shape[1])
    return s.b(s.drop(out))


def _tagger(rnn, before):
    inputs = normal(B, 4, 4), torch.tensor([4, 3, 2, 4, 1, 3])
    return Net(_tag, rnn=rnn, before=before), inputs, torch.randint(3, (B, 4)), None


@model
def packed_sequences_with_a_target_per_step():
    return _tagger(
        nn.GRU(4, 4, 3, batch_first=True, dropout=0.3, bidirectional=True), nn.Identity()
    )


@model
def packed_sequences_after_a_dropout():
    return _tagger(nn.LSTM(4, 8, 2, batch_first=True, dropout=0.3), nn.Dropout(0.2))


@model
def packed_sequences():
    def forward(s, x, lengths):
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(s.rnn(rows)[0], batch_first=True)
        return s.b(s.drop(out.sum(1)))

    rnn = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.3)
    return (
        Net(forward, rnn=rnn),
        (normal(B, 4, 4), torch.tensor([4, 3, 2, 4, 1, 3])),
        labels(),
        None,
    )


@model
def embedding_bag():
    net = Net(lambda s, t, o: s.b(s.drop(torch.tanh(s.words(t, o)))), words=nn.EmbeddingBag(9, 8))
    return net, (torch.randint(9, (14,)), torch.tensor([0, 2, 4, 7, 9, 13])), labels(), None


# Custom derivatives


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g


class Reversed(torch.autograd.Function):
    """The identity with a gradient of the opposite sign, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def _hooked(s, x):
    h = s.hidden(x)
    h.register_hook(lambda g: 2.0 * g)
    return s.b(h)


def _hooked_if_it_has_a_graph(s, x):
    h = s.hidden(x)
    if h.requires_grad:
        h.register_hook(lambda g: 2.0 * g)
    return s.b(h - h.mean(0))


def _force(s, x):
    """The gradient of an energy, as molecular models return it."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(s.b(s.hidden(x)).sum(), x, create_graph=True)[0]


def _inner_step(s, x):
    """One step of gradient descent within the model, as in meta-learning."""
    weights = dict(s.a.named_parameters())
    inner = s.drop(functional_call(s.a, weights, (x,))).square().mean()
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {k: v - 0.1 * g for (k, v), g in zip(weights.items(), gradients, strict=True)}
    return s.b(s.drop(torch.tanh(functional_call(s.a, moved, (x,)))))


def _without_gradients(s, x):
    with torch.no_grad():
        gate = torch.sigmoid(s.a(s.drop(x)))
    return s.b(torch.tanh(s.a(x)) * gate)


def _quantized(s, x):
    h = s.hidden(x)
    code = s.codes(torch.cdist(h, s.codes.weight).argmin(-1))
    return s.b(h + (code - h).detach())


def _unit(s, x):
    h = s.hidden(x)
    return s.b(h / h.detach().norm(dim=-1, keepdim=True))


net("custom function", lambda s, x: s.b(Cube.apply(s.hidden(x))))
net("reversed gradient", lambda s, x: s.b(Reversed.apply(s.hidden(x))))
net("straight through", lambda s, x: s.b(s.hidden(x) + 0.1 * Rounded.apply(3 * s.a(x))))
net("hook", _hooked)
net("hook where there is a graph", _hooked_if_it_has_a_graph)
MODELS["force"] = lambda: (Net(_force), normal(B, 4), normal(B, 4), nn.MSELoss())
net("inner step", _inner_step)
net("no_grad inside", _without_gradients)
net("vector quantization", _quantized, codes=lambda: nn.Embedding(5, 8))
net("detached norm", _unit)
net("a number read from the batch", lambda s, x: (lambda h: s.b(h / h.norm().item()))(s.hidden(x)))


# State and changes in place


def _doubles_its_input(s, x):
    x.mul_(2.0)
    return s.b(s.hidden(x))


def _sets_entries(s, x):
    h = s.hidden(x)
    out = h.new_zeros(h.shape)
    out[:, ::2] = h[:, ::2]
    return s.b(out)


class MovingMean(Net):
    def __init__(self, buffer):
        super().__init__(None)
        if buffer:
            self.register_buffer("mean", torch.zeros(8))
        else:
            self.mean = torch.zeros(8, dtype=D)

    def forward(self, x):
        h = self.hidden(x)
        mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.mean = mean
        return self.b(h - mean)


class LastHidden(Net):
    """Adds what it computed in the call before."""

    def __init__(self):
        super().__init__(None)
        self.last = None

    def forward(self, x):
        h = self.hidden(x)
        if self.last is not None and self.last.shape == h.shape:
            h = h + self.last
        self.last = h.detach()
        return self.b(h)


class OneRowEach(Net):
    """Has separate weights for each example of the only batch, as a graph network may."""

    def __init__(self, late):
        super().__init__(None)
        self.late, self.rows = late, nn.Parameter(torch.randn(B, 8))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(self.drop(h) + self.rows if self.late else self.drop(h + self.rows))


net("changes its input", _doubles_its_input)
net("sets entries", _sets_entries)
for _name, _make in {
    "moving mean in a buffer": lambda: MovingMean(True),
    "moving mean in an attribute": lambda: MovingMean(False),
    "last hidden state": LastHidden,
    "a row of weights for each example": lambda: OneRowEach(False),
    "a row of weights for each example, late": lambda: OneRowEach(True),
}.items():
    MODELS[_name] = lambda make=_make: (make(), normal(B, 4), labels(), None)


# Complex numbers, linear algebra, sorting, routing


class ComplexWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = nn.Linear(4, 8, dtype=D), nn.Dropout(0.3)
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex128))

    def forward(self, x):
        parts = (self.drop(torch.tanh(self.a(x))), self.a(x))
        return (torch.view_as_complex(torch.stack(parts, -1)) @ self.weight).real


MODELS["complex weights"] = lambda: (ComplexWeights(), normal(B, 4), labels(), None)
net("FFT of the features", lambda s, x: s.b(torch.fft.fft(s.hidden(x), dim=-1).abs()))
net("FFT of the batch", lambda s, x: s.b(torch.fft.fft(s.hidden(x), dim=0).real))
net("an integer output", lambda s, x: (lambda h: (h, h.argmax(-1)))(s.b(s.hidden(x))))
net("sorted features", lambda s, x: s.b(s.hidden(x).sort(-1).values))
net("sorted batch", lambda s, x: s.b(s.hidden(x).sort(0).values))
net("cumulative sum over the batch", lambda s, x: s.b(s.hidden(x).cumsum(0)))
net(
    "distances between examples",
    lambda s, x: (lambda h: s.b(h) + torch.cdist(h, h)[:, :3])(s.hidden(x)),
)
net(
    "spectral norm of the batch",
    lambda s, x: (lambda h: s.b(h / torch.linalg.matrix_norm(h, 2)))(s.hidden(x)),
)
net("bilinear", lambda s, x: (lambda h: s.c(h, h))(s.hidden(x)), c=lambda: nn.Bilinear(8, 8, 3))
net("one output for the batch", lambda s, x: s.b(s.hidden(x).mean(0))[None].expand(len(x), 3))


def _solved(s, x):
    h = s.hidden(x)
    return s.b(torch.linalg.solve(torch.eye(8, dtype=D) + 0.1 * h[:, :, None] * h[:, None], h))


def _top_three(s, x):
    h = s.hidden(x)
    values, places = h.topk(3, -1)
    return s.b(torch.zeros_like(h).scatter(-1, places, values.softmax(-1)))


def _experts(capacity, s, x):
    h, expert = s.hidden(x), s.router(x).argmax(-1)
    out = h.new_zeros(len(h), 3)
    for k, layer in enumerate(s.experts):
        rows = (expert == k).nonzero().flatten()[: capacity and max(1, len(h) // 3)]
        out = out.index_add(0, rows, layer(h[rows])) if len(rows) else out
    return out


def _balanced(s, x):
    h = s.hidden(x)
    return s.b(h) + s.router(h[:, :4]).softmax(-1).mean(0).square().sum()


def _until_it_settles(s, x):
    h, x = torch.zeros(len(x), 8, dtype=D), s.a(x)
    for _ in range(50):
        new = torch.tanh(0.3 * s.c(s.drop(h)) + x)
        if (new - h).abs().max() < 1e-3:
            break
        h = new
    return s.b(h)


net("linear solve", _solved)
net("largest three", _top_three)
for _capacity in (None, True):
    net(
        f"mixture of experts{', with a capacity' if _capacity else ''}",
        partial(_experts, _capacity),
        router=lambda: nn.Linear(4, 2),
        experts=lambda: nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]),
    )
net("load balancing", _balanced, router=lambda: nn.Linear(4, 2))
net("iterates until it settles", _until_it_settles, c=lambda: nn.Linear(8, 8))


# Random numbers that the model draws


class Augmentation:
    """A plain object, not a module, that holds a generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, h):
        return h * (1 + torch.rand((), generator=self.generator))


_GLOBAL = torch.Generator().manual_seed(5)


def _mixed_up(s, x):
    h = s.hidden(x)
    return s.b(0.7 * h + 0.3 * h[torch.rand(len(h)).argsort()])


def _sampled_latent(s, x):
    h = s.hidden(x)
    return s.b(torch.distributions.Normal(h, F.softplus(h)).rsample())


def _bayesian(s, x):
    weight = s.b.weight + 0.1 * torch.randn_like(s.b.weight)
    return F.linear(s.hidden(x), weight, s.b.bias)


net("a float32 mask", lambda s, x: s.b(s.hidden(x) * (torch.rand(B, 1) < 0.7) / 0.7))
net("Gumbel softmax", lambda s, x: s.b(F.gumbel_softmax(s.hidden(x), tau=0.7)))
net("sampled latent", _sampled_latent)
net("RReLU", lambda s, x: s.b(F.rrelu(s.hidden(x), training=True)))
net("mixup", _mixed_up)
net("random weights", _bayesian)
net("Python's SystemRandom", lambda s, x: s.b(s.hidden(x)) * (1 + random.SystemRandom().random()))
net(
    "a fresh NumPy generator",
    lambda s, x: s.b(s.hidden(x)) * (1 + np.random.default_rng().random()),
)
net("a global generator", lambda s, x: s.b(s.hidden(x)) * (1 + torch.rand((), generator=_GLOBAL)))
MODELS["a generator in an object"] = lambda: (
    (lambda draw: Net(lambda s, x: s.b(draw(s.hidden(x)))))(Augmentation()),
    normal(B, 4),
    labels(),
    None,
)


# Losses


def focal(f, y):
    each = F.cross_entropy(f, y, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def contrastive(f, y):
    f = F.normalize(f, dim=-1)
    return F.cross_entropy(f @ f.T / 0.5, torch.arange(len(f)).roll(1))


loss("summed by hand", lambda f, y: F.cross_entropy(f, y, reduction="none").sum() / len(y))
loss("scaled for float16", lambda f, y: 65536.0 * F.cross_entropy(f, y))
loss("focal", focal)
loss("hardest examples", lambda f, y: F.cross_entropy(f, y, reduction="none").topk(3).values.mean())
loss("contrastive", contrastive)
loss("triplets", lambda f, y: F.triplet_margin_loss(f[:2], f[2:4], f[4:], margin=5.0))
loss("cosine", lambda f, y: 1 - F.cosine_similarity(f, y).mean(), partial(normal, B, 3))
loss("Poisson", nn.PoissonNLLLoss(), lambda: torch.rand(B, 3, dtype=D))
loss("Huber", nn.HuberLoss(delta=4.0), partial(normal, B, 3))
loss(
    "Gaussian",
    lambda f, y: F.gaussian_nll_loss(f[:, 0], y, F.softplus(f[:, 1]) + 0.1),
    partial(normal, B),
)
loss(
    "quantiles",
    lambda f, y: torch.maximum(0.9 * (y - f), -0.1 * (y - f)).mean(),
    partial(normal, B, 3),
)
