"""More unusual models: dimensions as long as the batch, sparse tensors, and scripted parts."""

import torch
import torch.nn.functional as F
from torch import nn

from odd_models import MODELS, B, Net, labels, loss, model, net, normal
from problems import D

# Dimensions as long as the batch that are not the batch


net(
    "as many prototypes as examples",
    lambda s, x: -torch.cdist(s.hidden(x), s.prototypes.weight) @ s.classes.weight.T,
    prototypes=lambda: nn.Embedding(B, 8),
    classes=lambda: nn.Linear(B, 3),
)
net(
    "as many positions as examples, with dropout",
    lambda s, x: s.b(s.drop(torch.tanh(s.a(x)) + s.drop(s.positions.weight)).mean(1)),
    lambda: normal(B, B, 4),
    positions=lambda: nn.Embedding(B, 8),
)


def valid_tokens():
    """As many of them as there are examples."""
    mask = torch.zeros(B, 3, dtype=torch.bool)
    mask.view(-1)[torch.tensor([0, 3, 5, 9, 12, 16])] = True
    return mask


def _of_valid_tokens(s, x, mask):
    h = s.hidden(x)
    out = torch.zeros_like(h).masked_scatter(mask.unsqueeze(-1), torch.tanh(s.c(h[mask])))
    return s.b(out.mean(1))


@model
def as_many_valid_tokens_as_examples():
    net = Net(_of_valid_tokens, c=nn.Linear(8, 8))
    return net, (normal(B, 3, 4), valid_tokens()), labels(), None


@model
def valid_tokens_in_a_buffer():
    net = Net(lambda s, x: _of_valid_tokens(s, x, s.mask), c=nn.Linear(8, 8))
    net.register_buffer("mask", valid_tokens())
    return net, normal(B, 3, 4), labels(), None


def _experts(s, x):
    tokens = s.hidden(x).flatten(0, 1)
    chosen, out = torch.arange(len(tokens)) % 2, torch.zeros_like(tokens)
    for i, expert in enumerate(s.experts):
        places = (chosen == i).nonzero()[:, 0]
        out = out.index_add(0, places, torch.tanh(expert(tokens[places])))
    return s.b(out.view(len(x), 2, 8).mean(1))


@model
def as_many_tokens_for_each_expert_as_examples():
    experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return Net(_experts, experts=experts), normal(B, 2, 4), labels(), None


# Sparse tensors


def some_of(rows, columns):
    return torch.rand(rows, columns, dtype=D) * (torch.rand(rows, columns) < 0.5)


def _sparse(name, forward, inputs=lambda: normal(B, 4), **buffers):
    def make():
        net = Net(forward)
        for key, buffer in buffers.items():
            net.register_buffer(key, buffer())
        return net, inputs(), labels(), None

    MODELS[name] = make


_sparse(
    "sparse graph in the model",
    lambda s, x: s.b(torch.sparse.mm(s.graph, s.hidden(x))),
    graph=lambda: some_of(B, B).to_sparse_coo(),
)
_sparse(
    "sparse graph in the batch",
    lambda s, x, graph: s.b(torch.sparse.mm(graph, s.hidden(x))),
    lambda: (normal(B, 4), some_of(B, B).to_sparse_coo()),
)
for _layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
    _sparse(
        f"weights in the layout {_layout}",
        lambda s, x: s.b((s.w @ s.hidden(x).T).T),
        w=lambda layout=_layout: some_of(8, 8).to_sparse(layout=layout),
    )


# Scripted parts, pooling with random windows, noise of a large σ


class Doubled(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2.0


@torch.jit.script
def swish(x):
    return torch.sigmoid(x) * x


net("a scripted function", lambda s, x: s.b(swish(s.hidden(x))))
net("a scripted module", lambda s, x: s.b(s.c(s.hidden(x))), c=lambda: torch.jit.script(Doubled()))


@model
def pooling_with_random_windows():
    layers = nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Dropout(0.3), nn.FractionalMaxPool2d(2, 3)
    return (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 3)),
        normal(B, 1, 7, 7),
        labels(),
        None,
    )


def _centered(h):
    return h - h.mean(0)


net(
    "p = 0.999999",
    lambda s, x: s.b(torch.tanh(s.large(s.a(x)))),
    large=lambda: nn.Dropout(0.999999),
)
net(
    "p = 0.999999 and examples that interact",
    lambda s, x: s.b(torch.tanh(_centered(s.large(s.a(x))))),
    large=lambda: nn.Dropout(0.999999),
)

# Losses of torch

loss("multi margin", F.multi_margin_loss)
loss("hinge embedding", F.hinge_embedding_loss, lambda: torch.randint(2, (B, 3)) * 2 - 1)
loss(
    "pinball",
    lambda f, y: torch.maximum(0.3 * (y - f), 0.7 * (f - y)).mean(),
    lambda: normal(B, 3),
)
loss("triplets", lambda f, y: F.triplet_margin_loss(f[:2], f[2:4], f[4:]))
loss(
    "Gaussian with a variance",
    lambda f, y: F.gaussian_nll_loss(f[:, :1], y, f[:, 1:2].exp()),
    lambda: normal(B, 1),
)
loss("Poisson", F.poisson_nll_loss, lambda: torch.rand(B, 3, dtype=D))
loss("Huber", F.smooth_l1_loss, lambda: normal(B, 3))
loss(
    "distillation",
    lambda f, y: F.kl_div(f.log_softmax(-1), y, reduction="batchmean"),
    lambda: normal(B, 3).softmax(-1),
)


# What dropout returns is a new tensor


def _residual_in_place(s, x):
    h = s.a(x)
    r = s.drop(torch.relu(h))
    r += h
    return s.b(r)


def _used_again(s, x):
    """Changes what dropout returns in place, and uses its input again."""
    h = s.a(x)
    r = s.drop(h)
    r += 1.0
    return s.b(torch.tanh(r) + h)


net("a residual in place", _residual_in_place)
net("an input used again", _used_again)
