"""How uᵀHu splits over the classes of the output.

With p = softmax(F) and v = u - Σ_k p_k u_k, class c carries p_c v_c² of uᵀHu = Σ p v²: dropout asks
for stable outputs where the model is uncertain (the paper's p(1 - p)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 22  # numbers in a chunk of rows


class ByClass(NamedTuple):
    """One number per class, summed over the terms of the loss, in float64."""

    quadratic: Tensor
    """The part of uᵀHu."""
    diagonal: Tensor
    """The part of tr H."""


@torch.no_grad()
def elementwise_by_class(curvature: Tensor, u: Tensor) -> ByClass | None:
    """For a diagonal H: sum curvature·u² over all but the last dimension; None without classes."""
    if u.dim() < 2:
        return None
    curvature = curvature.double()
    quadratic = curvature * u.double().square()
    return ByClass(quadratic.flatten(0, -2).sum(0), curvature.flatten(0, -2).sum(0))


@torch.no_grad()
def softmax_by_class(
    rows: Tensor,
    u: Tensor,
    classes: int,
    logits_of: Callable[[Tensor], Tensor] = lambda rows: rows,
    tangents_of: Callable[[Tensor], Tensor] = lambda u: u,
) -> ByClass:
    """For a softmax over rows of logits, or over what two maps make of rows and their tangents."""
    quadratic = torch.zeros(classes, dtype=torch.float64, device=rows.device)
    diagonal = torch.zeros_like(quadratic)
    size = max(1, _CHUNK // classes)
    for part, tangent in zip(rows.detach().split(size), u.detach().split(size), strict=True):
        p, tangent = torch.softmax(logits_of(part).double(), -1), tangents_of(tangent).double()
        v = tangent - (p * tangent).sum(-1, keepdim=True)
        quadratic += (p * v.square()).sum(0)
        diagonal += (p * (1.0 - p)).sum(0)
    return ByClass(quadratic, diagonal)
