"""Expectations over dropout without sampling: every mask of a small net, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from undrop.diagnosis.measure.expansion import Expanded
from undrop.diagnosis.measure.model import Batch, Noise, Subject
from undrop.intercept import Site

__all__ = ["LIMIT", "Masks", "enumerable", "expected_loss"]

LIMIT = 16
"""The most mask entries of which every combination is tried."""
_STACK = 512  # masks that are tried at once


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

    def found(self) -> list[tuple[Site, Tensor]]:
        """The sites, each with a tensor of the type and device of its noise."""
        return [(site, self._like[site.name]) for site in self.shapes]

    def only(self, name: str) -> Masks:
        """The masks of one site alone."""
        shapes = {site: shape for site, shape in self.shapes.items() if site.name == name}
        return Masks(shapes, self._like)

    def all(self, factor: float = 1.0) -> Iterator[tuple[Tensor, Noise]]:
        """Every σ·η, each p times ``factor``, in stacks: probabilities (k,), and noise (k, …).

        A dropped entry has σ·η = -1, a kept one q/(1-q).
        """
        places = [site for site, shape in self.shapes.items() for _ in range(math.prod(shape))]
        q = torch.tensor([site.p * factor for site in places], dtype=torch.float64)
        for numbers in torch.arange(2 ** len(places)).split(_STACK):
            dropped = (numbers.unsqueeze(1) >> torch.arange(len(places))) & 1 == 1
            probabilities = torch.where(dropped, q, 1.0 - q).prod(1)
            yield probabilities, self._noise(torch.where(dropped, -1.0, q / (1.0 - q)))

    def units(self) -> Iterator[tuple[Site, Noise]]:
        """σ at one entry and 0 at all others, entry by entry: E[vvᵀ] = Σ of their outer products."""
        for site, shape in self.shapes.items():
            like = self._like[site.name]
            for index in range(math.prod(shape)):
                noise = torch.zeros(math.prod(shape), dtype=like.dtype, device=like.device)
                noise[index] = site.sigma
                yield site, {site.name: noise.view(shape)}

    def _noise(self, values: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), values.split(sizes, dim=1), strict=True)
        return {
            site.name: part.reshape(-1, *shape).to(self._like[site.name])
            for (site, shape), part in parts
        }


def expected_loss(subject: Subject, batch: Batch, masks: Masks, factor: float = 1.0) -> float:
    """E ℓ(F(x; 1, η)) over all masks, each p times ``factor``."""
    sums = [
        float(probabilities @ subject.values(batch, noise).cpu())
        for probabilities, noise in masks.all(factor)
    ]
    return math.fsum(sums)


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
    """Whether the loss is a sum over examples, each with its own masks.

    For two masks a and b it is then ℓ(a, a) + ℓ(b, b) = ℓ(a, b) + ℓ(b, a), with any half of the
    examples in the first place: a batch that is normalised as a whole does not pass.
    """
    dim = subject.batch_dim
    a, b = (
        {name: value.narrow(dim, 0, 1) for name, value in subject.masks(masks.found()).items()}
        for _ in range(2)
    )

    def mixed(one: Noise, two: Noise) -> float:
        joined = {}
        for name, value in one.items():
            first = torch.arange(size, device=value.device) % 2 == 0
            shape = [size if d == dim else 1 for d in range(value.dim())]
            joined[name] = torch.where(first.view(shape), value, two[name])
        return subject.value(batch, joined)

    apart, crossed = mixed(a, a) + mixed(b, b), mixed(a, b) + mixed(b, a)
    precision = torch.finfo(next(iter(a.values())).dtype).eps
    return abs(apart - crossed) <= 1e2 * precision * max(abs(apart), 1.0)
