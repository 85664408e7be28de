"""Scaled dot product attention by kernel: torch's fused ones have no forward-mode rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.rules.dual import TangentField, has_tangent, packed, padded, unpacked
from undrop.engines.rules.softmax import softmax
from undrop.intercept import Handler, Interception
from undrop.intercept.attention import AttentionCall, written_out
from undrop.kernels.attention import attention

__all__ = ["RULES"]


def _attention(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = AttentionCall(*args, **kwargs)
    tensors = (call.query, call.key, call.value)
    if not isinstance(mode.field, TangentField) or has_tangent(call.attn_mask):
        return written_out(mode, call, lambda x, dim: softmax(mode, torch.softmax, (x, dim), {}))
    if call.dropout_p == 0.0 and not has_tangent(*tensors):
        return func(*args, **kwargs)
    noise = _noise(mode, mode.field, call) if call.dropout_p > 0.0 else None
    alike = call.query.dim() == 4 and len({len(t) for t in tensors}) == 1
    rows = mode.field.carrying(call.query, 0, mixed=2) if alike else len(call.query)
    (q, dq), (k, dk), (v, dv) = (unpacked(t) for t in tensors)
    dq, dk, dv, noise = (None if t is None else t[:rows] for t in (dq, dk, dv, noise))
    how: dict[str, Any] = {
        "is_causal": call.is_causal,
        "scale": call.scale,
        "enable_gqa": call.enable_gqa,
    }
    mask = _part(call, slice(0, rows))
    out, tangent = attention(
        q[:rows], k[:rows], v[:rows], dq, dk, dv, mask=mask, noise=noise, **how
    )
    if rows == len(call.query):
        return packed(out, tangent)
    mask = _part(call, slice(rows, None))
    rest = F.scaled_dot_product_attention(q[rows:], k[rows:], v[rows:], attn_mask=mask, **how)
    out = torch.cat((out, rest))
    return packed(out, padded(tangent, out, 0))


def _noise(mode: Interception, field: TangentField, call: AttentionCall) -> Tensor | None:
    site = mode.site(
        call.shape, call.dropout_p, kind="attention", mask="per probability", label="attention"
    )
    return field.draw.scaled(site, call.query)


def _part(call: AttentionCall, rows: slice) -> Tensor | None:
    """The mask of some examples."""
    mask = call.attn_mask
    own = mask is not None and mask.dim() == call.query.dim() and len(mask) == len(call.query)
    return mask[rows] if own and mask is not None else mask


RULES: Mapping[Callable[..., Any], Handler] = {F.scaled_dot_product_attention: _attention}
