"""The data of the scoreboard's tasks. Each has a training, a validation and a test part."""

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
"""Inputs and targets."""

Sizes: TypeAlias = tuple[int, int, int]
"""The sizes of the training, validation and test parts."""


@dataclass(frozen=True)
class Data:
    """The three parts of a task's data, and how to batch them.

    A graph has ``full_batch``: the inputs of every part are all nodes, in one batch. The targets of
    nodes that belong to another part are -100.
    """

    train: Examples
    validation: Examples
    test: Examples
    batch_dim: int = 0  # of inputs and targets
    full_batch: bool = False


Loader: TypeAlias = Callable[[Path, int], Data]
"""A function of (the folder of the corpora, the seed): a ``partial`` of a function in this module."""


def batches(
    data: Data, part: str, size: int, generator: torch.Generator | None
) -> Iterator[Examples]:
    """Yield the batches of a part.

    With a generator, the order is random, and examples that do not fill a batch are left out.
    """
    inputs, targets = getattr(data, part)
    if data.full_batch:
        yield inputs, targets
        return
    n = inputs.shape[data.batch_dim]
    order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    used = n if generator is None else n // size * size
    for rows in order[:used].split(size):
        yield inputs.index_select(data.batch_dim, rows), targets.index_select(data.batch_dim, rows)


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(
            f"the scoreboard needs {path}: set --data-dir to the folder that has {path.parent.name}/."
        )
    return path.read_bytes()


@cache
def _words(path: Path) -> list[str]:
    lines = _bytes(path).decode().splitlines()
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _windows(ids: Tensor, steps: int) -> Examples:
    """Return windows of a text as (steps, windows), and the next token for each token."""
    count = (len(ids) - 1) // steps
    inputs = ids[: count * steps].view(count, steps).t().contiguous()
    targets = ids[1 : count * steps + 1].view(count, steps).t().contiguous()
    return inputs, targets


def _excerpt(text: list[str], sizes: Sizes, seed: int) -> list[str]:
    """Return as many consecutive tokens as the three parts need, starting at a place set by the seed."""
    total = sum(sizes)
    start = (seed * total) % (len(text) - total)
    return text[start : start + total]


def _split_text(ids: list[int], sizes: Sizes, steps: int) -> Data:
    parts = torch.tensor(ids).split(list(sizes))
    train, validation, test = (_windows(part, steps) for part in parts)
    return Data(train, validation, test, batch_dim=1)


def words(
    root: Path,
    seed: int,
    file: str,
    sizes: Sizes,
    vocabulary: int,
    steps: int,
    vocabulary_from: str | None = None,
) -> Data:
    """Return windows of words, from a different excerpt of a corpus for each seed.

    The vocabulary is the most common words of the training part, or of the file ``vocabulary_from``.
    """
    excerpt = _excerpt(_words(root / file), sizes, seed)
    source = excerpt[: sizes[0]] if vocabulary_from is None else _words(root / vocabulary_from)
    common = Counter(source).most_common(vocabulary - 1)  # every other word gets index 0
    index = {word: number for number, (word, _) in enumerate(common, 1)}
    return _split_text([index.get(word, 0) for word in excerpt], sizes, steps)


def characters(root: Path, seed: int, file: str, sizes: Sizes, steps: int) -> Data:
    """Return windows of characters, from a different excerpt of a text for each seed."""
    text = list(_bytes(root / file).decode())
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    return _split_text([index[c] for c in _excerpt(text, sizes, seed)], sizes, steps)


def split(inputs: Tensor, targets: Tensor, sizes: Sizes) -> Data:
    """Split examples, in their order, into the training, validation and test parts."""
    train, validation, test = zip(*(t.split(list(sizes)) for t in (inputs, targets)), strict=True)
    return Data(train, validation, test)


def fashion(root: Path, seed: int, sizes: Sizes) -> Data:
    """Return random images of Fashion-MNIST, reduced to 14 × 14."""
    images, labels = (
        np.frombuffer(gzip.decompress(_bytes(root / "fashion-mnist" / file)), np.uint8, offset=head)
        for file, head in (("train-images-idx3-ubyte.gz", 16), ("train-labels-idx1-ubyte.gz", 8))
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    rows = order[: sum(sizes)]
    x = torch.tensor(images.reshape(-1, 1, 28, 28)[rows]).float()
    x = nn.functional.avg_pool2d((x / 255 - 0.286) / 0.353, 2)
    return split(x, torch.tensor(labels[rows]).long(), sizes)


def table(root: Path, seed: int, name: str, sizes: Sizes, *, regression: bool = False) -> Data:
    """Return random rows of a scikit-learn dataset, standardized by the training part."""
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
    """Return a random graph in which nodes of the same class are more often connected.

    The first ``nodes`` columns of an input row are the node's row of the normalized adjacency matrix.
    The other columns are the node's features: the center of its class plus noise.
    """
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (nodes,), generator=g)
    same_class = labels[:, None] == labels[None, :]
    probability = torch.where(same_class, 8.0 / nodes * classes / 2, 3.0 / nodes)
    edges = (torch.rand(nodes, nodes, generator=g) < probability).float().triu(1)
    adjacency = edges + edges.t() + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    centers = torch.randn(classes, features, generator=g)
    x = 0.35 * centers[labels] + torch.randn(nodes, features, generator=g)
    inputs = torch.cat([scale[:, None] * adjacency * scale[None, :], x], 1)
    parts = torch.randperm(nodes, generator=g)[: sum(sizes)].split(list(sizes))
    targets = [torch.full_like(labels, -100) for _ in parts]
    for target, part in zip(targets, parts, strict=True):
        target[part] = labels[part]
    train, validation, test = ((inputs, target) for target in targets)
    return Data(train, validation, test, full_batch=True)
