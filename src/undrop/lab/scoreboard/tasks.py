"""The scoreboard's tasks and their models. To add a task, register a :class:`Task` in ``TASKS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from undrop.lab.models import GPT, MLP
from undrop.lab.scoreboard import data
from undrop.losses import MSE, CrossEntropy, Loss
from undrop.noise import structured_dropout
from undrop.registry import Registry


class _Block(nn.Module):
    """A residual block that drops its branch for random examples (stochastic depth)."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.branch = nn.Sequential(
            nn.GroupNorm(4, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, h: Tensor) -> Tensor:
        branch = self.branch(h)
        return h + structured_dropout(branch, self.p, shared=(1, 2, 3), training=self.training)


class ResidualNet(nn.Module):
    """A ConvNet with stochastic depth (Huang et al. 2016): p rises linearly from block to block."""

    def __init__(self, p: float, *, depth: int = 4, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(_Block(width, p * (i + 1) / depth) for i in range(depth))
        self.head = nn.Linear(width * 49, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, 1, 14, 14)."""
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(h.flatten(1))
        return logits


class GCN(nn.Module):
    """Two graph convolutions with dropout on their inputs (Kipf & Welling 2017).

    An input row is a node's row of the normalized adjacency matrix, followed by the node's features.
    """

    def __init__(self, nodes: int, features: int, classes: int, p: float, width: int = 32) -> None:
        super().__init__()
        self.nodes = nodes
        self.dropouts = nn.ModuleList([nn.Dropout(p), nn.Dropout(p)])
        self.hidden, self.output = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits (nodes, classes)."""
        adjacency, x = rows[:, : self.nodes], rows[:, self.nodes :]
        h = torch.relu(adjacency @ self.hidden(self.dropouts[0](x)))
        logits: Tensor = adjacency @ self.output(self.dropouts[1](h))
        return logits


class _LoRA(nn.Module):
    """A frozen linear layer plus a trainable low-rank one, which has dropout on its input."""

    def __init__(self, base: nn.Linear, rank: int, p: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(p)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))
        return y


_GPT_SIZES = {"size": 64, "layers": 2, "heads": 4, "context": 32}
VOCABULARY = 1_000  # of the pretrained GPT
_WIKITEXT = "wikitext-2/wiki.train.tokens"
_SHAKESPEARE = "tinyshakespeare/input.txt"


