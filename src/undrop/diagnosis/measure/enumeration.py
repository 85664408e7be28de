"""Expectations over dropout without sampling: every mask of a small net."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from undrop.diagnosis.measure.model import MeasuredModel, NumberedBatch, SiteNoise
from undrop.diagnosis.measure.r_drop import Expanded
from undrop.intercept import Site

LIMIT = 16
"""The largest number of mask entries whose combinations are enumerated."""
_STACK = 512  # masks evaluated at once


class Masks:
    """All masks of some sites, with their probabilities.

    Args:
        shapes: the shape of η at each site.
        like: tensors of the dtype and device of the noise, by site.
    """

    def __init__(self, shapes: Mapping[Site, tuple[int, ...]], like: Mapping[str, Tensor]) -> None:
        self.shapes = shapes
        self._like = like

    @property
    def entries(self) -> int:
        """The number of independent entries."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def found(self) -> list[tuple[Site, Tensor]]:
        """The sites, each with a tensor of the dtype and device of its noise."""
        return [(site, self._like[site.name]) for site in self.shapes]

    def like(self, noise: SiteNoise) -> SiteNoise:
        """The noise in the dtype and on the device of each site."""
        return {name: value.to(self._like[name]) for name, value in noise.items()}

    def only(self, name: str) -> Masks:
        """The masks of one site alone."""
        shapes = {site: shape for site, shape in self.shapes.items() if site.name == name}
        return Masks(shapes, self._like)

    def all(self, factor: float = 1.0) -> Iterator[tuple[Tensor, SiteNoise]]:
        """Every σ·η, each p times ``factor``, in stacks: probabilities (k,), and noise (k, …).

        A dropped entry has σ·η = -1, a kept one q/(1-q).
        """
        places = [site for site, shape in self.shapes.items() for _ in range(math.prod(shape))]
        q = torch.tensor([site.p * factor for site in places], dtype=torch.float64)
        for numbers in torch.arange(2 ** len(places)).split(_STACK):
            dropped = (numbers.unsqueeze(1) >> torch.arange(len(places))) & 1 == 1
            probabilities = torch.where(dropped, q, 1.0 - q).prod(1)
            yield probabilities, self._noise(torch.where(dropped, -1.0, q / (1.0 - q)))

    def units(self) -> Iterator[tuple[Site, SiteNoise]]:
        """σ at one entry and 0 at all others, entry by entry: E[vvᵀ] = Σ of their outer products."""
        for site, shape in self.shapes.items():
            like = self._like[site.name]
            for index in range(math.prod(shape)):
                noise = torch.zeros(math.prod(shape), dtype=like.dtype, device=like.device)
                noise[index] = site.sigma
                yield site, {site.name: noise.view(shape)}

    def _noise(self, values: Tensor) -> SiteNoise:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), values.split(sizes, dim=1), strict=True)
        return self.like({site.name: part.reshape(-1, *shape) for (site, shape), part in parts})


def expected_loss(
    measured: MeasuredModel, batch: NumberedBatch, masks: Masks, factor: float = 1.0
) -> float:
    """E ℓ(F(x; 1, η)) over all masks, each p times ``factor``."""
    sums = [
        float(probabilities @ measured.loss_values(batch, noise).cpu())
        for probabilities, noise in masks.all(factor)
    ]
    return math.fsum(sums)


def enumerable(measured: MeasuredModel, batch: NumberedBatch, expanded: Expanded) -> Masks | None:
    """The masks to enumerate for a batch; None if there are too many.

    If the loss is a sum over examples, each with its own noise, its expectation needs only the
    masks of one example: giving all examples the same mask then covers all combinations.
    """
    like = {site.name: leaf.detach() for site, leaf in expanded.found}
    joint = Masks({site: site.mask_shape for site, _ in expanded.found}, like)
    if joint.entries <= LIMIT:
        return joint
    size = _examples(measured, batch)
    if size is None:
        return None
    shapes = {}
    for site, _ in expanded.found:
        shape = list(site.mask_shape)
        if not site.per_example or len(shape) <= measured.batch_dim:
            return None
        if shape[measured.batch_dim] != size:
            return None
        shape[measured.batch_dim] = 1
        shapes[site] = tuple(shape)
    tied = Masks(shapes, like)
    if tied.entries <= LIMIT and _is_sum_over_examples(measured, batch, joint):
        return tied
    return None


def _examples(measured: MeasuredModel, batch: NumberedBatch) -> int | None:
    targets = batch.targets
    if not isinstance(targets, Tensor) or targets.dim() <= measured.batch_dim:
        return None
    return targets.shape[measured.batch_dim]


def _is_sum_over_examples(
    measured: MeasuredModel, batch: NumberedBatch, masks: Masks, tries: int = 3
) -> bool:
    """Whether the loss is a sum over examples, each with its own noise.

    Then for two noises a and b that swap a subset of the examples to become c and d,
    ℓ(a) + ℓ(b) = ℓ(c) + ℓ(d). The noises are continuous, so no two entries are equal by chance, and
    every trial uses another subset: a model that normalizes the whole batch does not pass.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {site.name: shape for site, shape in masks.shapes.items()}
    for _ in range(tries):
        a, b = ({n: _uniform(s, generator) for n, s in shapes.items()} for _ in range(2))
        size = next(iter(shapes.values()))[measured.batch_dim]
        chosen = torch.randperm(size, generator=generator) < max(1, size // 2)
        swapped = {n: _merged(a[n], b[n], chosen, measured.batch_dim) for n in shapes}
        others = {n: _merged(b[n], a[n], chosen, measured.batch_dim) for n in shapes}
        kept, crossed = (
            sum(measured.loss_value(batch, masks.like(noise)) for noise in pair)
            for pair in ((a, b), (swapped, others))
        )
        precision = max(torch.finfo(like.dtype).eps for _, like in masks.found())
        if abs(kept - crossed) > 1e2 * precision * max(abs(kept), 1.0):
            return False
    return True


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1.0


def _merged(one: Tensor, two: Tensor, chosen: Tensor, dim: int) -> Tensor:
    """The first noise for the chosen examples, the second for the others."""
    shape = [len(chosen) if d == dim else 1 for d in range(one.dim())]
    return torch.where(chosen.view(shape), one, two)
