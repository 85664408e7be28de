"""The data of the scoreboard's tasks: parts to train on, to tune on and to report on."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from undrop.errors import DataError

Examples: TypeAlias = tuple[Tensor, Tensor]
Sizes: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Data:
    """Three parts; dimension ``dim`` of inputs and targets is the batch dimension.

    A graph is ``whole``: every part has all its nodes and is one batch. The targets of nodes outside
    a part are -100.
    """

    train: Examples
    validation: Examples
    test: Examples
    dim: int = 0
    whole: bool = False


Load: TypeAlias = Callable[[Path, int], Data]
"""Returns the data of a seed, given the folder of the corpora: a ``partial`` of a function below."""


def batches(
    data: Data, part: str, size: int, generator: torch.Generator | None
) -> Iterator[Examples]:
    """Yield a part in batches; with a generator, in random order and only full batches."""
    inputs, targets = getattr(data, part)
    if data.whole:
        yield inputs, targets
        return
    n = inputs.shape[data.dim]
    order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    full = n // size * size if generator is not None else n
    for chosen in order[:full].split(size):
        yield inputs.index_select(data.dim, chosen), targets.index_select(data.dim, chosen)


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(
            f"the scoreboard needs {path}: give the folder that has {path.parent.name} as --data-dir."
        )
    return path.read_bytes()


@cache
def _words(path: Path) -> list[str]:
    lines = _bytes(path).decode().splitlines()
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _windows(ids: Tensor, steps: int) -> Examples:
    """Windows (steps, count) of a text, and the tokens that follow."""
    count = (len(ids) - 1) // steps
    inputs = ids[: count * steps].view(count, steps).t().contiguous()
    targets = ids[1 : count * steps + 1].view(count, steps).t().contiguous()
    return inputs, targets


def _piece(text: list[str], sizes: Sizes, seed: int) -> list[str]:
    total = sum(sizes)
    start = (seed * total) % (len(text) - total)
    return text[start : start + total]


def _text(ids: list[int], sizes: Sizes, steps: int) -> Data:
    train, validation, test = (
        _windows(part, steps) for part in torch.tensor(ids).split(list(sizes))
    )
    return Data(train, validation, test, dim=1)


def words(
    root: Path,
    seed: int,
    file: str,
    sizes: Sizes,
    vocabulary: int,
    steps: int,
    vocabulary_from: str | None = None,
) -> Data:
    """A different piece of a corpus for each seed.

    The vocabulary is that of the training split, or of the file ``vocabulary_from``.
    """
    piece = _piece(_words(root / file), sizes, seed)
    known = piece[: sizes[0]] if vocabulary_from is None else _words(root / vocabulary_from)
    common = Counter(known).most_common(vocabulary - 1)  # any other word is 0
    index = {word: number for number, (word, _) in enumerate(common, 1)}
    return _text([index.get(word, 0) for word in piece], sizes, steps)


def characters(root: Path, seed: int, file: str, sizes: Sizes, steps: int) -> Data:
    """A different piece of a text for each seed, by characters."""
    text = list(_bytes(root / file).decode())
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    return _text([index[c] for c in _piece(text, sizes, seed)], sizes, steps)


def split(inputs: Tensor, targets: Tensor, sizes: Sizes) -> Data:
    """Return the first examples to train on, the next to tune on, and the rest to report on."""
    parts = zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
    train, validation, test = parts
    return Data(train, validation, test)


def fashion(root: Path, seed: int, sizes: Sizes) -> Data:
    """Images of Fashion-MNIST at 14 × 14, drawn at random by the seed."""
    images, labels = (
        np.frombuffer(gzip.decompress(_bytes(root / "fashion-mnist" / file)), np.uint8, offset=head)
        for file, head in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen = order[: sum(sizes)]
    x = torch.tensor(images.reshape(-1, 1, 28, 28)[chosen]).float()
    x = nn.functional.avg_pool2d((x / 255 - 0.286) / 0.353, 2)
    return split(x, torch.tensor(labels[chosen]).long(), sizes)


def table(root: Path, seed: int, name: str, sizes: Sizes, *, regression: bool = False) -> Data:
    """A dataset of scikit-learn, shuffled by the seed."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))[: sum(sizes)]
    x, y = x[order], y[order]
    mean, std = x[: sizes[0]].mean(0), x[: sizes[0]].std(0).clip(0.1 * x.std())
    features = torch.tensor((x - mean) / std, dtype=torch.float32)
    if not regression:
        return split(features, torch.tensor(y), sizes)
    y = (y - y[: sizes[0]].mean()) / y[: sizes[0]].std()
    return split(features, torch.tensor(y, dtype=torch.float32)[:, None], sizes)


def graph(root: Path, seed: int, nodes: int, classes: int, features: int, sizes: Sizes) -> Data:
    """A random graph of communities, drawn by the seed.

    The first ``nodes`` columns of an input row are the node's row of the normalized adjacency matrix;
    the others are its features, the center of its class plus noise.
    """
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (nodes,), generator=g)
    same = labels[:, None] == labels[None, :]
    chance = torch.where(same, 8.0 / nodes * classes / 2, 3.0 / nodes)
    edges = (torch.rand(nodes, nodes, generator=g) < chance).float().triu(1)
    adjacency = edges + edges.t() + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    centers = torch.randn(classes, features, generator=g)
    x = 0.35 * centers[labels] + torch.randn(nodes, features, generator=g)
    inputs = torch.cat([scale[:, None] * adjacency * scale[None, :], x], 1)
    parts = torch.randperm(nodes, generator=g)[: sum(sizes)].split(list(sizes))
    targets = [torch.full_like(labels, -100) for _ in parts]
    for target, chosen in zip(targets, parts, strict=True):
        target[chosen] = labels[chosen]
    train, validation, test = ((inputs, target) for target in targets)
    return Data(train, validation, test, whole=True)
