"""How a model runs on a stacked batch, and the noise of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.engines.draw import HALF, Draw
from undrop.engines.layout import Rows
from undrop.intercept import Site, map_tensors


class NotStackable(Exception):
    """A model can't run on a stacked batch. The message is a clause, such as "its examples interact"."""


class PlanChanged(Exception):
    """A stacked pass reached other sites than the plan lists."""


@dataclass(frozen=True)
class SitePlan:
    """The batch dimension of a site's activation h, and how the rows are arranged along it."""

    site: Site
    """The site, with the shapes of a plain pass over B examples."""
    dim: int | None
    """The batch dimension; None if all examples share the noise."""
    repeats: int
    """The number of entries along ``dim`` per example: T if ``dim`` is a flattened (B, T) or (T, B)."""
    time_major: bool
    """Whether a flattened dimension is (T, B) instead of (B, T)."""
    dtype: torch.dtype
    device: torch.device

    def row_shape(self, draw: Draw) -> tuple[int, ...]:
        """Return the shape of η for one example; if an example has several entries, they come first."""
        shape = draw.shape(self.site)
        assert self.dim is not None
        others = (*shape[: self.dim], *shape[self.dim + 1 :])
        return (self.repeats, *others) if self.repeats > 1 else others

    def same_eta(self, draw: Draw) -> bool:
        """Return whether all examples have the same η."""
        shape, dim = draw.shape(self.site), self.dim or 0
        return self.repeats == 1 and shape[dim] == 1 < self.site.shape[dim]

    def reshape_rows(self, rows: Tensor, row_shape: tuple[int, ...]) -> Tensor:
        """Reshape noise from (rows, entries of a row) to a shape that broadcasts to the stacked h."""
        assert self.dim is not None
        noise = rows.view(len(rows), *row_shape)
        if self.repeats > 1:
            noise = noise.transpose(0, 1) if self.time_major else noise
            noise = noise.flatten(0, 1)
        return noise.movedim(0, self.dim) if self.dim else noise


@dataclass(frozen=True)
class Plan:
    """How a model runs on a stacked batch; found and proven by ``proving.py``."""

    dim: int
    """The batch dimension in the targets, and in every other tensor that has the batch size there."""
    at_first_site: bool
    """Whether the batch is stacked at the first site instead of at the input."""
    input_dims: tuple[int | None, ...]
    """The batch dimension of each tensor in the inputs."""
    target_dims: tuple[int | None, ...]
    output_dims: tuple[int | None, ...]
    logits_dim: int
    """The batch dimension of the tensor that the loss receives."""
    sites: tuple[SitePlan, ...]
    midpoints: bool = True
    """Whether functions with kinks choose their branch at the midpoint of the rows at ±ε₀."""
    mask_draws: tuple[bool | None, ...] = ()
    """For each random draw of a pass: whether it becomes a mask that drops where it is 1; None if it is
    not a mask."""
    reads_filled_tensor: bool = False
    """Whether the model fills a tensor with a mask in place, and reads that tensor, not the result."""

    @cached_property
    def shares_noise(self) -> bool:
        """Whether all examples share the noise of some site."""
        return any(s.dim is None for s in self.sites)

    @cached_property
    def half_precision(self) -> bool:
        """Whether the activations at some site have half precision: autocast may be inside the model."""
        return any(s.dtype in HALF for s in self.sites)

    @cached_property
    def noise_columns(self) -> dict[tuple[Any, ...], NoiseColumns]:
        """A cache of :meth:`NoiseColumns.of`."""
        return {}


class NoiseColumns(NamedTuple):
    """Where the noise of a site is, in a tensor with a row per example and columns for all sites."""

    sites: tuple[int, ...]
    """The indices of the sites that have columns."""
    row_shapes: tuple[tuple[int, ...], ...]
    """For each site, the shape of η for one example."""
    widths: tuple[int, ...]
    """For each site, the number of columns."""
    same_eta: tuple[bool, ...]
    """For each site, whether all examples have the same η."""

    @classmethod
    def of(cls, plan: Plan, draw: Draw, scales: Sequence[float]) -> NoiseColumns:
        """Return the columns for the mask structure of a draw and the sites whose scale is not 0."""
        key = (draw.mask, *map(bool, scales))
        columns = plan.noise_columns.get(key)
        if columns is None:
            sites = tuple(i for i, s in enumerate(plan.sites) if scales[i] and s.dim is not None)
            row_shapes = tuple(plan.sites[i].row_shape(draw) for i in sites)
            widths = tuple(math.prod(shape) for shape in row_shapes)
            same_eta = tuple(plan.sites[i].same_eta(draw) for i in sites)
            columns = plan.noise_columns[key] = cls(sites, row_shapes, widths, same_eta)
        return columns


def map_dims(
    function: Callable[[Tensor, int], Tensor], tree: Any, dims: Sequence[int | None]
) -> Any:
    """Replace every tensor x of a tree by ``function(x, dim)``; a tensor whose dim is None stays."""
    remaining = iter(dims)

    def apply(x: Tensor) -> Tensor:
        dim = next(remaining)
        return x if dim is None else function(x, dim)

    return map_tensors(apply, tree)


def stacked_noise(plan: Plan, draw: Draw, rows: Rows, scales: Sequence[float]) -> list[Any]:
    """Draw the noise of a stacked pass; ``scales`` has ε₀·σ for each site, 0 for a site without noise.

    Returns:
        For each site None (no noise), the factors [1; 1 + ε₀ση; 1 - ε₀ση] of a stacked activation, or
        ε₀ση for a weight that all examples share.
    """
    noise: list[Any] = [None] * len(scales)
    columns = NoiseColumns.of(plan, draw, scales)
    if columns.sites:
        factors = _factors(plan, draw, rows, columns, scales)
        parts = torch.split_with_sizes(factors, columns.widths, 1)
        for i, part, row_shape in zip(columns.sites, parts, columns.row_shapes, strict=True):
            noise[i] = plan.sites[i].reshape_rows(part, row_shape)
    if plan.shares_noise:
        for i, s in enumerate(plan.sites):
            if scales[i] and s.dim is None:
                noise[i] = draw.eta(s, scales[i])
    return noise


def _factors(
    plan: Plan, draw: Draw, rows: Rows, columns: NoiseColumns, all_scales: Sequence[float]
) -> Tensor:
    """Return [1; 1 + ε₀ση; 1 - ε₀ση] for all sites with a batch dimension, as columns of one tensor."""
    sites = [plan.sites[i] for i in columns.sites]
    scales = [all_scales[i] for i in columns.sites]
    one_scale = len(set(scales)) == 1
    eta = draw.eta_of_rows(sites, columns.widths, rows, scales[0] if one_scale else 1.0)
    if not one_scale or any(columns.same_eta):
        parts = eta.split(columns.widths, 1)
        for part, scale, same_eta in zip(parts, scales, columns.same_eta, strict=True):
            if not one_scale:
                part.mul_(scale)
            if same_eta:
                part.copy_(part[:1].expand_as(part))
    factors = eta.new_empty((rows.layout.total, eta.shape[1]))
    before, plus, minus, after = rows.layout.split(factors, 0)
    for ones in (*before, *after):
        ones.fill_(1.0)
    torch.add(eta, 1.0, out=plus)
    torch.sub(plus, eta, alpha=2.0, out=minus)
    return factors
