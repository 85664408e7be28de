"""Layer norm with its tangent along ε, and a backward written by hand.

With x̂ = (x - mean x)·r, r = 1/sqrt(var x + eps), and P(v) = v - mean v - x̂·mean(x̂ v), which is its
own adjoint,

    y = w x̂ + b,    ẏ = w r P(ẋ).

Backward, with g = w·dy and q = w·dẏ: ``dẋ = r P(q)`` and, since x moves x̂ and r,
``dx = r P(g - r(q·mean(x̂ ẋ) + ẋ·mean(x̂ q))) - r² x̂·mean(q P(ẋ))``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["layer_norm"]


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """mean(a b) over the last dimension."""
    dot: Tensor = torch.linalg.vecdot(a, b)
    return dot.unsqueeze(-1) / a.shape[-1]


class _LayerNorm(torch.autograd.Function):
    """(x, ẋ, w, b) to (y, ẏ); rows are normalised over the last dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dx: Tensor, w: Tensor | None, b: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, mean, r = torch.native_layer_norm(x, x.shape[-1:], w, b, eps)
        ctx.save_for_backward(x, dx, w, mean, r)
        normal = (x - mean) * r
        dy = torch.addcmul(dx - _mean(dx), normal, _dot(normal, dx), value=-1.0).mul_(r)
        return y, dy if w is None else dy.mul_(w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor, gdy: Tensor) -> tuple[Tensor | None, ...]:
        x, dx, w, mean, r = ctx.saved_tensors
        normal = (x - mean) * r
        aligned = _dot(normal, dx)
        projected = torch.addcmul(dx - _mean(dx), normal, aligned, value=-1.0)
        g, q = (gy, gdy) if w is None else (gy * w, gdy * w)
        along = _dot(normal, q)
        gdx = torch.addcmul(q - _mean(q), normal, along, value=-1.0).mul_(r)
        k = g - (q * aligned).addcmul_(dx, along).mul_(r)
        gx = torch.addcmul(
            k - _mean(k), normal, _dot(normal, k) + r * _dot(q, projected), value=-1.0
        )
        gw = gb = None
        if ctx.needs_input_grad[2]:
            gw = (gy * normal).addcmul_(gdy, projected.mul_(r)).reshape(-1, x.shape[-1]).sum(0)
        if ctx.needs_input_grad[3]:
            gb = gy.reshape(-1, x.shape[-1]).sum(0)
        return gx.mul_(r), gdx, gw, gb, None


def layer_norm(
    x: Tensor, dx: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Y and ẏ of layer norm over the last dimension.

    Args:
        x: (…, D).
        dx: its tangent.
        w: the scale (D,), or None for 1.
        b: the shift (D,), or None for 0.
        eps: added to the variance.
    """
    y, dy = _LayerNorm.apply(x, dx, w, b, eps)
    return y, dy
