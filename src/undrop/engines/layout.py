"""The rows of a stacked batch: [without noise; +ε₀; -ε₀]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "Rows"]


@dataclass(frozen=True)
class Layout:
    """How many rows of a stacked batch have no noise, +ε₀ and -ε₀."""

    batch: int
    """B, the number of examples."""
    noisy: int
    """r, the number of examples that carry noise."""
    exact_output: bool = False
    """Whether the examples that carry noise have a row without noise as well."""

    @property
    def plain(self) -> int:
        """The number of rows without noise; they come first."""
        return self.batch if self.exact_output else self.batch - self.noisy

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.plain + 2 * self.noisy

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of the blocks that are not empty."""
        sizes = (self.plain, self.noisy, self.noisy)
        return sizes if self.plain else sizes[1:]

    def split(self, x: Tensor, dim: int, repeats: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows without noise, with +ε₀ and with -ε₀; each row is ``repeats`` entries."""
        p, r = self.plain * repeats, self.noisy * repeats
        return x.narrow(dim, 0, p), x.narrow(dim, p, r), x.narrow(dim, p + r, r)


class Rows:
    """Which examples carry noise in one step, and how a batch becomes a stacked one.

    Args:
        layout: the sizes.
        order: a permutation of the examples whose last r carry noise; None if all of them do.
    """

    def __init__(self, layout: Layout, order: Tensor | None) -> None:
        self.layout = layout
        self.order = order
        self.index: Tensor | None = None
        if order is not None:
            noisy = order[layout.batch - layout.noisy :]
            self.index = torch.cat((order[: layout.plain], noisy, noisy))

    @classmethod
    def of_index(cls, layout: Layout, index: Tensor | None) -> Rows:
        """Return rows that can only stack a batch, for compiled code."""
        rows = cls(layout, None)
        rows.order = rows.index = index
        return rows

    @classmethod
    def drawn(cls, layout: Layout, generator: torch.Generator) -> Rows:
        """Choose the examples that carry noise at random."""
        if layout.noisy == layout.batch:
            return cls(layout, None)
        order = torch.randperm(layout.batch, generator=generator, device=generator.device)
        return cls(layout, order)

    def stacked(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) as a stacked batch."""
        if self.index is None:
            return torch.cat((x,) * len(self.layout.blocks), dim)
        return x.index_select(dim, self.index.to(x.device))

    def ordered(self, x: Tensor, dim: int) -> Tensor:
        """Return x (B rows along ``dim``) with the examples that carry noise last."""
        return x if self.order is None else x.index_select(dim, self.order.to(x.device))

    def noisy(self, x: Tensor, dim: int) -> Tensor:
        """Return the examples that carry noise."""
        r = self.layout.noisy
        return self.ordered(x, dim).narrow(dim, self.layout.batch - r, r)

    def merged(self, x: Tensor, dim: int) -> Tensor:
        """Return the noise-free value of a stacked x to O(ε₀²), examples with noise last."""
        plain, plus, minus = self.layout.split(x, dim)
        if self.layout.exact_output:
            return plain
        middle = (plus + minus) * 0.5 if x.is_floating_point() else plus
        return torch.cat((plain, middle), dim) if plain.shape[dim] else middle

    def difference(self, x: Tensor, dim: int) -> Tensor:
        """Return x₊ - x₋."""
        _, plus, minus = self.layout.split(x, dim)
        return plus - minus

    def restored(self, x: Tensor, dim: int) -> Tensor:
        """Return x, examples with noise last, in the order of the batch."""
        if self.order is None:
            return x
        return x.index_select(dim, torch.argsort(self.order).to(x.device))
