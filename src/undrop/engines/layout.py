"""The rows of a stacked batch: [without noise; +ε₀; -ε₀].

``Layout`` says how many rows there are of each kind, and ``Rows`` which example is in which row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The number of rows of a stacked batch without noise, with +ε₀ and with -ε₀."""

    batch: int
    """B, the number of examples."""
    noisy: int
    """r, the number of examples with noise."""
    exact_output: bool
    """Whether the examples with noise also have a row without noise."""
    plain: int
    """The number of rows without noise."""
    sizes: tuple[int, ...]
    """The numbers of consecutive rows of one kind, in the order of the rows; none is 0."""
    blocks: tuple[int, ...]
    """The sizes of the blocks: consecutive rows that have the same weights where weights carry noise."""
    total: int
    """The total number of rows."""

    @classmethod
    @lru_cache(maxsize=256)  # called at every step
    def of(cls, batch: int, fraction: float, exact_output: bool, shared: bool) -> Layout:
        """Return the layout in which round(fraction · batch) examples, at least one, carry noise.

        ``shared`` says that all examples share the noise of some site, such as a weight in DropConnect.
        A function of that weight then runs once per block. To have two blocks instead of three, half of
        the rows without noise join the block of +ε₀ and half the block of -ε₀, and use the weights of
        that block. The error of these rows is O(ε₀), with a mean of O(ε₀²).
        """
        r = max(1, round(fraction * batch))
        plain = batch if exact_output else batch - r
        last = plain // 2 if shared and not exact_output else 0
        sizes = tuple(n for n in (plain - last, r, r, last) if n)
        blocks = (plain - last + r, r + last) if shared and not exact_output else sizes
        return cls(batch, r, exact_output, plain, sizes, blocks, plain + 2 * r)

    @property
    def leading(self) -> int:
        """The number of rows without noise that come before the rows with noise."""
        return self.sizes[0] if self.plain else 0

    def split(self, x: Tensor, dim: int, repeats: int = 1) -> SplitRows:
        """Split a stacked x along ``dim``; each row is ``repeats`` consecutive entries."""
        sizes = self.sizes if repeats == 1 else tuple(n * repeats for n in self.sizes)
        parts = torch.split_with_sizes(x, sizes, dim)
        if not self.plain:
            return SplitRows((), parts[0], parts[1], ())
        before, plus, minus, *after = parts
        return SplitRows((before,), plus, minus, tuple(after))


class SplitRows(NamedTuple):
    """The rows of a stacked tensor; ``before`` and ``after`` are the rows without noise, if any."""

    before: tuple[Tensor, ...]
    plus: Tensor
    minus: Tensor
    after: tuple[Tensor, ...]


class Rows:
    """The examples that carry noise in one step, and the row of each example in the stacked batch.

    Args:
        layout: the number of rows of each kind.
        order: a permutation of the examples, of which the last r carry noise. None if all examples do.
    """

    def __init__(self, layout: Layout, order: Tensor | None) -> None:
        self.layout = layout
        self.order = order
        self.index: Tensor | None = None
        """The example of each row; None without an order."""
        if order is not None:
            noisy, leading = order[layout.batch - layout.noisy :], layout.leading
            trailing = (order[leading : layout.plain],) if leading < layout.plain else ()
            self.index = torch.cat((order[:leading], noisy, noisy, *trailing))

    @classmethod
    def of_index(cls, layout: Layout, index: Tensor | None) -> Rows:
        """Return rows that can only ``stack``, from their ``index``: all that a stacked pass needs."""
        rows = cls(layout, None)
        rows.index = index
        return rows

    @classmethod
    def draw(cls, layout: Layout, generator: torch.Generator) -> Rows:
        """Choose at random, without replacement, which examples carry noise."""
        if layout.noisy == layout.batch:
            return cls(layout, None)
        order = torch.randperm(layout.batch, generator=generator, device=generator.device)
        return cls(layout, order)

    def stack(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) as a stacked batch."""
        if self.index is None:
            return torch.cat((x,) * len(self.layout.sizes), dim)
        return x.index_select(dim, self.index.to(x.device))

    def noisy_last(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) with the examples that carry noise last."""
        return x if self.order is None else x.index_select(dim, self.order.to(x.device))

    def noisy(self, x: Tensor, dim: int) -> Tensor:
        """Return the r examples of x (B rows along ``dim``) that carry noise."""
        r = self.layout.noisy
        return self.noisy_last(x, dim).narrow(dim, self.layout.batch - r, r)

    def noise_free(self, x: Tensor, dim: int) -> Tensor:
        """Return the value of a stacked x at ε = 0, up to O(ε₀²); examples with noise come last."""
        return self._noise_free(self.layout.split(x, dim), dim)

    def output_and_tangent(self, x: Tensor, dim: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return ``noise_free(x)`` and scale·(x₊ - x₋).

        Both come from one split, so that the backward pass concatenates only once.
        """
        parts = self.layout.split(x, dim)
        return self._noise_free(parts, dim), (parts.plus - parts.minus).mul_(scale)

    def stacked_gradient(
        self, x: Tensor, in_output: Tensor, in_tangent: Tensor, dim: int, scale: float
    ) -> Tensor:
        """Return the gradient of a stacked x, from the gradients of F and u (``output_and_tangent``)."""
        gradient = torch.empty_like(x, dtype=in_output.dtype)
        before, plus, minus, after = self.layout.split(gradient, dim)
        r = self.layout.noisy
        if self.layout.exact_output:
            before[0].copy_(in_output)
            torch.mul(in_tangent, scale, out=plus)
            torch.neg(plus, out=minus)
            return gradient
        if before:
            sizes = [part.shape[dim] for part in (*before, *after)]
            *without_noise, in_output = torch.split_with_sizes(in_output, [*sizes, r], dim)
            for part, values in zip((*before, *after), without_noise, strict=True):
                part.copy_(values)
        half = in_output * 0.5
        torch.add(half, in_tangent, alpha=scale, out=plus)
        torch.sub(half, in_tangent, alpha=scale, out=minus)
        return gradient

    def _noise_free(self, parts: SplitRows, dim: int) -> Tensor:
        before, plus, minus, after = parts
        if self.layout.exact_output:
            return before[0]
        middle = torch.lerp(plus, minus, 0.5) if plus.is_floating_point() else plus
        return torch.cat((*before, *after, middle), dim) if before else middle

    def with_zeros(self, x: Tensor, dim: int) -> Tensor:
        """Return x (r rows, the examples with noise) in the order of the batch, with 0 elsewhere."""
        if self.order is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.layout.batch - self.layout.noisy
        return self.in_batch_order(torch.cat((x.new_zeros(shape), x), dim), dim)

    def in_batch_order(self, x: Tensor, dim: int) -> Tensor:
        """Undo ``noisy_last``: return the examples of x in the order of the batch."""
        if self.order is None:
            return x
        return x.index_select(dim, torch.argsort(self.order).to(x.device))
