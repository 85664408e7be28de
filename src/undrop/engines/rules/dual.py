"""Dual numbers taken apart and put together, and the part of the batch that carries a tangent."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from undrop.engines.draw import Draw
from undrop.intercept import Site

__all__ = ["TangentField", "has_tangent", "packed", "padded", "read", "unpacked"]


class TangentField:
    """The field h ⊙ (1 + ε·σ·η) with ε = 0 and its tangent 1: h stays, ḣ becomes ḣ + σ·η⊙h.

    Args:
        draw: σ·η by site.
        batch: the number of examples; 0 if all of them carry the tangent.
        rows: how many of them, the first, carry it. Tangents of the others are of no use to anyone:
            a rule may leave them zero to save work.
        dim: the dimension of the batch.
    """

    def __init__(self, draw: Draw, batch: int = 0, rows: int = 0, dim: int = 0) -> None:
        self.draw = draw
        self.batch, self.rows, self.dim = batch, rows, dim

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """The dual number h, ḣ + σ·η⊙h."""
        noise = self.draw.scaled(site, h)
        if noise is None:
            return h
        primal, tangent = unpacked(h)
        moved = primal * noise if tangent is None else torch.addcmul(tangent, primal, noise)
        return packed(primal, moved)

    def carrying(self, x: Tensor, dim: int | None = None, mixed: int = 1) -> int:
        """How many entries of x along its batch dimension carry the tangent: all, or the first few.

        All, where another dimension has the batch's size as well: x may have been transposed.

        Args:
            x: what an op takes.
            dim: where it has the batch.
            mixed: how many of its last dimensions the op mixes, so that the batch is none of them.
        """
        dim = self.dim if dim is None else dim
        size = x.shape[dim] if x.dim() > dim else 0
        told = size == self.batch and x.shape[: x.dim() - mixed].count(size) == 1
        return self.rows if told else size

    def whole(self, x: Tensor) -> bool:
        """Whether all of x carries the tangent, or it can't be told."""
        return x.dim() <= self.dim + 1 or self.carrying(x) == x.shape[self.dim]


def unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The primal and, where there is one, the tangent."""
    primal, tangent = forward.unpack_dual(x)
    return primal, tangent


def packed(primal: Tensor, tangent: Tensor | None) -> Tensor:
    """The dual number of both; the primal alone where the tangent is zero."""
    if tangent is None:
        return primal
    dual: Tensor = forward.make_dual(primal, tangent)
    return dual


def padded(tangent: Tensor | None, like: Tensor, dim: int) -> Tensor | None:
    """The tangent of the first few entries along ``dim``, with zeros for the others."""
    if tangent is None or tangent.shape[dim] == like.shape[dim]:
        return tangent
    shape = list(tangent.shape)
    shape[dim] = like.shape[dim] - tangent.shape[dim]
    return torch.cat((tangent, tangent.new_zeros(shape)), dim)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors is a dual number."""
    return any(t is not None and unpacked(t)[1] is not None for t in tensors)


def read(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs
