"""Small nets with masks made by hand, each written in a different way."""

import torch
import torch.nn.functional as F
from torch import nn

P = 0.1


def drop_path(x, p, training):
    """As Transformers writes it: a floor of keep + U, in place."""
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = keep + torch.rand(shape, dtype=x.dtype, device=x.device)
    mask.floor_()
    return x.div(keep) * mask


class DropPath(nn.Module):
    def __init__(self, p=P):
        super().__init__()
        self.p = p

    def forward(self, x):
        return drop_path(x, self.p, self.training)


class TimmDropPath(DropPath):
    """As timm writes it: Bernoulli numbers, scaled in place."""

    def forward(self, x):
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        mask.div_(1 - self.p)
        return x * mask


class NamedTensor(DropPath):
    """The model draws into a tensor and uses that tensor."""

    def forward(self, x):
        mask = x.new_empty(len(x), 1, 1)
        mask.bernoulli_(1 - self.p)
        return x * mask / (1 - self.p)


class PerBatch(DropPath):
    """torchvision's stochastic depth in mode "batch"."""

    def forward(self, x):
        noise = torch.empty([1] * x.ndim, dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(1 - self.p).div_(1 - self.p)


class ResidualBranch(DropPath):
    """A residual branch that one random number keeps or drops."""

    def forward(self, x):
        return x * (torch.rand(()) >= self.p) / (1 - self.p)


class DropTokens(DropPath):
    """Drops whole tokens."""

    def forward(self, x):
        dropped = torch.rand(x.shape[:2], device=x.device) < self.p
        return x.masked_fill(dropped.unsqueeze(-1), 0.0)


class DropByWhere(DropPath):
    """Drops entries by ``torch.where``."""

    def forward(self, x):
        return torch.where(torch.rand_like(x) > self.p, x, torch.zeros_like(x)) / (1 - self.p)


class DropByIndex(DropPath):
    """Sets entries to zero, with the mask as an index."""

    def forward(self, x):
        x = x.clone()
        x[torch.rand(x.shape[:2]) < self.p] = 0.0
        return x


class Zoneout(DropPath):
    """An entry keeps its old value: the mask is used twice."""

    def forward(self, x):
        old = torch.roll(x, 1, 1)
        mask = torch.empty_like(x).uniform_().lt(self.p).to(x.dtype)
        return mask * old + (1 - mask) * x


class Distribution(DropPath):
    def forward(self, x):
        keep = torch.distributions.Bernoulli(1 - self.p)
        return x * keep.sample((len(x), 1, 1)).to(x) / (1 - self.p)


class NativeMask(DropPath):
    """The mask that torch's own dropout returns."""

    def forward(self, x):
        _, mask = torch.native_dropout(torch.ones_like(x[:, :, :1]), self.p, True)
        return x * mask / (1 - self.p)


class RankDropout(DropPath):
    """Drops rows of a weight; the mask is divided by its mean, as in PEFT's LoHa and LoKr."""

    rescaled = True

    def __init__(self, p=P):
        super().__init__(p)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        weight = self.weight
        drop = (torch.rand(weight.size(0)) > self.p).to(weight.dtype)
        drop = drop.view(-1, 1)
        if self.rescaled:
            drop /= drop.mean()
        weight = weight * drop
        return F.linear(x, weight)


class ModuleDropout(DropPath):
    """Drops what an adapter adds: a random branch that skips no module, as in PEFT."""

    def __init__(self, p=P):
        super().__init__(p)
        self.base, self.delta = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        result = self.base(x)
        if not self.training or (self.training and torch.rand(1) > self.p):
            result = result + F.linear(x, self.delta)
        return result


class EmbeddingRows(DropPath):
    """Drops rows of an embedding table, as AWD-LSTM does."""

    def __init__(self, p=P):
        super().__init__(p)
        self.table = nn.Parameter(torch.randn(5, 8) / 2)

    def forward(self, x):
        table = self.table
        mask = table.new_empty((table.size(0), 1)).bernoulli_(1 - self.p).expand_as(table)
        return x + F.embedding(torch.arange(x.shape[1]) % 5, table * mask / (1 - self.p))


class DropBlock(DropPath):
    """Drops blocks as timm does in an image, here along the tokens."""

    rescaled = True

    def forward(self, x):
        x = x.transpose(1, 2)
        with torch.no_grad():
            dropped = torch.empty(len(x), 1, x.shape[2], dtype=x.dtype).bernoulli_(self.p / 3)
            dropped = F.max_pool1d(dropped, kernel_size=3, stride=1, padding=1)
            keep = 1.0 - dropped
            if self.rescaled:
                keep.mul_((keep.numel() / keep.sum().add(1e-7)).to(x.dtype))
        return (x * keep).transpose(1, 2)


class Residual(nn.Module):
    """Two residual blocks; ``drop`` makes a module that drops their outputs before the sum."""

    scale = 1.0

    def __init__(self, drop):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.drops = nn.ModuleList([drop(), drop()])

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for block, drop in zip(self.blocks, self.drops, strict=True):
            h = h + self.scale * drop(torch.tanh(block(h)))
        return self.last(h.mean(1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return (x + scale * torch.tanh(self.linear(x)), None)


class LayerDrop(nn.Module):
    """Skips layers at random, as BART and Wav2Vec2 do."""

    scale = 1.0

    def __init__(self, p=P, skip="continue"):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layerdrop, self.skip = p, skip

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            chance = torch.rand([])
            if self.skip == "continue":
                if self.training and chance < self.layerdrop:
                    continue
                h = layer(h, self.scale)[0]
            else:
                skipped = self.training and chance.item() < self.layerdrop
                if not skipped:
                    h = layer(h, self.scale)[0]
                if skipped:
                    assert h is not None
        return self.last(h.mean(1))


KINDS = {
    "drop path": (lambda: Residual(DropPath), "per example"),
    "timm's drop path": (lambda: Residual(TimmDropPath), "per example"),
    "a named tensor": (lambda: Residual(NamedTensor), "per example"),
    "per batch": (lambda: Residual(PerBatch), "per batch"),
    "branch": (lambda: Residual(ResidualBranch), "per batch"),
    "tokens": (lambda: Residual(DropTokens), "independent"),
    "where": (lambda: Residual(DropByWhere), "independent"),
    "index": (lambda: Residual(DropByIndex), "independent"),
    "zoneout": (lambda: Residual(Zoneout), "independent"),
    "distribution": (lambda: Residual(Distribution), "per example"),
    "native dropout's mask": (lambda: Residual(NativeMask), "per token"),
    "a mask that keeps few": (lambda: Residual(lambda: DropPath(0.7)), "per example"),
    "a mask that drops many": (lambda: Residual(lambda: DropTokens(0.7)), "independent"),
    "module dropout": (lambda: Residual(ModuleDropout), "per batch"),
    "rank dropout": (lambda: Residual(RankDropout), "shared by all examples"),
    "embedding rows": (lambda: Residual(EmbeddingRows), "shared by all examples"),
    "DropBlock": (lambda: Residual(DropBlock), "per feature"),
    "LayerDrop": (LayerDrop, "per batch"),
    "LayerDrop by item": (lambda: LayerDrop(skip="item"), "per batch"),
    "LayerDrop that skips most": (lambda: LayerDrop(0.7), "per batch"),
    "module dropout that drops most": (lambda: Residual(lambda: ModuleDropout(0.7)), "per batch"),
}
"""A net of each kind, and its mask structure."""

MOSTLY = (
    "a mask that keeps few",
    "a mask that drops many",
    "LayerDrop that skips most",
    "module dropout that drops most",
)
DROPPED = {"DropBlock": P / 3, **dict.fromkeys(MOSTLY, 0.7)}
"""The p of kinds that do not have p = P."""
