"""The rows of a stacked batch: [without noise; +ε₀; -ε₀]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How many rows of a stacked batch have no noise, +ε₀ and -ε₀."""

    batch: int
    """B, the number of examples."""
    noisy: int
    """r, the number of examples that carry noise."""
    exact_output: bool
    """Whether the examples that carry noise also have a row without noise."""
    plain: int
    """The number of rows without noise."""
    sizes: tuple[int, ...]
    """The lengths of the blocks of consecutive rows with the same noise; none is 0."""
    blocks: tuple[int, ...]
    """The sizes of the groups of rows that share weights: without noise (if any), with +ε₀, with -ε₀."""
    total: int
    """The total number of rows."""

    @classmethod
    @lru_cache(maxsize=256)  # called at every step
    def of(cls, batch: int, fraction: float, exact_output: bool, shared: bool) -> Layout:
        """Return the layout in which round(fraction · batch) examples, at least one, carry noise.

        If all examples share some noise, as in DropConnect, each block is one call. The rows without
        noise then join the two blocks with noise and use their weights: [half of them; +ε₀] and [-ε₀;
        the other half]. Their error is O(ε₀) with a mean of O(ε₀²), and two calls cost less than three.
        """
        r = max(1, round(fraction * batch))
        plain = batch if exact_output else batch - r
        last = plain // 2 if shared and not exact_output else 0
        sizes = tuple(n for n in (plain - last, r, r, last) if n)
        blocks = (plain - last + r, r + last) if shared and not exact_output else sizes
        return cls(batch, r, exact_output, plain, sizes, blocks, plain + 2 * r)

    @property
    def first(self) -> int:
        """The number of rows without noise before those with noise."""
        return self.sizes[0] if self.plain else 0

    def split(self, x: Tensor, dim: int, repeats: int = 1) -> Split:
        """Split x into rows that have the same noise; each row is ``repeats`` entries."""
        sizes = self.sizes if repeats == 1 else tuple(n * repeats for n in self.sizes)
        parts = torch.split_with_sizes(x, sizes, dim)
        if not self.plain:
            return Split((), parts[0], parts[1], ())
        before, plus, minus, *after = parts
        return Split((before,), plus, minus, tuple(after))


class Split(NamedTuple):
    """A stacked tensor in parts."""

    before: tuple[Tensor, ...]
    """The rows without noise, if there are any."""
    plus: Tensor
    minus: Tensor
    after: tuple[Tensor, ...]
    """Further rows without noise, if there are any."""


class Rows:
    """Which examples carry noise in one step, and how a batch becomes a stacked one.

    ``order`` is a permutation of the examples whose last r carry noise; None if all of them do.
    """

    def __init__(self, layout: Layout, order: Tensor | None) -> None:
        self.layout = layout
        self.order = order
        self.index: Tensor | None = None
        if order is not None:
            noisy, first = order[layout.batch - layout.noisy :], layout.first
            last = (order[first : layout.plain],) if first < layout.plain else ()
            self.index = torch.cat((order[:first], noisy, noisy, *last))

    @classmethod
    def of_index(cls, layout: Layout, index: Tensor | None) -> Rows:
        """Return rows that support only ``stacked``, for compiled code."""
        rows = cls(layout, None)
        rows.order = rows.index = index
        return rows

    @classmethod
    def drawn(cls, layout: Layout, generator: torch.Generator) -> Rows:
        """Choose at random, without replacement, which examples carry noise."""
        if layout.noisy == layout.batch:
            return cls(layout, None)
        order = torch.randperm(layout.batch, generator=generator, device=generator.device)
        return cls(layout, order)

    def stacked(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) as a stacked batch."""
        if self.index is None:
            return torch.cat((x,) * len(self.layout.sizes), dim)
        return x.index_select(dim, self.index.to(x.device))

    def ordered(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) with the examples that carry noise last."""
        return x if self.order is None else x.index_select(dim, self.order.to(x.device))

    def noisy(self, x: Tensor, dim: int) -> Tensor:
        """Return the examples that carry noise."""
        r = self.layout.noisy
        return self.ordered(x, dim).narrow(dim, self.layout.batch - r, r)

    def merged(self, x: Tensor, dim: int) -> Tensor:
        """Return the noise-free value of a stacked x, up to O(ε₀²); examples with noise come last."""
        return self._merged(self.layout.split(x, dim), dim)

    def output_and_tangent(self, x: Tensor, dim: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return ``merged(x)`` and scale·(x₊ - x₋) from one split: the backward pass then joins once."""
        parts = self.layout.split(x, dim)
        return self._merged(parts, dim), (parts.plus - parts.minus).mul_(scale)

    def gradient_in_stacked(
        self, x: Tensor, in_output: Tensor, in_tangent: Tensor, dim: int, scale: float
    ) -> Tensor:
        """Return the gradient in x, from the gradients in both results of ``output_and_tangent``."""
        found = torch.empty_like(x, dtype=in_output.dtype)
        before, plus, minus, after = self.layout.split(found, dim)
        r = self.layout.noisy
        if self.layout.exact_output:
            before[0].copy_(in_output)
            torch.mul(in_tangent, scale, out=plus)
            torch.neg(plus, out=minus)
            return found
        if before:
            sizes = [part.shape[dim] for part in (*before, *after)]
            *others, in_output = torch.split_with_sizes(in_output, [*sizes, r], dim)
            for part, gradient in zip((*before, *after), others, strict=True):
                part.copy_(gradient)
        half = in_output * 0.5
        torch.add(half, in_tangent, alpha=scale, out=plus)
        torch.sub(half, in_tangent, alpha=scale, out=minus)
        return found

    def _merged(self, parts: Split, dim: int) -> Tensor:
        before, plus, minus, after = parts
        if self.layout.exact_output:
            return before[0]
        middle = torch.lerp(plus, minus, 0.5) if plus.is_floating_point() else plus
        return torch.cat((*before, *after, middle), dim) if before else middle

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """Return x (r rows, the examples with noise) in the order of the batch, 0 for other examples."""
        if self.order is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.layout.batch - self.layout.noisy
        return self.restored(torch.cat((x.new_zeros(shape), x), dim), dim)

    def restored(self, x: Tensor, dim: int) -> Tensor:
        """Return x, whose examples with noise come last, in the order of the batch."""
        if self.order is None:
            return x
        return x.index_select(dim, torch.argsort(self.order).to(x.device))
