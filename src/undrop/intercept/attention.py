"""Site rules of attention: torch's fused kernels hide the dropout on the probabilities."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept.interception import SITE_RULES, Interception
from undrop.kernels.flex import FlexCall, attend, attend_without_kernel, flex_attention

_SITE_OPTIONS = {"kind": "attention", "mask": "per probability", "label": "attention"}


class AttentionCall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def ungrouped(call: AttentionCall) -> AttentionCall:
    """Return the call with keys and values repeated for grouped queries: one of each per query head."""
    if not call.enable_gqa:
        return call
    n = call.query.shape[-3] // call.key.shape[-3]
    key, value = call.key.repeat_interleave(n, -3), call.value.repeat_interleave(n, -3)
    return call._replace(key=key, value=value, enable_gqa=False)


def probabilities(call: AttentionCall, softmax: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return softmax(QKᵀ·scale + mask); rows that are masked everywhere are zero, as in torch."""
    scale = 1.0 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    scores = (call.query * scale) @ call.key.transpose(-2, -1)
    bias = additive_mask(call)
    if bias is None:
        return softmax(scores, -1)
    empty = (bias == -math.inf).all(-1, keepdim=True)
    # A row of -inf would have a NaN gradient, so take the softmax of zeros if no key is allowed.
    bias = bias.masked_fill(empty, 0.0)
    return softmax(scores + bias, -1).masked_fill(empty, 0.0)


def additive_mask(call: AttentionCall) -> Tensor | None:
    """Return the mask as a term of the logits, 0 or -inf for a boolean mask; None without a mask."""
    mask = call.attn_mask
    if call.is_causal:
        shape = (call.query.shape[-2], call.key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=call.query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device)
    return zeros.masked_fill(~mask, -math.inf)


def unfused_attention(
    mode: Interception,
    call: AttentionCall,
    softmax: Callable[[Tensor, int], Tensor] = torch.softmax,
) -> Tensor:
    """Return (softmax(QKᵀ·scale) ⊙ (1 + ε·σ·η)) V, computed without the fused kernel."""
    call = ungrouped(call)
    p = probabilities(call, softmax)
    if call.dropout_p > 0.0:
        p = mode.noisy(p, call.dropout_p, **_SITE_OPTIONS)
    return p @ call.value


@SITE_RULES.register(F.scaled_dot_product_attention)
def _attention(mode: Interception, *args: Any, **kwargs: Any) -> Tensor:
    call = AttentionCall(*args, **kwargs)
    if call.dropout_p > 0.0:
        return unfused_attention(mode, call)
    return F.scaled_dot_product_attention(*args, **kwargs)


def _without_overrides(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of a torch function that runs its body instead of passing the call to a mode.

    A rule runs while its mode is inactive. If the rule entered the mode and called the function itself,
    the mode would receive that call again. With the copy, the mode receives the calls in its body.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, lambda *_: False)}
    name, defaults, closure = function.__name__, function.__defaults__, function.__closure__
    copy = types.FunctionType(function.__code__, scope, name, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _without_overrides(inspect.unwrap(F.multi_head_attention_forward))


@SITE_RULES.register(F.multi_head_attention_forward)
def _multi_head(mode: Interception, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return _multi_head_attention(*args, **kwargs)


def _factors(mode: Interception, call: FlexCall) -> Tensor | None:
    """Return 1 + ε·σ·η in the shape of the probabilities; None if it is 1 everywhere."""
    if call.dropout_p == 0.0:
        return None
    ones = call.ones()
    factors = mode.noisy(ones, call.dropout_p, **_SITE_OPTIONS)
    return None if factors is ones else factors


@SITE_RULES.register(flex_attention)
def _flex_attention(mode: Interception, *args: Any) -> Any:
    call = FlexCall(*args)
    return attend(call, _factors(mode, call))


def unfused_flex(
    mode: Interception, call: FlexCall, softmax: Callable[[Tensor, int], Tensor] = torch.softmax
) -> Any:
    """Return FlexAttention with noise, computed without its kernel, which some engines can't use."""
    return attend_without_kernel(call, _factors(mode, call), softmax)
