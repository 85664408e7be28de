"""The small tasks on which ways to choose dropout are compared: data, model and training settings.

The data of each task have three parts: training, validation (for tuning) and test (for the report).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import undrop
from undrop.lab.models import AWDLSTM, GPT, MLP, ConvNet
from undrop.lab.scoreboard.data import Data, batches, fashion, split, table, words

TEXT_SIZES = (12000, 4000, 8000)  # words to train on, to tune on and to report on

__all__ = ["TASKS", "CharacterModel", "Data", "Task", "batches", "schedule"]


@dataclass(frozen=True)
class Task:
    """The data, the model and the training settings, which are the same for every method."""

    name: str
    data: Callable[[Path, int], Data]
    model: Callable[[float], nn.Module]
    batch: int
    epochs: int
    lr: float
    sgd: bool = False
    clip: float = 1.0
    decays: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    loss: Callable[[], undrop.Loss] = field(default=undrop.CrossEntropy)


class CharacterModel(nn.Module):
    """The next character from the ten before it (Bengio et al. 2003), with dropout on each layer."""

    def __init__(self, vocabulary: int, p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.mlp = MLP((10 * 16, 128, 128, vocabulary), dropout=p, input_dropout=p)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of characters (B, 10)."""
        logits: Tensor = self.mlp(self.embedding(tokens))
        return logits


def _characters(root: Path, seed: int) -> Data:
    """Return windows of the text; each seed has another part of the text."""
    sizes = (8000, 3000, 8000)
    text = (root / "tinyshakespeare" / "input.txt").read_text()
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    start = seed * 20000
    ids = torch.tensor([index[c] for c in text[start : start + sum(sizes) + 10]])
    windows = ids.unfold(0, 11, 1)
    return split(windows[:, :10], windows[:, 10], sizes)


def _lstm(p: float) -> nn.Module:
    sites = {"input_dropout": p, "hidden_dropout": p, "output_dropout": p}
    return AWDLSTM(800, embedding_size=64, hidden_size=64, layers=2, weight_dropout=0.0, **sites)


def _gpt(p: float) -> nn.Module:
    return GPT(800, size=48, layers=2, heads=4, context=32, dropout=p, attention_dropout=p)


TASKS = {
    task.name: task
    for task in (
        Task(
            "characters-mlp",
            _characters,
            lambda p: CharacterModel(65, p),
            batch=50,
            epochs=5,
            lr=3e-3,
        ),
        Task(
            "fashion-convnet",
            partial(fashion, sizes=(400, 400, 1200)),
            lambda p: ConvNet(widths=(16, 32), feature_dropout=p, output_dropout=p),
            batch=25,
            epochs=35,
            lr=1e-2,
        ),
        Task(
            "digits-mlp",
            partial(table, name="digits", sizes=(150, 400, 1200)),
            lambda p: MLP((64, 96, 96, 10), dropout=p, input_dropout=p),
            batch=25,
            epochs=100,
            lr=1e-3,
        ),
        Task(
            "diabetes-mlp",
            partial(table, name="diabetes", sizes=(150, 100, 190), regression=True),
            lambda p: MLP((10, 64, 64, 1), dropout=p, input_dropout=p),
            batch=25,
            epochs=100,
            lr=1e-3,
            loss=undrop.MSE,
        ),
        Task(
            "ptb-lstm",
            partial(words, file="ptb/ptb.train.txt", sizes=TEXT_SIZES, vocabulary=800, steps=20),
            _lstm,
            batch=10,
            epochs=9,
            lr=15.0,
            sgd=True,
            clip=0.25,
            decays=(1e-5, 3e-5, 1e-4, 3e-4),
        ),
        Task(
            "wikitext-gpt",
            partial(
                words,
                file="wikitext-2/wiki.train.tokens",
                sizes=TEXT_SIZES,
                vocabulary=800,
                steps=32,
            ),
            _gpt,
            batch=10,
            epochs=9,
            lr=3e-3,
        ),
    )
}


def schedule(task: Task, step: int, total: int) -> float:
    """Return the learning rate at a step: a cosine to zero."""
    return task.lr * 0.5 * (1.0 + math.cos(math.pi * step / total))
