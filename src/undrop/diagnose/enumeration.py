"""Expectations over dropout without sampling: every mask of a small net, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from undrop.diagnose.expansion import Expanded
from undrop.diagnose.subject import Batch, Given, Noise, Subject
from undrop.sites import Site

__all__ = ["LIMIT", "Masks", "enumerable"]

LIMIT = 16
"""The most mask entries of which every combination is tried."""


class Masks:
    """All masks of some sites, with their probabilities.

    Args:
        shapes: the shape of η at each site.
        like: tensors of the type and device that noise is to have, by site.
    """

    def __init__(self, shapes: Mapping[Site, tuple[int, ...]], like: Mapping[str, Tensor]) -> None:
        self.shapes = shapes
        self._like = like

    @property
    def entries(self) -> int:
        """The number of independent entries."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def only(self, name: str) -> Masks:
        """The masks of one site alone."""
        shapes = {site: shape for site, shape in self.shapes.items() if site.name == name}
        return Masks(shapes, self._like)

    def all(self, factor: float = 1.0) -> Iterator[tuple[float, Noise]]:
        """Every σ·η with its probability, each p times ``factor``.

        A dropped entry has σ·η = -1, a kept one q/(1-q).
        """
        places = [site for site, shape in self.shapes.items() for _ in range(math.prod(shape))]
        q = [site.p * factor for site in places]
        for dropped in product((False, True), repeat=len(places)):
            pairs = list(zip(dropped, q, strict=True))
            probability = math.prod(p if drop else 1.0 - p for drop, p in pairs)
            yield probability, self._noise([-1.0 if drop else p / (1.0 - p) for drop, p in pairs])

    def units(self) -> Iterator[tuple[Site, Noise]]:
        """σ at one entry and 0 at all others, entry by entry: E[vvᵀ] = Σ of their outer products."""
        for site, shape in self.shapes.items():
            like = self._like[site.name]
            for index in range(math.prod(shape)):
                noise = torch.zeros(math.prod(shape), dtype=like.dtype, device=like.device)
                noise[index] = site.sigma
                yield site, {site.name: noise.view(shape)}

    def _noise(self, values: list[float]) -> dict[str, Tensor]:
        noise, start = {}, 0
        for site, shape in self.shapes.items():
            end = start + math.prod(shape)
            noise[site.name] = self._like[site.name].new_tensor(values[start:end]).view(shape)
            start = end
        return noise


def enumerable(subject: Subject, batch: Batch, expanded: Expanded) -> Masks | None:
    """The masks to enumerate for a batch; None where there are too many.

    Where the examples of a batch do not touch each other, each has its own masks and the mean over
    examples needs their marginals only: then one mask for all examples stands for them.
    """
    like = {site.name: leaf.detach() for site, leaf in expanded.found}
    joint = Masks({site: site.mask_shape for site, _ in expanded.found}, like)
    if joint.entries <= LIMIT:
        return joint
    size = _examples(subject, batch)
    if size is None:
        return None
    shapes = {}
    for site, _ in expanded.found:
        shape = list(site.mask_shape)
        if not site.per_example or len(shape) <= subject.batch_dim:
            return None
        if shape[subject.batch_dim] != size:
            return None
        shape[subject.batch_dim] = 1
        shapes[site] = tuple(shape)
    tied = Masks(shapes, like)
    if tied.entries <= LIMIT and _independent(subject, batch, tied, size):
        return tied
    return None


def _examples(subject: Subject, batch: Batch) -> int | None:
    targets = batch.targets
    if not isinstance(targets, Tensor) or targets.dim() <= subject.batch_dim:
        return None
    return targets.shape[subject.batch_dim]


def _independent(subject: Subject, batch: Batch, masks: Masks, size: int) -> bool:
    """Whether the batch's loss under a noise is the mean of its examples' losses under it."""
    shaped = [(site, masks._like[site.name]) for site in masks.shapes]
    noise = {
        name: value.narrow(subject.batch_dim, 0, 1) for name, value in subject.masks(shaped).items()
    }
    whole = subject.value(batch, noise)
    total = count = 0.0
    for index in range(size):
        example = Batch(batch.number, *_narrowed(batch, subject.batch_dim, index, size))
        with torch.no_grad():
            logits = subject.run(example, Given(noise))
        n = float(subject.loss.count(logits, example.targets))
        total += n * float(subject.loss.value(logits, example.targets))
        count += n
    precision = torch.finfo(next(iter(noise.values())).dtype).eps
    return abs(total / count - whole) <= 1e3 * precision * max(abs(whole), 1.0)


def _narrowed(batch: Batch, dim: int, index: int, size: int) -> tuple[Any, Any]:
    def narrow(x: Any) -> Any:
        has_batch = isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == size
        return x.narrow(dim, index, 1) if has_batch else x

    return tree_map(narrow, batch.inputs), tree_map(narrow, batch.targets)