@cache
def _pretrained(root: Path) -> dict[str, Tensor]:
    """Return the weights of a small GPT after two epochs on 100,000 words of WikiText-2."""
    text = data.words(root, 0, _WIKITEXT, (100_000, 1_000, 1_000), VOCABULARY, 32, _WIKITEXT)
    torch.manual_seed(0)
    model = GPT(VOCABULARY, dropout=0.0, attention_dropout=0.0, **_GPT_SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for inputs, targets in data.batches(text, "train", 20, generator):
            optimizer.zero_grad()
            logits, _ = model(inputs)
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class AdaptedGPT(nn.Module):
    """A GPT that was trained on WikiText-2, with LoRA adapters (Hu et al. 2022)."""

    def __init__(self, root: Path, p: float, rank: int = 8) -> None:
        super().__init__()
        # Only the first call of _pretrained draws random numbers. Restore the generator, so that all
        # models of a seed have the same adapters.
        rng_state = torch.random.get_rng_state()
        weights = _pretrained(root)
        torch.random.set_rng_state(rng_state)
        self.gpt = GPT(VOCABULARY, dropout=0.0, attention_dropout=0.0, **_GPT_SIZES)
        self.gpt.load_state_dict(weights)
        self.gpt.requires_grad_(False)
        adapted = [
            (parent, name, layer)
            for parent in self.gpt.modules()
            for name, layer in parent.named_children()
            if name in ("query_key_value", "inner") and isinstance(layer, nn.Linear)
        ]
        for parent, name, layer in adapted:
            setattr(parent, name, _LoRA(layer, rank, p))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (T, B, V) of tokens (T, B)."""
        logits: Tensor = self.gpt(tokens)[0]
        return logits


@dataclass(frozen=True)
class Task:
    """The data, the model and the training settings that all methods share.

    The optimizer is AdamW. Its learning rate falls along a cosine to zero.
    """

    label: str  # in the report
    data: data.Loader
    model: Callable[[Path, float], nn.Module]  # of (the folder of the corpora, p)
    batch: int
    epochs: int  # at equal time, those of dropout
    lr: float  # the initial learning rate
    probabilities: tuple[float, ...] = (0.1, 0.2, 0.4)  # the search tries each p
    decays: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)  # the search tries each weight decay
    loss: Callable[[], Loss] = CrossEntropy
    fraction: float = 0.25  # ρ of Analytic: 1 if the examples interact, as the nodes of a graph do
    excluded_methods: Mapping[str, str] = field(default_factory=dict)  # name: the reason


def _gpt(vocabulary: int, p: float) -> nn.Module:
    return GPT(vocabulary, size=64, layers=2, heads=4, context=64, dropout=p, attention_dropout=p)


TASKS: Registry[str, Task] = Registry("task")
"""The tasks by name, the most important first."""

TASKS.register("gpt-wikitext")(
    Task(
        "GPT, 12,000 words of WikiText-2",
        partial(
            data.words, file=_WIKITEXT, sizes=(12_000, 4_000, 8_000), vocabulary=1_000, steps=64
        ),
        lambda root, p: _gpt(1_000, p),
        batch=8,
        epochs=12,
        lr=3e-3,
    )
)
TASKS.register("gpt-shakespeare")(
    Task(
        "GPT, 20,000 characters of Shakespeare",
        partial(data.characters, file=_SHAKESPEARE, sizes=(20_000, 5_000, 10_000), steps=64),
        lambda root, p: _gpt(65, p),
        batch=8,
        epochs=16,
        lr=3e-3,
    )
)
TASKS.register("table-digits")(
    Task(
        "MLP, 150 rows of digits",
        partial(data.table, name="digits", sizes=(150, 400, 1_200)),
        lambda root, p: MLP((64, 96, 96, 10), dropout=p, input_dropout=p),
        batch=25,
        epochs=60,
        lr=1e-3,
    )
)
TASKS.register("table-diabetes")(
    Task(
        "MLP, 150 rows of diabetes (regression)",
        partial(data.table, name="diabetes", sizes=(150, 100, 190), regression=True),
        lambda root, p: MLP((10, 64, 64, 1), dropout=p, input_dropout=p),
        batch=25,
        epochs=60,
        lr=1e-3,
        loss=MSE,
    )
)
TASKS.register("convnet-depth")(
    Task(
        "ConvNet with stochastic depth, 400 images of Fashion-MNIST",
        partial(data.fashion, sizes=(400, 400, 1_000)),
        lambda root, p: ResidualNet(p),
        batch=25,
        epochs=25,
        lr=3e-3,
        probabilities=(0.2, 0.4, 0.6),
    )
)
TASKS.register("lora")(
    Task(
        "LoRA on GPT, WikiText-2 to Penn Treebank",
        partial(
            data.words,
            file="ptb/ptb.train.txt",
            sizes=(6_000, 4_000, 8_000),
            vocabulary=VOCABULARY,
            steps=32,
            vocabulary_from=_WIKITEXT,
        ),
        AdaptedGPT,
        batch=10,
        epochs=20,
        lr=3e-3,
    )
)
TASKS.register("graph")(
    Task(
        "GCN, a graph of 400 nodes in communities",
        partial(data.graph, nodes=400, classes=5, features=32, sizes=(60, 100, 240)),
        lambda root, p: GCN(400, 32, 5, p),
        batch=400,
        epochs=150,
        lr=1e-2,
        probabilities=(0.2, 0.4, 0.6),
        fraction=1.0,
        excluded_methods={
            "tuner": "the validation nodes are in the same graph, so training sees their inputs"
        },
    )
)
