"""The small tasks on which ways to choose dropout are compared: data, model and training settings.

Each task has three parts: one to train on, one to tune on, and one that only the report sees.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import undrop
from undrop.lab.models import AWDLSTM, GPT, MLP, ConvNet

Batch = tuple[Tensor, Tensor]


@dataclass
class Data:
    """The three parts; ``dim`` is the dimension that counts examples."""

    train: Batch
    validation: Batch
    test: Batch
    dim: int = 0


@dataclass(frozen=True)
class Task:
    """What stays the same for every method."""

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


@cache
def _words(path: Path, limit: int) -> list[str]:
    with path.open() as lines:
        words: list[str] = []
        for line in lines:
            words += [*line.split(), "<eos>"]
            if len(words) > limit:
                break
    return words[:limit]


def _windows(ids: Tensor, steps: int) -> Batch:
    """Windows (steps, count) of a text and the words that follow."""
    count = (len(ids) - 1) // steps
    inputs = ids[: count * steps].view(count, steps).t().contiguous()
    targets = ids[1 : count * steps + 1].view(count, steps).t().contiguous()
    return inputs, targets


def _text(words: list[str], sizes: tuple[int, int, int], vocabulary: int, steps: int) -> Data:
    """The first words to train on, the next to tune on, the rest to report on."""
    train, validation, test = sizes
    common = [w for w, _ in Counter(words[:train]).most_common(vocabulary - 1)]
    index = {w: i + 1 for i, w in enumerate(common)}
    ids = torch.tensor([index.get(w, 0) for w in words])
    parts = ids.split([train, validation, test])
    return Data(*(_windows(part, steps) for part in parts), dim=1)


def _corpus(name: str, sizes: tuple[int, int, int], vocabulary: int, steps: int):
    """Another stretch of the corpus for each seed."""

    def data(root: Path, seed: int) -> Data:
        total = sum(sizes)
        file = "ptb/ptb.train.txt" if name == "ptb" else "wikitext-2/wiki.train.tokens"
        words = _words(root / file, 30 * total)
        return _text(words[seed * total :][:total], sizes, vocabulary, steps)

    return data


def _images(root: Path, file: str, offset: int) -> Tensor:
    raw = gzip.decompress((root / "fashion-mnist" / file).read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=offset).copy())


def _fashion(root: Path, seed: int) -> Data:
    images = _images(root, "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    labels = _images(root, "train-labels-idx1-ubyte.gz", 8)
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:2000]
    x = nn.functional.avg_pool2d((images[chosen].float() / 255 - 0.286) / 0.353, 2)
    return _split((x, labels[chosen].long()), (400, 400, 1200))


def _split(whole: Batch, sizes: tuple[int, int, int]) -> Data:
    x, y = (part.split(sizes) for part in whole)
    return Data(*zip(x, y, strict=True))


def _table(name: str, sizes: tuple[int, int, int]):
    """Rows in another order for each seed; columns scaled by the training part."""

    def data(root: Path, seed: int) -> Data:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(y))[: sum(sizes)]
        x, y = x[order], y[order]
        mean, std = x[: sizes[0]].mean(0), x[: sizes[0]].std(0).clip(0.1 * x.std())
        x = torch.tensor((x - mean) / std, dtype=torch.float32)
        if name == "diabetes":
            y = (y - y[: sizes[0]].mean()) / y[: sizes[0]].std()
            target = torch.tensor(y, dtype=torch.float32)[:, None]
        else:
            target = torch.tensor(y)
        return _split((x, target), sizes)

    return data


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
    """Another stretch of the text for each seed."""
    sizes = (8000, 3000, 8000)
    text = (root / "tinyshakespeare" / "input.txt").read_text()
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    start = seed * 20000
    ids = torch.tensor([index[c] for c in text[start : start + sum(sizes) + 10]])
    windows = ids.unfold(0, 11, 1)
    return _split((windows[:, :10], windows[:, 10]), sizes)


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
            _fashion,
            lambda p: ConvNet(widths=(16, 32), feature_dropout=p, output_dropout=p),
            batch=25,
            epochs=35,
            lr=1e-2,
        ),
        Task(
            "digits-mlp",
            _table("digits", (150, 400, 1200)),
            lambda p: MLP((64, 96, 96, 10), dropout=p, input_dropout=p),
            batch=25,
            epochs=100,
            lr=1e-3,
        ),
        Task(
            "diabetes-mlp",
            _table("diabetes", (150, 100, 190)),
            lambda p: MLP((10, 64, 64, 1), dropout=p, input_dropout=p),
            batch=25,
            epochs=100,
            lr=1e-3,
            loss=undrop.MSE,
        ),
        Task(
            "ptb-lstm",
            _corpus("ptb", (12000, 4000, 8000), 800, 20),
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
            _corpus("wikitext", (12000, 4000, 8000), 800, 32),
            _gpt,
            batch=10,
            epochs=9,
            lr=3e-3,
        ),
    )
}


def batches(data: Data, part: str, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
    """The part in batches, in random order where there is a generator."""
    inputs, targets = getattr(data, part)
    n = inputs.shape[data.dim]
    order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    full = n // size * size if generator is not None else n
    for chosen in order[:full].split(size):
        yield inputs.index_select(data.dim, chosen), targets.index_select(data.dim, chosen)


def schedule(task: Task, step: int, total: int) -> float:
    """The learning rate: a cosine to zero."""
    return task.lr * 0.5 * (1.0 + math.cos(math.pi * step / total))
