"""Gradients by reverse mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    y: Tensor, tensors: Sequence[Tensor], weights: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Return ∂⟨weights, y⟩/∂x for each tensor x, zeros if y does not depend on it.

    Args:
        y: a scalar, or with ``weights`` any tensor.
        tensors: the tensors x.
        weights: a tensor of the shape of y; None if y is a scalar.
        options: further arguments of ``torch.autograd.grad``, such as ``create_graph``.
    """
    # y has no graph if, for example, it is uᵀHu of a loss that is linear in the output.
    if not tensors or not y.requires_grad:
        return [torch.zeros_like(x) for x in tensors]
    return list(torch.autograd.grad(y, tensors, weights, materialize_grads=True, **options))
