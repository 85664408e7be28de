"""Scaled dot product attention with its tangent along ε, and a backward written by hand.

With scores s = QKᵀ·scale + mask, p = softmax(s) and noise ν = σ·η on the probabilities:

    ṡ = (Q̇Kᵀ + QK̇ᵀ)·scale,    ṗ = p(ṡ - Σ p ṡ),    ẇ = ṗ + ν p,    o = p V,    ȯ = ẇ V + p V̇.

Backward: with b = dẇ - Σ p dẇ the adjoint of ṡ is ``p b``, and that of s is ``p g + ṗ b`` less p times
its sum, where ``g = do Vᵀ + dȯ V̇ᵀ + ν dẇ``. The rows of a primal and of its tangent are stacked, so
that each product with K or V serves both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from undrop.errors import OptionError
from undrop.kernels.softmax import working_dtype

__all__ = ["attention"]


class _Tensors(NamedTuple):
    """All that attention depends on, as batches of matrices."""

    q: Tensor  # (batch, L, E)
    k: Tensor  # (batch, S, E)
    v: Tensor  # (batch, S, D)
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    mask: Tensor | None  # added to the scores
    noise: Tensor | None  # (batch, L, S)


class _Gradients(NamedTuple):
    """Their adjoints."""

    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None
    mask: Tensor | None
    noise: None


def _stacked(primal: Tensor, tangent: Tensor | None) -> Tensor:
    return torch.cat((primal, torch.zeros_like(primal) if tangent is None else tangent), 1)


def _forward(t: _Tensors, scale: float) -> tuple[Tensor, Tensor]:
    """[o; ȯ] and [p; ẇ], rows stacked."""
    n = t.q.shape[1]
    scores = (_stacked(t.q, t.dq) * scale) @ t.k.transpose(1, 2)
    if t.dk is not None:
        scores[:, n:] += (t.q * scale) @ t.dk.transpose(1, 2)
    scores = scores.to(working_dtype(scores.dtype))
    s, ds = scores[:, :n], scores[:, n:]
    if t.mask is not None:
        s += t.mask
        empty = (t.mask == -math.inf).all(-1, keepdim=True)
        s.masked_fill_(empty, 0.0)
    p = torch.softmax(s, -1)
    if t.mask is not None:
        p.masked_fill_(empty, 0.0)  # where nothing is allowed the output is zero, as in torch
    mean = (p * ds).sum(-1, keepdim=True)
    ds.sub_(mean).mul_(p)
    if t.noise is not None:
        ds.addcmul_(t.noise, p)
    s.copy_(p)
    weights = scores.to(t.v.dtype)
    out = weights @ t.v
    if t.dv is not None:
        out[:, n:] += weights[:, :n] @ t.dv
    return out, weights


def _score_adjoints(g: Tensor, weights: Tensor, noise: Tensor | None) -> Tensor:
    """From [g - ν dẇ; dẇ] to the adjoints of [s; ṡ], in place."""
    n = g.shape[1] // 2
    g_p, g_w, p, dp = g[:, :n], g[:, n:], weights[:, :n], weights[:, n:]
    if noise is not None:
        g_p.addcmul_(noise, g_w)
        dp = torch.addcmul(dp, noise, p, value=-1.0)
    g_w.sub_((p * g_w).sum(-1, keepdim=True))
    g_p.mul_(p).addcmul_(dp, g_w)
    g_p.addcmul_(p, g_p.sum(-1, keepdim=True), value=-1.0)
    g_w.mul_(p)
    return g


class _Attention(torch.autograd.Function):
    """The tensors of ``_Tensors`` to (o, ȯ)."""

    @staticmethod
    def forward(ctx: Any, scale: float, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        t = _Tensors(*tensors)  # type: ignore[arg-type]
        out, weights = _forward(t, scale)
        ctx.save_for_backward(weights, *t)
        ctx.scale = scale
        n = t.q.shape[1]
        return out[:, :n].clone(), out[:, n:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, go: Tensor, gdo: Tensor) -> tuple[Tensor | None, ...]:
        weights, *tensors = ctx.saved_tensors
        t, needs = _Tensors(*tensors), ctx.needs_input_grad[1:]
        with torch.autocast(go.device.type, enabled=False):
            gradients = _backward(t, weights, torch.cat((go, gdo), 1), ctx.scale)
        return None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


def _backward(t: _Tensors, weights: Tensor, g_out: Tensor, scale: float) -> _Gradients:
    """From the adjoints of [o; ȯ] to those of all tensors."""
    n, dtype = t.q.shape[1], working_dtype(g_out.dtype)
    gdo, g_dv, g_dk, g_mask = g_out[:, n:], None, None, None
    g_v = weights.transpose(1, 2) @ g_out
    g = g_out @ t.v.transpose(1, 2)
    if t.dv is not None:
        g_dv = weights[:, :n].transpose(1, 2) @ gdo
        g[:, :n] += gdo @ t.dv.transpose(1, 2)
    g = _score_adjoints(g.to(dtype), weights.to(dtype), t.noise)
    if t.mask is not None and t.mask.requires_grad:
        g_mask = g[:, :n].sum_to_size(t.mask.shape)
    g, q = g.to(g_out.dtype), t.q * scale
    g_q = (g @ t.k).mul_(scale)
    g_k = g.transpose(1, 2) @ (_stacked(t.q, t.dq) * scale)
    if t.dk is not None:
        g_q[:, :n].add_(g[:, n:] @ t.dk, alpha=scale)
        g_dk = g[:, n:].transpose(1, 2) @ q
    return _Gradients(g_q[:, :n], g_k, g_v, g_q[:, n:], g_dk, g_dv, g_mask, None)


def _additive(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as a term of the scores: 0 where a boolean one allows, -inf where not."""
    if is_causal:
        if mask is not None:
            raise OptionError("attention takes a mask or is_causal, not both: leave one out.")
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=working_dtype(q.dtype), device=mask.device)
    return torch.where(mask, zero, -math.inf)


