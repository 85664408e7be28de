"""The tasks of the scoreboard. To add one, add a :class:`Task` to ``TASKS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from undrop.lab.models import GPT, MLP
from undrop.lab.scoreboard import data
from undrop.lab.scoreboard.models import GCN, VOCABULARY, Adapted, ResidualNet
from undrop.losses import MSE, CrossEntropy, Loss
from undrop.registry import Registry


@dataclass(frozen=True)
class Task:
    """What all methods share: data, model, and AdamW with a cosine schedule to zero."""

    label: str  # in the report
    data: Callable[[Path, int], data.Data]  # of a seed, given the folder of the corpora
    model: Callable[[Path, float], nn.Module]  # with a dropout probability, given that folder
    batch: int
    epochs: int  # of plain dropout
    lr: float  # the learning rate at the start
    probabilities: tuple[float, ...] = (0.1, 0.2, 0.4)  # to try
    decays: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)  # to try
    loss: Callable[[], Loss] = CrossEntropy
    fraction: float = 0.25  # of the batch that Analytic regularizes; 1 if examples interact
    refused: Mapping[str, str] = field(default_factory=dict)  # methods that refuse it, and why


def _gpt(vocabulary: int, p: float) -> nn.Module:
    return GPT(vocabulary, size=64, layers=2, heads=4, context=64, dropout=p, attention_dropout=p)


TASKS: Registry[str, Task] = Registry("task")
"""The tasks by name, the most important first."""

_WIKITEXT = "wikitext-2/wiki.train.tokens"
TASKS.register("gpt-wikitext")(
    Task(
        "GPT, 12,000 words of WikiText-2",
        data.words(_WIKITEXT, (12_000, 4_000, 8_000), 1_000, 64),
        lambda root, p: _gpt(1_000, p),
        batch=8,
        epochs=12,
        lr=3e-3,
    )
)
TASKS.register("gpt-shakespeare")(
    Task(
        "GPT, 20,000 characters of Shakespeare",
        data.characters("tinyshakespeare/input.txt", (20_000, 5_000, 10_000), 64),
        lambda root, p: _gpt(65, p),
        batch=8,
        epochs=16,
        lr=3e-3,
    )
)
TASKS.register("table-digits")(
    Task(
        "MLP, 150 rows of digits",
        data.table("digits", (150, 400, 1_200)),
        lambda root, p: MLP((64, 96, 96, 10), dropout=p, input_dropout=p),
        batch=25,
        epochs=60,
        lr=1e-3,
    )
)
TASKS.register("table-diabetes")(
    Task(
        "MLP, 150 rows of diabetes (regression)",
        data.table("diabetes", (150, 100, 190), regression=True),
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
        data.fashion((400, 400, 1_000)),
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
        data.words("ptb/ptb.train.txt", (6_000, 4_000, 8_000), VOCABULARY, 32, _WIKITEXT),
        Adapted,
        batch=10,
        epochs=20,
        lr=3e-3,
    )
)
TASKS.register("graph")(
    Task(
        "GCN, a graph of 400 nodes in communities",
        data.graph(400, 5, 32, (60, 100, 240)),
        lambda root, p: GCN(400, 32, 5, p),
        batch=400,
        epochs=150,
        lr=1e-2,
        probabilities=(0.2, 0.4, 0.6),
        fraction=1.0,
        refused={"tuner": "training sees the inputs of the validation part: it is the same graph"},
    )
)
