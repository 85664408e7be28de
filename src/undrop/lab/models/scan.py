"""Linear recurrences without a step per token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear_scan"]


def linear_scan(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """All c_t = a_t ⊙ c_{t-1} + b_t, with c_{-1} = ``initial``, in about log₂ T vectorised rounds.

    Two steps make one: c_{2k+1} = (a_{2k+1} a_{2k}) c_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1}). That
    recurrence of half the length gives the odd steps, and one more step from each gives the even
    ones; altogether some 3T multiplications, against T for the loop. There are no divisions, so
    that gates near 0 or 1 lose nothing, and only products and sums, so that it can be
    differentiated in any mode and order.

    Args:
        a: the factors (T, …), T ≥ 1.
        b: the inputs (T, …).
        initial: the value before the first step (1, …).

    Returns:
        c of shape (T, …).
    """
    steps, half = len(b), len(b) // 2
    if half == 0:
        return a * initial + b
    a_even, a_odd = _pairs(a, half)
    b_even, b_odd = _pairs(b, half)
    odd = linear_scan(a_odd * a_even, a_odd * b_even + b_odd, initial)
    even = a_even * torch.cat([initial, odd[:-1]]) + b_even
    c = torch.stack([even, odd], dim=1).flatten(0, 1)
    if steps == 2 * half:
        return c
    return torch.cat([c, a[-1:] * odd[-1:] + b[-1:]])


def _pairs(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """The even and the odd steps, but for a last one without a partner."""
    paired = x if len(x) == 2 * half else x[: 2 * half]  # no slice, no copy in the backward pass
    return paired.view(half, 2, *x.shape[1:]).unbind(1)