def _matrices(x: Tensor | None, batch: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """(..., n, m) as a batch of matrices."""
    if x is None:
        return None
    return x.to(dtype).expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ·scale + mask) V and its tangent; arguments as in torch's function of that name.

    Differentiable once, in all tensors but the noise, through primal and tangent outputs alike. Under
    autocast the products are taken in its type, and the softmax in float32.

    Args:
        q: queries (..., L, E).
        k: keys (..., S, E).
        v: values (..., S, D).
        dq: the tangent of q, None for zero; the same holds for dk and dv.
        dk: that of k.
        dv: that of v.
        mask: added to the scores, or where boolean, True for what may be attended to.
        is_causal: whether position l attends to positions up to l only.
        scale: 1/sqrt(E) unless given.
        enable_gqa: whether a head of k and v serves several of q (dimension -3).
        noise: ν = σ·η on the probabilities (..., L, S): the tangent of p has ν p added.

    Returns:
        The output (..., L, D) and its tangent.

    Raises:
        OptionError: if there is a mask and is_causal too.
    """
    device, dtype = q.device.type, q.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    added = _additive(mask, is_causal, q, k)
    if enable_gqa:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
        dk = None if dk is None else dk.repeat_interleave(times, -3)
        dv = None if dv is None else dv.repeat_interleave(times, -3)
    batch, exact = q.shape[:-2], working_dtype(dtype)
    whose: Sequence[int] = batch
    if added is not None and math.prod(added.shape[:-2]) == 1:
        added, whose = added.reshape(1, *added.shape[-2:]), (1,)  # one matrix for all
    inputs = [
        *(_matrices(x, batch, dtype) for x in (q, k, v, dq, dk, dv)),
        _matrices(added, whose, exact),
        _matrices(noise, batch, exact),
    ]
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    with torch.autocast(device, enabled=False):
        out, dout = _Attention.apply(factor, *inputs)
    return out.view(*batch, *out.shape[-2:]), dout.view(*batch, *out.shape[-2:])
