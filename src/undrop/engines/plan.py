"""How a model runs on a stacked batch, and the noise of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.engines.draw import Draw
from undrop.engines.layout import Rows
from undrop.intercept import Site, map_tensors


class NotStackable(Exception):
    """A model can't run on a stacked batch; the message is the reason, worded to end a sentence."""


class PlanChanged(Exception):
    """The pass did not use the sites that the plan lists."""


@dataclass(frozen=True)
class SitePlan:
    """Where a site has its batch dimension."""

    site: Site
    """The site in a plain pass, with B examples."""
    dim: int | None
    """The batch dimension; None if all examples share the noise."""
    repeats: int
    """How many entries along ``dim`` belong to one example."""
    time_major: bool
    """Whether the example index varies fastest in a flattened dimension."""
    dtype: torch.dtype
    device: torch.device

    def rest(self, draw: Draw) -> tuple[int, ...]:
        """Return the shape of η without the batch dimension; the repeats come first."""
        shape = draw.shape(self.site)
        assert self.dim is not None
        rest = (*shape[: self.dim], *shape[self.dim + 1 :])
        return (self.repeats, *rest) if self.repeats > 1 else rest

    def one_mask(self, draw: Draw) -> bool:
        """Return whether all examples have the same η."""
        shape, dim = draw.shape(self.site), self.dim or 0
        return self.repeats == 1 and shape[dim] == 1 < self.site.shape[dim]

    def placed(self, part: Tensor, rest: tuple[int, ...]) -> Tensor:
        """Return noise of shape (rows, entries) in the site's own shape."""
        assert self.dim is not None
        noise = part.view(len(part), *rest)
        if self.repeats > 1:
            noise = noise.transpose(0, 1) if self.time_major else noise
            noise = noise.flatten(0, 1)
        return noise.movedim(0, self.dim) if self.dim else noise


@dataclass(frozen=True)
class Plan:
    """How a model runs on a stacked batch; found and proven by ``proving.py``."""

    dim: int
    """The batch dimension in the targets, and in every other tensor that has the batch size there."""
    late: bool
    """Whether the batch is stacked at the first site instead of at the input."""
    input_dims: tuple[int | None, ...]
    """The batch dimension of each tensor in the inputs."""
    target_dims: tuple[int | None, ...]
    output_dims: tuple[int | None, ...]
    logits_dim: int
    """The batch dimension of the tensor that the loss receives."""
    sites: tuple[SitePlan, ...]
    midpoints: bool = True
    """Whether functions with kinks choose their branch at the midpoint of ±ε₀."""
    mask_draws: tuple[bool | None, ...] = ()
    """For each random draw that can become a mask: whether the mask drops where it is 1; None if the
    draw is not a mask."""
    reads_filled_tensor: bool = False
    """Whether the model read a mask through the tensor that it filled in place, rather than through the
    return value."""

    @cached_property
    def shares_noise(self) -> bool:
        """Whether all examples share the noise of some site."""
        return any(s.dim is None for s in self.sites)

    @cached_property
    def noise_shapes(self) -> dict[tuple[Any, ...], NoiseShapes]:
        """The shapes that :func:`stacked_noise` draws; it fills this cache."""
        return {}


class NoiseShapes(NamedTuple):
    """The shapes of the noise at sites with per-example noise; it is drawn as columns of one tensor."""

    sites: tuple[int, ...]
    """The indices of these sites in the plan."""
    rests: tuple[tuple[int, ...], ...]
    """For each site, the shape of η without the batch dimension."""
    widths: tuple[int, ...]
    """For each site, the number of columns."""
    one_mask: tuple[bool, ...]
    """For each site, whether all examples have the same η."""

    @classmethod
    def of(cls, plan: Plan, draw: Draw, scales: Sequence[float]) -> NoiseShapes:
        """Return the shapes for the mask structure of a draw and the sites whose scale is not 0."""
        key = (draw.mask, *map(bool, scales))
        found = plan.noise_shapes.get(key)
        if found is None:
            own = tuple(i for i, s in enumerate(plan.sites) if scales[i] and s.dim is not None)
            rests = tuple(plan.sites[i].rest(draw) for i in own)
            widths = tuple(math.prod(rest) for rest in rests)
            found = cls(own, rests, widths, tuple(plan.sites[i].one_mask(draw) for i in own))
            plan.noise_shapes[key] = found
        return found


def map_dims(
    function: Callable[[Tensor, int], Tensor], tree: Any, dims: Sequence[int | None]
) -> Any:
    """Apply ``function(x, dim)`` to every tensor of a tree that has a batch dimension."""
    place = iter(dims)

    def on(x: Tensor) -> Tensor:
        dim = next(place)
        return x if dim is None else function(x, dim)

    return map_tensors(on, tree)


def stacked_noise(plan: Plan, draw: Draw, rows: Rows, scales: Sequence[float]) -> list[Any]:
    """Draw ε₀·σ·η for all sites at once; ``scales`` are ε₀·σ, 0 for a site without noise.

    Returns:
        For each site None (no noise), the factors [1; 1 + ε₀ση; 1 - ε₀ση] of a stacked activation, or
        ε₀ση for a weight that all examples share.
    """
    noise: list[Any] = [None] * len(scales)
    shapes = NoiseShapes.of(plan, draw, scales)
    if shapes.sites:
        parts = torch.split_with_sizes(_factors(plan, draw, rows, shapes, scales), shapes.widths, 1)
        for i, part, rest in zip(shapes.sites, parts, shapes.rests, strict=True):
            noise[i] = plan.sites[i].placed(part, rest)
    if plan.shares_noise:
        for i, s in enumerate(plan.sites):
            if scales[i] and s.dim is None:
                noise[i] = draw.eta(s, scales[i])
    return noise


def _factors(
    plan: Plan, draw: Draw, rows: Rows, shapes: NoiseShapes, scales: Sequence[float]
) -> Tensor:
    """Return the factors of every per-example site as columns of one tensor (rows, all entries)."""
    layout, own = rows.layout, [scales[i] for i in shapes.sites]
    same = len(set(own)) == 1
    eta = draw.eta_of_rows(
        [plan.sites[i] for i in shapes.sites], shapes.widths, rows, own[0] if same else 1.0
    )
    if not same or any(shapes.one_mask):
        parts = eta.split(shapes.widths, 1)
        for part, scale, one_mask in zip(parts, own, shapes.one_mask, strict=True):
            if not same:
                part.mul_(scale)
            if one_mask:
                part.copy_(part[:1].expand_as(part))
    factors = eta.new_empty((layout.total, eta.shape[1]))
    before, plus, minus, after = layout.split(factors, 0)
    for ones in (*before, *after):
        ones.fill_(1.0)
    torch.add(eta, 1.0, out=plus)
    torch.sub(plus, eta, alpha=2.0, out=minus)
    return factors
